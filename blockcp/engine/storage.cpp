#include "blockcp/engine/storage.h"

#include <algorithm>
#include <cstring>

namespace blockcp {

KvRows packed_rows(const AttentionShape& shape, std::byte* data, DType type) {
  const int64_t k_width = shape.kv_heads * shape.head_dim, row = k_width + shape.kv_heads * shape.value_dim;
  std::byte* v = data ? data + k_width * size_of(type) : nullptr;
  return {{data, row, shape.head_dim, 1}, {v, row, shape.value_dim, 1}};
}

Storage::Storage(const Call& call, const Callers& callers) : call_(call), callers_(callers) {
  for (const Buffer& buffer : call.schedule.buffers) {
    const bool needed = !buffer.callers && (buffer.role == Role::kv || callers.dk);
    scratch_.emplace_back(needed ? buffer.rows * row_bytes(call, buffer.role) : 0);
  }
}

DType Storage::type(const Call& call, Role role) {
  return role == Role::kv ? call.shape.dtype : accumulator(call.shape.dtype);
}

int64_t Storage::row_bytes(const Call& call, Role role) {
  return call.shape.kv_heads * (call.shape.head_dim + call.shape.value_dim) * size_of(type(call, role));
}

KvRows Storage::rows(const Piece& piece) const {
  const Role role = call_.schedule.buffers[static_cast<size_t>(piece.buffer)].role;
  const auto at = [&](const Tensor& tensor) { return rows_at(tensor, piece.row, call_.local_rows, type(call_, role)); };
  if (piece.buffer == kKv) return {at(callers_.k), at(callers_.v)};
  const auto of = [&](const Accumulator& sums) {
    return rows_at(sums.tensor(), piece.row, call_.local_rows, sums.type());
  };
  if (piece.buffer == kDkv) return {of(*callers_.dk), of(*callers_.dv)};
  return packed_rows(call_.shape, scratch(piece.buffer) + piece.row * row_bytes(call_, role), type(call_, role));
}

void Storage::clear(BufferId id) const {
  if (id == kDq) return callers_.dq->clear(call_.parallel);
  if (id == kDkv) {
    callers_.dk->clear(call_.parallel);
    callers_.dv->clear(call_.parallel);
    return;
  }
  constexpr int64_t kChunk = 1 << 20;
  const Buffer& buffer = call_.schedule.buffers[static_cast<size_t>(id)];
  const int64_t bytes = buffer.rows * row_bytes(call_, buffer.role);
  call_.parallel.run((bytes + kChunk - 1) / kChunk, [&](int64_t chunk, int) {
    std::memset(scratch(id) + chunk * kChunk, 0, static_cast<size_t>(std::min(kChunk, bytes - chunk * kChunk)));
  });
}

}  // namespace blockcp
