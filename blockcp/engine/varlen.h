// The kernel alone, on documents that lie end to end in tensors of one rank: no plan, no ranks, no transfers. Queries
// and keys of a document may differ in number. A mask is aligned at the bottom right: the last query of a document
// stands at its last key, so query i of lq has position i + lk - lq, and one before the first key sees what a window
// ahead of it shows, under causal nothing.
#pragma once

#include <span>
#include <string_view>

#include "blockcp/base/range.h"
#include "blockcp/engine/engine.h"

namespace blockcp {

// Document i has rows [offsets[i], offsets[i + 1]); rows from the last offset on belong to none.
struct Offsets {
  std::string_view name;  // "cu_seqlens_q", in errors
  std::span<const int64_t> values;
  int64_t rows = 0;  // of the tensor

  int64_t documents() const { return static_cast<int64_t>(values.size()) - 1; }
  Range document(int64_t index) const {
    return {values[static_cast<size_t>(index)], values[static_cast<size_t>(index) + 1]};
  }
};

// Throws Error(argument), naming the field and its values, unless both begin at 0, never decrease, end inside their
// tensors and have as many documents.
void check_offsets(const Offsets& q, const Offsets& k);

// Throws Error(argument) if a document is longer than `longest`, which the caller has `named`.
void check_longest(const Offsets& offsets, std::string_view named, int64_t longest);

struct Varlen {
  AttentionShape shape;
  Offsets q, k;  // checked
  Band band;     // closed form
  double scale = 1;
  const Kernel& kernel;
  Parallel& parallel;
};

// As in engine.h, with a batch of one: q, out, lse, dout and dq have q.rows rows, k, v, dk and dv k.rows. Results are
// written everywhere. A row that sees no key gets out 0, lse -inf and dq 0; a row that belongs to no document too, and
// its dk and dv are 0.
void forward(const Varlen& call, const ForwardTensors& tensors);
void backward(const Varlen& call, const BackwardTensors& tensors);

}  // namespace blockcp
