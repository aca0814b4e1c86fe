// The tensors of a run, whole: ranks see strided parts of them, so that nothing is gathered to be checked.
#pragma once

#include "blockcp/base/memory.h"
#include "blockcp/engine/engine.h"

namespace blockcp {

// [heads, rows, width] of one sequence.
class WholeTensor {
 public:
  WholeTensor(DType type, int64_t heads, int64_t rows, int64_t width);

  // Values of unit variance; equal for equal seeds, whatever the threads.
  void fill(uint64_t seed, Parallel& parallel);

  DType type() const { return type_; }
  int64_t heads() const { return heads_; }
  int64_t width() const { return width_; }
  Tensor from(int64_t row) const;  // rows from `row` on, as a batch of one
  double at(int64_t head, int64_t row, int64_t col) const;

 private:
  DType type_;
  int64_t heads_, rows_, width_;
  Memory memory_;
};

struct WholeTensors {
  WholeTensors(const AttentionShape& shape, int64_t rows);
  WholeTensor q, k, v, out, lse, dout, dq, dk, dv;
};

}  // namespace blockcp
