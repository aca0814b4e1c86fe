// Where the K/V rows of a schedule's buffers lie, and those of their gradients.
#pragma once

#include <vector>

#include "blockcp/engine/accumulator.h"

namespace blockcp {

// The same rows of K and of V, or of dK and dV.
struct KvRows {
  Rows k, v;
};

// In scratch a row is [kv_heads * head_dim of K | kv_heads * value_dim of V], as it travels.
class Storage {
 public:
  // The caller's tensors; gradients only in backward.
  struct Callers {
    Tensor k, v;
    const Accumulator* dq = nullptr;
    const Accumulator* dk = nullptr;
    const Accumulator* dv = nullptr;
  };
  Storage(const Call& call, const Callers& callers);

  static DType type(const Call& call, Role role);
  static int64_t row_bytes(const Call& call, Role role);

  KvRows rows(const Piece& piece) const;
  std::byte* scratch(BufferId id) const { return scratch_[static_cast<size_t>(id)].data(); }
  void clear(BufferId id) const;  // a buffer of gradients

 private:
  const Call& call_;
  const Callers callers_;
  std::vector<Memory> scratch_;  // by buffer; none for the caller's
};

// Rows as they travel: `data` is count rows one behind the other.
KvRows packed_rows(const AttentionShape& shape, std::byte* data, DType type);

}  // namespace blockcp
