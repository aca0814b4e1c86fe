#include "blockcp/engine/accumulator.h"

#include <cstring>

#include "blockcp/kernels/element.h"

namespace blockcp {
namespace {

// body(batch, head) for every plane of a tensor.
void for_planes(const Extent& extent, Parallel& parallel, const std::function<void(int64_t, int64_t)>& body) {
  parallel.run(extent.batch * extent.heads,
               [&](int64_t plane, int) { body(plane / extent.heads, plane % extent.heads); });
}

int64_t plane_at(const Tensor& tensor, int64_t batch, int64_t head) {
  return batch * tensor.batch_stride + head * tensor.head_stride;
}

template <class T>
void zero_row(T* row, int64_t width, int64_t stride) {
  if (stride == 1)
    std::memset(row, 0, static_cast<size_t>(width) * sizeof(T));
  else
    for (int64_t c = 0; c < width; ++c) row[c * stride] = T{};
}

template <class T>
void zero_planes(const Tensor& tensor, const Extent& extent, Parallel& parallel) {
  for_planes(extent, parallel, [&](int64_t batch, int64_t head) {
    T* plane = static_cast<T*>(tensor.data) + plane_at(tensor, batch, head);
    for (int64_t r = 0; r < extent.rows; ++r) zero_row(plane + r * tensor.row_stride, extent.width, tensor.col_stride);
  });
}

template <DType type>
void round_planes(const Tensor& from, const Tensor& to, const Extent& extent, Parallel& parallel) {
  for_planes(extent, parallel, [&](int64_t batch, int64_t head) {
    const float* sums = static_cast<const float*>(from.data) + plane_at(from, batch, head);
    const int64_t plane = plane_at(to, batch, head);
    for (int64_t r = 0; r < extent.rows; ++r)
      for (int64_t c = 0; c < extent.width; ++c)
        store(type, to.data, plane + r * to.row_stride + c * to.col_stride, sums[r * extent.width + c]);
  });
}

}  // namespace

Rows rows_at(const Tensor& tensor, int64_t row, int64_t local_rows, DType type) {
  const int64_t batch = local_rows > 0 ? row / local_rows : 0, local = local_rows > 0 ? row % local_rows : 0;
  std::byte* data = static_cast<std::byte*>(tensor.data);
  if (data) data += (batch * tensor.batch_stride + local * tensor.row_stride) * size_of(type);
  return {data, tensor.row_stride, tensor.head_stride, tensor.col_stride};
}

void fill_zero(const Tensor& tensor, const Extent& extent, DType type, Parallel& parallel) {
  switch (size_of(type)) {
    case 2:
      return zero_planes<uint16_t>(tensor, extent, parallel);
    case 4:
      return zero_planes<uint32_t>(tensor, extent, parallel);
    default:
      return zero_planes<uint64_t>(tensor, extent, parallel);
  }
}

void fill_zero_rows(Tensor tensor, int64_t row, int64_t count, const Extent& whole, DType type, Parallel& parallel) {
  tensor.data = rows_at(tensor, row, whole.rows, type).data;
  fill_zero(tensor, {1, whole.heads, count, whole.width}, type, parallel);
}

Accumulator::Accumulator(const Tensor& target, const Extent& extent, DType type, bool added)
    : target_(target), sums_(target), extent_(extent), type_(type), added_(added) {
  if (this->type() == type) return;
  memory_ = Memory(extent.batch * extent.heads * extent.rows * extent.width * size_of(accumulator(type)));
  sums_ = {memory_.data(), extent.heads * extent.rows * extent.width, extent.rows * extent.width, extent.width, 1};
}

void Accumulator::clear(Parallel& parallel) const {
  if (added_) fill_zero(sums_, extent_, type(), parallel);
}

void Accumulator::round(Parallel& parallel) const {
  if (type() == type_) return;
  if (type_ == DType::bf16) round_planes<DType::bf16>(sums_, target_, extent_, parallel);
  if (type_ == DType::f16) round_planes<DType::f16>(sums_, target_, extent_, parallel);
}

}  // namespace blockcp
