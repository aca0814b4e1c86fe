#include "blockcp/kernels/partial.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "blockcp/kernels/attention.h"
#include "blockcp/kernels/element.h"

namespace blockcp {

namespace {

// sum of a(c) b(c): eight sums, so that the order of additions does not hold it up, and one fixed order of adding them,
// whatever the strides.
template <class T, class A, class B>
T dot(const A& a, const B& b, int64_t count) {
  T sums[8] = {};
  int64_t c = 0;
  for (; c + 8 <= count; c += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += a(c + lane) * b(c + lane);
  }
  for (; c < count; ++c) sums[0] += a(c) * b(c);
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

template <class T>
T delta_of_row(const AttentionShape& shape, const AttentionBlock& block, int64_t row, int64_t head) {
  if (shape.dtype == accumulator(shape.dtype) && block.out.col == 1 && block.dout.col == 1) {
    const T* out = static_cast<const T*>(block.out.data) + offset(block.out, row, head);
    const T* dout = static_cast<const T*>(block.dout.data) + offset(block.dout, row, head);
    return dot<T>([=](int64_t c) { return out[c]; }, [=](int64_t c) { return dout[c]; }, shape.value_dim);
  }
  const auto at = [&](const Rows& rows) {
    return [&](int64_t c) { return static_cast<T>(load(shape.dtype, rows, row, head, c)); };
  };
  return dot<T>(at(block.out), at(block.dout), shape.value_dim);
}

}  // namespace

void compute_delta(const AttentionShape& shape, std::span<const AttentionBlock> blocks, Parallel& parallel) {
  constexpr int64_t kRows = 128;
  const DType sums = accumulator(shape.dtype);
  std::vector<std::pair<const AttentionBlock*, int64_t>> items;  // runs of rows
  for (const AttentionBlock& block : blocks) {
    for (int64_t row = 0; row < block.q_count; row += kRows) items.emplace_back(&block, row);
  }
  parallel.run(static_cast<int64_t>(items.size()), [&](int64_t item, int) {
    const auto& [block, first] = items[static_cast<size_t>(item)];
    for (int64_t row = first; row < std::min(first + kRows, block->q_count); ++row) {
      for (int64_t head = 0; head < shape.q_heads; ++head) {
        const double delta = sums == DType::f64 ? delta_of_row<double>(shape, *block, row, head)
                                                : delta_of_row<float>(shape, *block, row, head);
        store(sums, block->delta, row, head, 0, delta);
      }
    }
  });
}

}  // namespace blockcp
