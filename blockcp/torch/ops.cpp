#include "blockcp/torch/ops.h"

#include <torch/library.h>

#include <array>

#include "blockcp/base/peak.h"
#include "blockcp/kernels/select.h"
#include "blockcp/torch/c10d_transport.h"
#include "blockcp/torch/check_tensor.h"
#include "blockcp/torch/fresh.h"
#include "blockcp/torch/plans.h"
#include "blockcp/torch/torch_parallel.h"

namespace blockcp {
namespace {

void check_group(const Plan& plan, const Group& group) {
  check_argument(plan.world() == group.world(),
                 "[torch] the plan and the group must have the same ranks, but the plan is for {} and group \"{}\" has "
                 "{}. Was the plan built with another world_size=, or is this another mesh dimension's group?",
                 plan.world(), group.name(), group.world());
  check_argument(plan.rank() == group.rank(),
                 "[torch] the plan must be this rank's, but it is for rank {} and this is rank {} of group \"{}\".",
                 plan.rank(), group.rank(), group.name());
}

void check_rows(const Plan& plan, const at::Tensor& q) {
  check_argument(q.size(0) == plan.packing().batch(),
                 "[torch] q has a batch of {}, but this plan is for {} sequences. Was q sharded with another plan?",
                 q.size(0), plan.packing().batch());
  check_argument(
      q.size(2) == plan.local_rows(),
      "[torch] q has {} rows, but this plan gives rank {} {} rows. Was q sharded with another plan, or is it "
      "[B, L, H, D] without format=\"blhd\"?",
      q.size(2), plan.rank(), plan.local_rows());
}

// Everything of one call that lives longer than the executor's view of it.
struct Prepared {
  std::shared_ptr<const Plan> plan;
  const Plan::Entry* entry = nullptr;
  AttentionShape shape;
  double scale = 1;
  const Kernel* kernel = nullptr;
};

Prepared prepare(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CallArgs& args,
                 const Group& group) {
  Prepared call{.plan = find_plan(args.plan)};
  check_group(*call.plan, group);
  call.entry = &call.plan->entry(args.mask);
  call.shape = check_qkv(q, k, v);
  check_rows(*call.plan, q);
  call.scale = checked_scale(args.scale, call.shape);
  call.kernel = &select_kernel(call.shape, machine(), args.kernel);
  return call;
}

// Runs `body`; what it throws, this rank's own trouble, is thrown on all ranks together: the others meet it in the
// agreement that opens their call.
template <class Body>
auto or_tell_all(Group& group, const CallRecord& record, bool tell, Body&& body) {
  Trouble trouble;
  try {
    return body();
  } catch (...) {
    trouble = trouble_of(std::current_exception());
  }
  CallRecord troubled = record;
  troubled.trouble = trouble.text;
  troubled.trouble_is_argument = trouble.is_argument;
  if (tell) agree(group, troubled);
  throw Error(trouble.is_argument ? ErrorKind::argument : ErrorKind::system, trouble.text);
}

Call executor_call(const Prepared& call, const CallArgs& args, Group& group, Parallel& parallel, int64_t number) {
  return {.schedule = call.entry->schedule,
          .shape = call.shape,
          .batch = call.plan->packing().batch(),
          .local_rows = call.plan->local_rows(),
          .scale = call.scale,
          .kernel = *call.kernel,
          .transport = group,
          .parallel = parallel,
          .number = number,
          .needs_grad = static_cast<uint32_t>(args.needs_grad),
          .agree = args.agree};
}

bool is_empty(const Plan& plan) { return plan.packing().batch() == 0 || plan.packing().rows() == 0; }

AttentionResult attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CallArgs& args,
                                 const std::string& trouble) {
  const auto group = find_group(args.group);
  const int64_t number = group->next_call();
  Prepared call;
  at::Tensor out, lse;
  or_tell_all(*group, {.call = number, .phase = Phase::forward}, args.agree, [&] {
    check_argument(trouble.empty(), "{}", trouble);
    call = prepare(q, k, v, args, *group);
    out = fresh({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
    lse = fresh({q.size(0), q.size(1), q.size(2)}, q.options().dtype(scalar_type(accumulator(call.shape.dtype))));
  });
  count_call(args.plan);
  if (is_empty(*call.plan)) return {out, lse};
  const auto parallel = make_torch_parallel();
  forward(executor_call(call, args, *group, *parallel, number),
          {.q = view_of(q), .k = view_of(k), .v = view_of(v), .out = view_of(out), .lse = view_of(lse)});
  return {out, lse};
}

AttentionGrads attention_backward_kernel(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                         const CallArgs& args) {
  const auto group = find_group(args.group);
  const int64_t number = group->next_call();
  Prepared call;
  at::Tensor dq, dk, dv;
  or_tell_all(*group, {.call = number, .phase = Phase::backward}, args.agree, [&] {
    call = prepare(q, k, v, args, *group);
    const std::array<int64_t, 4> of_out = {q.size(0), q.size(1), q.size(2), v.size(3)};
    check_saved(out, lse, dout, of_out, at::IntArrayRef(of_out).slice(0, 3), call.shape.dtype);
    dq = fresh(q.sizes(), q.options());
    dk = fresh(k.sizes(), k.options());
    dv = fresh(v.sizes(), v.options());
  });
  if (is_empty(*call.plan)) return {dq, dk, dv};
  const auto parallel = make_torch_parallel();
  backward(executor_call(call, args, *group, *parallel, number), {.q = view_of(q),
                                                                  .k = view_of(k),
                                                                  .v = view_of(v),
                                                                  .out = view_of(out),
                                                                  .lse = view_of(lse),
                                                                  .dout = view_of(dout),
                                                                  .dq = view_of(dq),
                                                                  .dk = view_of(dk),
                                                                  .dv = view_of(dv)});
  return {dq, dk, dv};
}

AttentionResult attention_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& plan,
                              std::string mask, std::string group, std::optional<double> scale, std::string kernel,
                              bool agree, int64_t needs_grad, std::string trouble) {
  return translated([&] {
    return attention_kernel(q, k, v, {plan, mask, group, scale, kernel, agree, needs_grad}, trouble);
  });
}

AttentionGrads attention_backward_cpu(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                      const at::Tensor& plan, std::string mask, std::string group,
                                      std::optional<double> scale, std::string kernel, bool agree, int64_t needs_grad) {
  return translated([&] {
    return attention_backward_kernel(dout, q, k, v, out, lse, {plan, mask, group, scale, kernel, agree, needs_grad});
  });
}

AttentionResult attention_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& plan,
                               std::string mask, std::string group, std::optional<double> scale, std::string kernel,
                               bool agree, int64_t needs_grad, std::string trouble) {
  if (!all_meta({q, k, v})) return attention_cpu(q, k, v, plan, mask, group, scale, kernel, agree, needs_grad, trouble);
  const auto lse_type = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const c10::SymInt batch = q.sym_size(0), heads = q.sym_size(1), rows = q.sym_size(2);
  return {at::empty_symint({batch, heads, rows, v.sym_size(3)}, q.options()),
          at::empty_symint({batch, heads, rows}, q.options().dtype(lse_type))};
}

AttentionGrads attention_backward_meta(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                       const at::Tensor& plan, std::string mask, std::string group,
                                       std::optional<double> scale, std::string kernel, bool agree,
                                       int64_t needs_grad) {
  if (!all_meta({dout, q, k, v, out, lse}))
    return attention_backward_cpu(dout, q, k, v, out, lse, plan, mask, group, scale, kernel, agree, needs_grad);
  const auto like = [](const at::Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(q), like(k), like(v)};
}

// What the multiply-adds of a kind need of the processor.
struct PeakKind {
  std::string_view name;
  Fma fma;
  bool Machine::*needs;  // nullptr: nothing
};
constexpr PeakKind kPeakKinds[] = {{"bf16_avx512", Fma::bf16_avx512, &Machine::avx512_bf16},
                                   {"fp32_avx512", Fma::fp32_avx512, &Machine::avx512},
                                   {"fp32_avx2", Fma::fp32_avx2, &Machine::avx2},
                                   {"fp32_neon", Fma::fp32_neon, &Machine::neon},
                                   {"scalar", Fma::scalar, nullptr}};

// For benchmarks: GFLOP/s of multiply-adds on `threads` threads of a pool of its own, 0 where the processor has none of
// the kind.
double fma_peak_here(int64_t threads, std::string kind) {
  return translated([&] {
    check_argument(threads >= 1 && threads <= 4096, "[torch] threads must be from 1 to 4096, but is {}.", threads);
    for (const auto& [name, fma, needs] : kPeakKinds) {
      if (name != kind) continue;
      if (needs != nullptr && !(machine().*needs)) return 0.0;
      return fma_peak(*make_pool(static_cast<int>(threads)), fma, Clock(0));
    }
    fail_argument(
        "[torch] the kind of a peak must be bf16_avx512, fp32_avx512, fp32_avx2, fp32_neon or scalar, but is \"{}\".",
        kind);
  });
}

}  // namespace

const Machine& machine() {
  static const Machine detected = detect_machine();
  return detected;
}

AttentionResult call_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CallArgs& args,
                               const std::string& trouble) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("blockcp::attention", "").typed<decltype(attention_cpu)>();
  return op.call(q, k, v, args.plan, args.mask, args.group, args.scale, args.kernel, args.agree, args.needs_grad,
                 trouble);
}

AttentionGrads call_attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                       const CallArgs& args) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("blockcp::attention_backward", "")
                             .typed<decltype(attention_backward_cpu)>();
  return op.call(dout, q, k, v, out, lse, args.plan, args.mask, args.group, args.scale, args.kernel, args.agree,
                 args.needs_grad);
}

TORCH_LIBRARY(blockcp, m) {
  m.def(kAttentionSchema);
  m.def(kAttentionBackwardSchema);
  m.def("_fma_peak(int threads, str kind) -> float", fma_peak_here);
}

TORCH_LIBRARY_IMPL(blockcp, CPU, m) {
  m.impl("attention", attention_cpu);
  m.impl("attention_backward", attention_backward_cpu);
}

TORCH_LIBRARY_IMPL(blockcp, Meta, m) {
  m.impl("attention", attention_meta);
  m.impl("attention_backward", attention_backward_meta);
}

}  // namespace blockcp
