// The needed-only exchange in numbers per rank, as other systems state it: what comes from the left, what goes right,
// split sizes and the gather index.
#include <algorithm>
#include <numeric>

#include "blockcp/plan/plan.h"
#include "blockcp/schedule/deliver.h"

namespace blockcp {
namespace {

// Rows of `rank` that it uses itself: some query of its own sees them.
RangeSet used_own_rows(const Problem& problem, int rank, int64_t batch) {
  std::vector<Range> used;
  for (const Segment& segment : problem.layout.of(rank)) {
    if (segment.batch != batch) continue;
    for (auto [i, last] = problem.packing.overlapping(batch, segment.rows); i < last; ++i) {
      const Range document = problem.packing.documents()[i].rows;
      const Range held = intersect(document, segment.rows);
      const Range keys = problem.bands.keys(i, {held.begin - document.begin, held.end - document.begin});
      used.push_back(intersect({keys.begin + document.begin, keys.end + document.begin}, segment.rows));
    }
  }
  return normalized(std::move(used));
}

}  // namespace

KvPlan kv_plan(const Plan& plan, const Plan::Entry& entry, int64_t batch) {
  KvPlan kv;
  const Problem problem = plan.problem(entry);
  for (int rank = 0; rank < plan.world(); ++rank) {
    const Range own{rank * plan.local_rows(), (rank + 1) * plan.local_rows()};
    int64_t first = own.begin, last_real = own.begin, real = 0;
    for (auto [i, end] = plan.packing().overlapping(batch, own); i < end; ++i) {
      const Range document = plan.packing().documents()[i].rows;
      const Range held = intersect(document, own);
      first = std::min(
          first, document.begin + entry.bands.keys(i, {held.begin - document.begin, held.end - document.begin}).begin);
      last_real = held.end;
      real += held.size();
    }
    kv.recv.push_back(own.begin - first);
    kv.nreal.push_back(real);
    kv.s_first.push_back(first);
    kv.real_end.push_back(std::max(last_real, first));
  }
  kv.send.assign(kv.recv.begin() + 1, kv.recv.end());
  kv.send.push_back(0);
  kv.use_halo = why_not(Path::halo, problem).empty();
  return kv;
}

std::vector<std::vector<int64_t>> split_matrix(const Plan& plan, const Plan::Entry& entry) {
  std::vector<std::vector<int64_t>> matrix(plan.world(), std::vector<int64_t>(plan.world(), 0));
  const Problem problem = plan.problem(entry);
  for (int rank = 0; rank < plan.world(); ++rank) {
    const Frame frame(problem, Path::a2a, rank);
    for (const Segment& part : needed_rows(frame).recv) matrix[part.rank][rank] += part.rows.size();
    for (int64_t b = 0; b < plan.packing().batch(); ++b) matrix[rank][rank] += count(used_own_rows(problem, rank, b));
  }
  return matrix;
}

NeededSplits needed_splits(const Plan& plan, const Plan::Entry& entry, int rank) {
  const Problem problem = plan.problem(entry);
  const Frame frame(problem, Path::a2a, rank);
  Delivery delivery = needed_rows(frame);
  Move& own = move_of(delivery.send, rank);
  for (int64_t b = 0; b < plan.packing().batch(); ++b) {
    for (const Range& range : used_own_rows(problem, rank, b)) {
      for (const Piece& piece : frame.own.pieces(b, range)) own.rows.push_back(piece);
    }
  }
  NeededSplits splits;
  splits.in_splits.assign(plan.world(), 0);
  splits.out_splits.assign(plan.world(), 0);
  splits.out_splits[rank] = rows(own);
  for (const Segment& part : delivery.recv) splits.out_splits[part.rank] += part.rows.size();
  for (const Move& move : delivery.send) {
    splits.in_splits[move.peer] = rows(move);
    for (const Piece& piece : move.rows) {
      const size_t at = splits.send_index.size();
      splits.send_index.resize(at + piece.count);
      std::iota(splits.send_index.begin() + at, splits.send_index.end(), piece.row);
    }
  }
  return splits;
}

}  // namespace blockcp
