// Gradients of blockcp::attention: a Function around the op below, whose backward is an op of its own, so that
// compilers, checkpointing and saved-tensor hooks see both.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "blockcp/torch/check_tensor.h"
#include "blockcp/torch/ops.h"

namespace blockcp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Everything goes into saved_data, never into thread_local state: backward may run on another thread.
void keep(AutogradContext* ctx, const CallArgs& args) {
  ctx->saved_data["plan"] = args.plan;  // keeps the plan alive; not a saved tensor, so that hooks leave it alone
  ctx->saved_data["mask"] = args.mask;
  ctx->saved_data["group"] = args.group;
  ctx->saved_data["scale"] = args.scale;
  ctx->saved_data["kernel"] = args.kernel;
  ctx->saved_data["agree"] = args.agree;
  ctx->saved_data["needs_grad"] = args.needs_grad;
}

CallArgs kept(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  return {data["plan"].toTensor(),      data["mask"].toStringRef(),
          data["group"].toStringRef(),  data["scale"].toOptional<double>(),
          data["kernel"].toStringRef(), data["agree"].toBool(),
          data["needs_grad"].toInt()};
}

int64_t needs_grad(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return (q.requires_grad() ? 1 : 0) | (k.requires_grad() ? 2 : 0) | (v.requires_grad() ? 4 : 0);
}

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const CallArgs& args, const std::string& trouble) {
    const auto [out, lse] = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      return call_attention(q, k, v, args, trouble);
    }();
    ctx->mark_non_differentiable({lse});
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({q, k, v, out, lse});
    keep(ctx, args);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();  // first: under checkpointing this runs the forward again
    const at::Tensor& out = saved[3];
    // A rank whose output nobody used still takes part: others wait for its keys.
    const at::Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);
    const auto [dq, dk, dv] = call_attention_backward(dout, saved[0], saved[1], saved[2], out, saved[4], kept(ctx));
    const auto wanted = [&](size_t input, const at::Tensor& grad) {
      return ctx->needs_input_grad(input) ? grad : at::Tensor();
    };
    return {wanted(0, dq), wanted(1, dk), wanted(2, dv), at::Tensor(), at::Tensor()};
  }
};

AttentionResult attention_autograd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& plan, std::string mask, std::string group,
                                   std::optional<double> scale, std::string kernel, bool agree, int64_t,
                                   std::string trouble) {
  if (trouble.empty()) trouble = tangent_trouble({{"q", q}, {"k", k}, {"v", v}});
  CallArgs args{plan, mask, group, scale, kernel, agree, needs_grad(q, k, v)};
  if (!at::GradMode::is_enabled() || args.needs_grad == 0) {
    args.needs_grad = 0;
    at::AutoDispatchBelowADInplaceOrView below;
    return call_attention(q, k, v, args, trouble);
  }
  const variable_list results = Attention::apply(q, k, v, args, trouble);
  return {results[0], results[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(blockcp, Autograd, m) {
  m.impl("attention", attention_autograd);
  m.impl("attention_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace blockcp
