// The keys of a block as one run, whatever pieces they lie in, and the part of it that each query row sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "blockcp/base/range.h"
#include "blockcp/kernels/attention.h"

namespace blockcp {

class KeyView {
 public:
  explicit KeyView(const AttentionBlock& block) : block_(&block) {
    for (const KeyRows& piece : block.keys) size_ += piece.count;
  }

  int64_t size() const { return size_; }

  // Which piece and which row of it holds key `index` of the run.
  std::pair<const KeyRows*, int64_t> locate(int64_t index) const {
    const KeyRows* piece = block_->keys.data();
    while (index >= piece->count) index -= piece++->count;
    return {piece, index};
  }

  // The keys that query row `row` sees, as indices into the run. Both ends never decrease with the row.
  Range seen(int64_t row) const {
    const Band& band = *block_->band;
    const int64_t position = block_->q_pos + row;
    if (!band.lo.empty() && position < 0) return {0, 0};
    if (!band.lo.empty() && position >= static_cast<int64_t>(band.lo.size())) return {size_, size_};
    const int64_t begin = clip(band.begin(position));
    return {begin, std::max(begin, clip(band.end(position)))};
  }

 private:
  int64_t clip(int64_t position) const { return std::clamp<int64_t>(position - block_->k_pos, 0, size_); }

  const AttentionBlock* block_;
  int64_t size_ = 0;
};

// Whether a query row is known to see a single key of its document. Its weight is 1 for any score, so no gradient goes
// through the softmax: exactly 0, where <dout, v> - delta would leave a rounding error. With part of the keys at hand
// the band alone tells, which does not know where the document ends.
inline bool sees_one_key(const AttentionBlock& block, int64_t row, bool all_keys) {
  if (all_keys) return KeyView(block).seen(row).size() == 1;
  const Band& band = *block.band;
  const int64_t position = block.q_pos + row;
  if (position < 0 || (!band.lo.empty() && position >= static_cast<int64_t>(band.lo.size()))) return false;
  return band.end(position) - std::max<int64_t>(band.begin(position), 0) == 1;
}

}  // namespace blockcp
