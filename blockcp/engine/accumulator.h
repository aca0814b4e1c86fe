// A result of backward: summed in the accumulator type and rounded once at the end, or written at once.
#pragma once

#include "blockcp/base/memory.h"
#include "blockcp/engine/engine.h"

namespace blockcp {

struct Extent {
  int64_t batch, heads, rows, width;
};

// Rows of a tensor from flattened row `row` (batch * rows + local row) on; they end with the sequence.
Rows rows_at(const Tensor& tensor, int64_t row, int64_t local_rows, DType type);

// Sets every element; zero bits are 0 in every type.
void fill_zero(const Tensor& tensor, const Extent& extent, DType type, Parallel& parallel);
// The same for `count` rows of one sequence from flattened row `row` on.
void fill_zero_rows(Tensor tensor, int64_t row, int64_t count, const Extent& whole, DType type, Parallel& parallel);

class Accumulator {
 public:
  Accumulator() = default;
  // Where `type` is its own accumulator the sums are made in `target` itself; and where nothing is `added`, so that
  // each row is written once or not at all.
  Accumulator(const Tensor& target, const Extent& extent, DType type, bool added = true);

  const Tensor& tensor() const { return sums_; }
  DType type() const { return added_ ? accumulator(type_) : type_; }  // of tensor()
  bool added() const { return added_; }
  const Extent& extent() const { return extent_; }

  void clear(Parallel& parallel) const;  // if added to
  void round(Parallel& parallel) const;  // writes the target

 private:
  Tensor target_, sums_;
  Extent extent_{};
  DType type_ = DType::f32;
  bool added_ = true;
  Memory memory_;
};

}  // namespace blockcp
