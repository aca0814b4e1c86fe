// A tensor that is summed into: in the accumulator type, and rounded once at the end.
#pragma once

#include "blockcp/engine/engine.h"
#include "blockcp/engine/memory.h"

namespace blockcp {

struct Extent {
  int64_t batch, heads, rows, width;
};

// Rows of a tensor from flattened row `row` (batch * rows + local row) on; they end with the sequence.
Rows rows_at(const Tensor& tensor, int64_t row, int64_t local_rows, DType type);

// Sets every element; zero bits are 0 in every type.
void fill_zero(const Tensor& tensor, const Extent& extent, DType type, Parallel& parallel);

class Accumulator {
 public:
  Accumulator() = default;
  // Where `type` is its own accumulator the sums are made in `target` itself.
  Accumulator(const Tensor& target, const Extent& extent, DType type);

  const Tensor& tensor() const { return sums_; }  // accumulator(type)
  void clear(Parallel& parallel) const;
  void round(Parallel& parallel) const;  // writes the target

 private:
  bool in_place() const { return accumulator(type_) == type_; }

  Tensor target_, sums_;
  Extent extent_{};
  DType type_ = DType::f32;
  Memory memory_;
};

}  // namespace blockcp
