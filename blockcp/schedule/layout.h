// Which rank holds which rows, and in what local order.
#pragma once

#include <cstdint>
#include <vector>

#include "blockcp/base/range.h"

namespace blockcp {

// Rows of one sequence that one rank holds side by side. `local` is the place of rows.begin among the rank's rows,
// flattened over (batch, local row).
struct Segment {
  int rank;
  int64_t batch;
  Range rows;
  int64_t local;
};

// Contiguous: rank r holds rows [r L, (r + 1) L) of every sequence, L = rows / world.
class Layout {
 public:
  Layout() = default;
  // Throws Error(argument) if world < 1 or world does not divide rows.
  static Layout contiguous(int64_t batch, int64_t rows, int world);

  int world() const { return world_; }
  int64_t batch() const { return batch_; }
  int64_t local_rows() const { return local_rows_; }  // L, rows of one sequence on one rank

  // What `rank` holds, in local order.
  std::vector<Segment> of(int rank) const;
  // Who holds rows `range` of one sequence: pieces cut to it, in row order.
  std::vector<Segment> holders(int64_t batch, Range range) const;

  uint64_t fingerprint() const;

 private:
  int world_ = 1;
  int64_t batch_ = 0, rows_ = 0, local_rows_ = 0;
};

}  // namespace blockcp
