// The kernel alone on packed documents, without plan and group, in flash-attention's conventions.
//
// torch.ops.blockcp.varlen: q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], any strides, and int32 or int64 offsets
// [documents + 1] -> out [Tq, Hq, Dv] like q and lse [Hq, Tq], fp32 (fp64 for fp64), not differentiable, contiguous.
// window: empty, one number or a pair, as in mask.h.
// torch.ops.blockcp.varlen_backward: dout [Tq, Hq, Dv], any strides -> dq, dk, dv, contiguous.
#include "blockcp/engine/varlen.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>

#include "blockcp/kernels/select.h"
#include "blockcp/schedule/mask.h"
#include "blockcp/torch/check_tensor.h"
#include "blockcp/torch/fresh.h"
#include "blockcp/torch/ops.h"
#include "blockcp/torch/torch_parallel.h"

namespace blockcp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What both ops carry beside q, k and v.
struct VarlenArgs {
  at::Tensor cu_seqlens_q, cu_seqlens_k;
  bool causal = false;
  std::vector<int64_t> window;
  std::optional<double> scale;  // empty: D ** -0.5
  std::string kernel;           // empty: the best one
};

at::Tensor offsets_of(const at::Tensor& tensor, std::string_view name) {
  check_argument(tensor.is_cpu(), "[varlen] {} must be on the CPU in this build, but it is on {}.", name,
                 tensor.device().str());
  check_argument(tensor.dim() == 1, "[varlen] {} must have one dimension, but its shape is {}.", name,
                 text(tensor.sizes()));
  check_argument(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong || tensor.numel() == 0,
                 "[varlen] {} must be int32 or int64, but it is {}.", name, c10::toString(tensor.scalar_type()));
  return tensor.to(at::kLong).contiguous();
}

Mask mask_of(bool causal, const std::vector<int64_t>& window) {
  check_argument(window.size() <= 2,
                 "[varlen] window must be one number or a pair (left, right), but it has {} numbers.", window.size());
  if (window.size() == 2) return windowed(window[0], window[1], causal);
  return windowed(window.empty() ? -1 : window[0], causal);
}

// One call, and all that lives longer than the executor's view of it.
class VarlenCall {
 public:
  VarlenCall(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const VarlenArgs& args)
      : shape_(check_packed_qkv(q, k, v)),
        q_offsets_(offsets_of(args.cu_seqlens_q, "cu_seqlens_q")),
        k_offsets_(offsets_of(args.cu_seqlens_k, "cu_seqlens_k")),
        parallel_(make_torch_parallel()),
        call_{.shape = shape_,
              .q = {"cu_seqlens_q", span_of(q_offsets_), q.size(0)},
              .k = {"cu_seqlens_k", span_of(k_offsets_), k.size(0)},
              .band = closed_form(mask_of(args.causal, args.window)),
              .scale = checked_scale(args.scale, shape_),
              .kernel = select_kernel(shape_, machine(), args.kernel),
              .parallel = *parallel_} {
    check_offsets(call_.q, call_.k);
  }

  const Varlen& operator*() const { return call_; }
  const Varlen* operator->() const { return &call_; }

 private:
  const AttentionShape shape_;
  const at::Tensor q_offsets_, k_offsets_;
  const std::unique_ptr<Parallel> parallel_;
  const Varlen call_;
};

Tensor rows_of(const at::Tensor& tensor) {  // [T, H, D]
  return {tensor.data_ptr(), 0, tensor.stride(1), tensor.stride(0), tensor.stride(2)};
}

Tensor rows_of_lse(const at::Tensor& tensor) {  // [H, T]
  return {tensor.data_ptr(), 0, tensor.stride(0), tensor.stride(1), 1};
}

AttentionResult varlen_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const VarlenArgs& args,
                              std::optional<int64_t> longest_q, std::optional<int64_t> longest_k) {
  const VarlenCall call(q, k, v, args);
  if (longest_q) check_longest(call->q, "max_seqlen_q", *longest_q);
  if (longest_k) check_longest(call->k, "max_seqlen_k", *longest_k);
  const at::Tensor out = fresh({q.size(0), q.size(1), v.size(2)}, q.options());
  const auto sums = q.options().dtype(scalar_type(accumulator(call->shape.dtype)));
  const at::Tensor lse = fresh({q.size(1), q.size(0)}, sums);
  forward(*call, {rows_of(q), rows_of(k), rows_of(v), rows_of(out), rows_of_lse(lse)});
  return {out, lse};
}

AttentionGrads varlen_backward_kernel(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                      const VarlenArgs& args) {
  const VarlenCall call(q, k, v, args);
  const std::array<int64_t, 3> of_out = {q.size(0), q.size(1), v.size(2)};
  const std::array<int64_t, 2> of_lse = {q.size(1), q.size(0)};
  check_saved(out, lse, dout, of_out, of_lse, call->shape.dtype);
  const auto like = [](const at::Tensor& tensor) { return fresh(tensor.sizes(), tensor.options()); };
  const at::Tensor dq = like(q), dk = like(k), dv = like(v);
  backward(*call, {rows_of(q), rows_of(k), rows_of(v), rows_of(out), rows_of_lse(lse), rows_of(dout), rows_of(dq),
                   rows_of(dk), rows_of(dv)});
  return {dq, dk, dv};
}

AttentionResult varlen_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                           std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k, bool causal,
                           at::IntArrayRef window, std::optional<double> scale, std::string kernel) {
  return translated([&] {
    return varlen_kernel(q, k, v, {cu_seqlens_q, cu_seqlens_k, causal, window.vec(), scale, kernel}, max_seqlen_q,
                         max_seqlen_k);
  });
}

AttentionGrads varlen_backward_cpu(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                   const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                   const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, bool causal,
                                   at::IntArrayRef window, std::optional<double> scale, std::string kernel) {
  return translated([&] {
    return varlen_backward_kernel(dout, q, k, v, out, lse,
                                  {cu_seqlens_q, cu_seqlens_k, causal, window.vec(), scale, kernel});
  });
}

AttentionResult varlen_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                            std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k, bool causal,
                            at::IntArrayRef window, std::optional<double> scale, std::string kernel) {
  if (!all_meta({q, k, v}))
    return varlen_cpu(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale, kernel);
  const auto lse_type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const c10::SymInt rows = q.sym_size(0), heads = q.sym_size(1);
  return {at::empty_symint({rows, heads, v.sym_size(2)}, q.options()),
          at::empty_symint({heads, rows}, q.options().dtype(lse_type))};
}

AttentionGrads varlen_backward_meta(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                    const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, bool causal,
                                    at::IntArrayRef window, std::optional<double> scale, std::string kernel) {
  if (!all_meta({dout, q, k, v, out, lse}))
    return varlen_backward_cpu(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, causal, window, scale, kernel);
  const auto like = [](const at::Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(q), like(k), like(v)};
}

const auto& varlen_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("blockcp::varlen", "").typed<decltype(varlen_cpu)>();
  return op;
}

const auto& varlen_backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("blockcp::varlen_backward", "")
                             .typed<decltype(varlen_backward_cpu)>();
  return op;
}

struct VarlenFunction : torch::autograd::Function<VarlenFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const VarlenArgs& args, std::optional<int64_t> longest_q,
                               std::optional<int64_t> longest_k) {
    const auto [out, lse] = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      return varlen_op().call(q, k, v, args.cu_seqlens_q, args.cu_seqlens_k, longest_q, longest_k, args.causal,
                              args.window, args.scale, args.kernel);
    }();
    ctx->mark_non_differentiable({lse});
    ctx->save_for_backward({q, k, v, out, lse, args.cu_seqlens_q, args.cu_seqlens_k});
    ctx->saved_data["causal"] = args.causal;
    ctx->saved_data["window"] = args.window;
    ctx->saved_data["scale"] = args.scale;
    ctx->saved_data["kernel"] = args.kernel;
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const auto [dq, dk, dv] = varlen_backward_op().call(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6], data["causal"].toBool(),
        data["window"].toIntVector(), data["scale"].toOptional<double>(), data["kernel"].toStringRef());
    const auto wanted = [&](size_t input, const at::Tensor& grad) {
      return ctx->needs_input_grad(input) ? grad : at::Tensor();
    };
    return {wanted(0, dq), wanted(1, dk), wanted(2, dv), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

AttentionResult varlen_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                                std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k, bool causal,
                                at::IntArrayRef window, std::optional<double> scale, std::string kernel) {
  const std::string trouble = tangent_trouble({{"q", q}, {"k", k}, {"v", v}});
  TORCH_CHECK_VALUE(trouble.empty(), trouble);
  if (!at::GradMode::is_enabled() || !(q.requires_grad() || k.requires_grad() || v.requires_grad())) {
    at::AutoDispatchBelowADInplaceOrView below;
    return varlen_op().call(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, scale,
                            kernel);
  }
  const VarlenArgs args{cu_seqlens_q, cu_seqlens_k, causal, window.vec(), scale, kernel};
  const variable_list results = VarlenFunction::apply(q, k, v, args, max_seqlen_q, max_seqlen_k);
  return {results[0], results[1]};
}

TORCH_LIBRARY_FRAGMENT(blockcp, m) {
  m.def(
      "varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int? max_seqlen_q=None, "
      "int? max_seqlen_k=None, bool causal=False, int[] window=[], float? scale=None, str kernel=\"\") -> "
      "(Tensor out, Tensor lse)");
  m.def(
      "varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, bool causal, int[] window, float? scale, str kernel) -> (Tensor dq, Tensor dk, Tensor dv)");
}

TORCH_LIBRARY_IMPL(blockcp, CPU, m) {
  m.impl("varlen", varlen_cpu);
  m.impl("varlen_backward", varlen_backward_cpu);
}

TORCH_LIBRARY_IMPL(blockcp, Meta, m) {
  m.impl("varlen", varlen_meta);
  m.impl("varlen_backward", varlen_backward_meta);
}

TORCH_LIBRARY_IMPL(blockcp, Autograd, m) {
  m.impl("varlen", varlen_autograd);
  m.impl("varlen_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace
}  // namespace blockcp
