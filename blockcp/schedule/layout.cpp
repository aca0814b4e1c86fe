#include "blockcp/schedule/layout.h"

#include "blockcp/base/error.h"
#include "blockcp/base/hash.h"
#include "blockcp/base/text.h"

namespace blockcp {

Layout Layout::contiguous(int64_t batch, int64_t rows, int world) {
  check_argument(world >= 1, "[plan] the world must have at least 1 rank, but it has {}.", world);
  check_argument(rows % world == 0,
                 "[plan] the world must divide the rows, but {} on {} leave {}. Pass pad=True to add padding at "
                 "the end.",
                 counted(rows, "row"), counted(world, "rank"), rows % world);
  Layout layout;
  layout.world_ = world;
  layout.batch_ = batch;
  layout.rows_ = rows;
  layout.local_rows_ = rows / world;
  return layout;
}

std::vector<Segment> Layout::of(int rank) const {
  std::vector<Segment> segments;
  if (local_rows_ == 0) return segments;
  for (int64_t b = 0; b < batch_; ++b) {
    segments.push_back({rank, b, {rank * local_rows_, (rank + 1) * local_rows_}, b * local_rows_});
  }
  return segments;
}

std::vector<Segment> Layout::holders(int64_t batch, Range range) const {
  std::vector<Segment> segments;
  for (int64_t row = range.begin; row < range.end;) {
    const int64_t rank = row / local_rows_;
    const Range cut = intersect(range, {rank * local_rows_, (rank + 1) * local_rows_});
    segments.push_back({static_cast<int>(rank), batch, cut, batch * local_rows_ + cut.begin - rank * local_rows_});
    row = cut.end;
  }
  return segments;
}

uint64_t Layout::fingerprint() const {
  return Hash().add(std::string_view("contiguous")).add(world_).add(batch_).add(rows_).value();
}

}  // namespace blockcp
