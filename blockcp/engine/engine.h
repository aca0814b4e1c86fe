// The executor: one forward, one backward, any schedule. It knows order and nothing else.
//
// It never throws between a schedule's first and last transfer: a kernel that fails on one rank leaves zeros, the
// transfers are completed, and all ranks throw together afterwards. The group stays usable.
#pragma once

#include "blockcp/engine/agreement.h"
#include "blockcp/kernels/attention.h"
#include "blockcp/schedule/schedule.h"
#include "blockcp/transport/transport.h"

namespace blockcp {

// A local tensor [batch, heads, rows, width]; strides in elements, any.
struct Tensor {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, col_stride = 1;
};

// [batch, heads, rows, width] without gaps.
inline Tensor contiguous(void* data, int64_t heads, int64_t rows, int64_t width) {
  return {data, heads * rows * width, rows * width, width, 1};
}

struct Call {
  const Schedule& schedule;
  AttentionShape shape;
  int64_t batch = 1, local_rows = 0;  // of the tensors
  double scale = 1;
  const Kernel& kernel;
  Transport& transport;
  Parallel& parallel;
  int64_t number = 0;       // counts the calls of a group, for agreement
  uint32_t needs_grad = 0;  // bits: q, k, v
  bool agree = true;        // check before the first transfer and after the last; see agreement.h
};

// q [batch, q_heads, rows, head_dim], k and v [batch, kv_heads, rows, head_dim | value_dim], out like q with value_dim:
// storage type. lse [batch, q_heads, rows], accumulator type, natural log. out and lse are written everywhere; padding
// gets 0 and -inf.
struct ForwardTensors {
  Tensor q, k, v, out, lse;
};
void forward(const Call& call, const ForwardTensors& tensors);

// All of them without gaps, of `rows` local rows.
inline ForwardTensors contiguous(const AttentionShape& shape, int64_t rows, void* q, void* k, void* v, void* out,
                                 void* lse) {
  return {contiguous(q, shape.q_heads, rows, shape.head_dim), contiguous(k, shape.kv_heads, rows, shape.head_dim),
          contiguous(v, shape.kv_heads, rows, shape.value_dim), contiguous(out, shape.q_heads, rows, shape.value_dim),
          contiguous(lse, shape.q_heads, rows, 1)};
}

// From forward's q, k, v, out and lse and from dout: dq, dk, dv, written everywhere (padding gets 0), each summed in
// the accumulator type over blocks and ranks in a fixed order and rounded once. Adds nothing to what was there.
struct BackwardTensors {
  Tensor q, k, v, out, lse, dout, dq, dk, dv;
};
void backward(const Call& call, const BackwardTensors& tensors);

// This call as other ranks should see it.
CallRecord record_of(const Call& call, Phase phase);

}  // namespace blockcp
