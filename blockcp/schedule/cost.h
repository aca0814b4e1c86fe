// What a schedule costs: rows, bytes and work per rank, counted before anything runs.
#pragma once

#include <cstdint>
#include <vector>

#include "blockcp/base/dtype.h"
#include "blockcp/schedule/fill.h"

namespace blockcp {

// What turns rows into bytes.
struct Shape {
  int64_t q_heads = 8, kv_heads = 2, head_dim = 128, value_dim = 128;
  DType dtype = DType::f32;

  int64_t kv_row_bytes() const { return kv_heads * (head_dim + value_dim) * size_of(dtype); }
  // Gradients travel in the accumulator type.
  int64_t dkv_row_bytes() const { return kv_heads * (head_dim + value_dim) * size_of(accumulator(dtype)); }
  friend bool operator==(const Shape&, const Shape&) = default;
};

struct RankCost {
  int64_t forward_sent = 0, forward_received = 0;    // rows of K/V
  int64_t backward_sent = 0, backward_received = 0;  // rows of K/V delivered again
  int64_t gradient_sent = 0, gradient_received = 0;  // rows of dK/dV
  int64_t pairs = 0;                                 // visible (q, k) pairs: the work
  int64_t scratch_rows = 0;                          // rows of kv scratch buffers
  int steps = 0;                                     // forward steps with a transfer
};

RankCost cost(const Problem& problem, const Schedule& schedule);
int64_t forward_bytes_received(const RankCost& cost, const Shape& shape);
int64_t backward_bytes_received(const RankCost& cost, const Shape& shape);

// Throws Error(argument) where the bytes of so many rows cannot be counted in 64 bits.
void check_countable(const Shape& shape, int64_t rows);

// Visible pairs of each rank.
std::vector<int64_t> work(const Problem& problem);
// Largest over mean; 1 where there is no work.
double balance(const std::vector<int64_t>& work);

}  // namespace blockcp
