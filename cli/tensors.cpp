#include "cli/tensors.h"

#include "blockcp/kernels/element.h"

namespace blockcp {
namespace {

// A uniform value of unit variance for each (seed, index).
double random_value(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0x9e3779b97f4a7c15u + index * 0xbf58476d1ce4e5b9u + 0x94d049bb133111ebu;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return (static_cast<double>(x >> 11) * 0x1p-52 - 1) * 1.7320508075688772;
}

}  // namespace

WholeTensor::WholeTensor(DType type, int64_t heads, int64_t rows, int64_t width)
    : type_(type), heads_(heads), rows_(rows), width_(width), memory_(heads * rows * width * size_of(type)) {}

void WholeTensor::fill(uint64_t seed, Parallel& parallel) {
  constexpr int64_t kChunk = 1 << 16;
  const int64_t elements = heads_ * rows_ * width_;
  parallel.run((elements + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
    for (int64_t i = chunk * kChunk; i < std::min(elements, (chunk + 1) * kChunk); ++i)
      store(type_, memory_.data(), i, random_value(seed, static_cast<uint64_t>(i)));
  });
}

Tensor WholeTensor::from(int64_t row) const {
  std::byte* data = memory_.data();
  if (data) data += row * width_ * size_of(type_);
  return contiguous(data, heads_, rows_, width_);
}

double WholeTensor::at(int64_t head, int64_t row, int64_t col) const {
  return load(type_, memory_.data(), (head * rows_ + row) * width_ + col);
}

WholeTensors::WholeTensors(const AttentionShape& shape, int64_t rows)
    : q(shape.dtype, shape.q_heads, rows, shape.head_dim),
      k(shape.dtype, shape.kv_heads, rows, shape.head_dim),
      v(shape.dtype, shape.kv_heads, rows, shape.value_dim),
      out(shape.dtype, shape.q_heads, rows, shape.value_dim),
      lse(accumulator(shape.dtype), shape.q_heads, rows, 1),
      dout(shape.dtype, shape.q_heads, rows, shape.value_dim),
      dq(shape.dtype, shape.q_heads, rows, shape.head_dim),
      dk(shape.dtype, shape.kv_heads, rows, shape.head_dim),
      dv(shape.dtype, shape.kv_heads, rows, shape.value_dim) {}

}  // namespace blockcp
