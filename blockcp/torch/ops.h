// The attention ops below autograd, as the dispatcher calls them.
//
// torch.ops.blockcp.attention: q [B, Hq, L, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv] of this rank, any strides ->
// out [B, Hq, L, Dv] like q, contiguous, and lse [B, Hq, L], fp32 (fp64 for fp64), not differentiable.
// torch.ops.blockcp.attention_backward: dout [B, Hq, L, Dv], any strides -> dq, dk, dv, contiguous.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "blockcp/base/machine.h"

namespace blockcp {

// This one, asked once.
const Machine& machine();

// What every attention op carries beside its tensors.
struct CallArgs {
  at::Tensor plan;              // a handle, see plans.h
  std::string mask;             // empty: the plan's only one
  std::string group;            // empty: no group, one rank
  std::optional<double> scale;  // empty: D ** -0.5
  std::string kernel;           // empty: the best one
  bool agree = true;            // compare the call with other ranks before anything is sent
  int64_t needs_grad = 0;       // bits: q, k, v; set by the Autograd kernel
};

inline constexpr const char* kAttentionSchema =
    "attention(Tensor q, Tensor k, Tensor v, Tensor plan, str mask=\"\", str group=\"\", float? scale=None, "
    "str kernel=\"\", bool agree=True, int needs_grad=0, str trouble=\"\") -> (Tensor out, Tensor lse)";
inline constexpr const char* kAttentionBackwardSchema =
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor plan, str mask, "
    "str group, float? scale, str kernel, bool agree, int needs_grad) -> (Tensor dq, Tensor dk, Tensor dv)";

using AttentionResult = std::tuple<at::Tensor, at::Tensor>;
using AttentionGrads = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Through the dispatcher. `trouble`: an error that Python found in this rank's arguments; all ranks raise it together.
AttentionResult call_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const CallArgs& args,
                               const std::string& trouble);
AttentionGrads call_attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                       const CallArgs& args);

}  // namespace blockcp
