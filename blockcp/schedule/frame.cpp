#include "blockcp/schedule/frame.h"

#include <algorithm>

namespace blockcp {

std::vector<Query> queries_of(const Problem& problem, int rank) {
  std::vector<Query> queries;
  for (const Segment& segment : problem.layout.of(rank)) {
    for (auto [i, last] = problem.packing.overlapping(segment.batch, segment.rows); i < last; ++i) {
      const Range document = problem.packing.documents()[i].rows;
      const Range held = intersect(document, segment.rows);
      queries.push_back({i,
                         {held.begin - document.begin, held.end - document.begin},
                         {kQ, segment.local + held.begin - segment.rows.begin, held.size()}});
    }
  }
  return queries;
}

void Places::add(int64_t batch, Range rows, BufferId buffer, int64_t row) {
  if (!rows.empty()) places_.push_back({batch, rows, buffer, row});
}

void Places::sort() {
  std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
    return a.batch != b.batch ? a.batch < b.batch : a.rows.begin < b.rows.begin;
  });
}

std::vector<Piece> Places::pieces(int64_t batch, Range range) const {
  std::vector<Piece> pieces;
  auto at = std::partition_point(places_.begin(), places_.end(), [&](const Place& p) {
    return p.batch < batch || (p.batch == batch && p.rows.end <= range.begin);
  });
  for (; at != places_.end() && at->batch == batch && at->rows.begin < range.end; ++at) {
    const Range cut = intersect(at->rows, range);
    append(pieces, {at->buffer, at->row + cut.begin - at->rows.begin, cut.size()});
  }
  return pieces;
}

Frame::Frame(const Problem& of, Path path, int self) : problem(of), rank(self), queries(queries_of(of, self)) {
  const int64_t rows = problem.layout.batch() * problem.layout.local_rows();
  schedule.rank = rank;
  schedule.world = problem.layout.world();
  schedule.path = path;
  schedule.origin = problem.origin;
  for (Role role : {Role::q, Role::kv, Role::out, Role::dout, Role::dq, Role::dkv})
    schedule.buffers.push_back({role, rows, true});

  for (const Segment& segment : problem.layout.of(rank)) own.add(segment.batch, segment.rows, kKv, segment.local);
  own.sort();

  schedule.bands.push_back(problem.bands.closed());
  int64_t row = 0;
  for (const Query& query : queries) {
    if (query.q.row > row) append_idle(row, query.q.row);
    row = query.q.row + query.q.count;
    const Band& band = problem.bands.of(query.document);
    if (band.lo.empty() || (!band_of_.empty() && band_of_.back().first == query.document)) continue;
    band_of_.emplace_back(query.document, static_cast<int32_t>(schedule.bands.size()));
    schedule.bands.push_back(band);
  }
  if (rows > row) append_idle(row, rows);
}

// Idle pieces stay inside one sequence, as pieces of the caller's buffers do.
void Frame::append_idle(int64_t begin, int64_t end) {
  const int64_t length = problem.layout.local_rows();
  while (begin < end) {
    const int64_t stop = std::min(end, (begin / length + 1) * length);
    schedule.idle.push_back({kQ, begin, stop - begin});
    begin = stop;
  }
}

BufferId Frame::add_buffer(Role role, int64_t rows) {
  schedule.buffers.push_back({role, rows, false});
  return static_cast<BufferId>(schedule.buffers.size() - 1);
}

Block Frame::block(const Query& query, Range keys, const Places& places, const std::vector<BufferId>& gradients) const {
  const Band& band = problem.bands.of(query.document);
  const Document& document = problem.packing.documents()[query.document];
  Range q = query.rows;
  while (!q.empty() && band.end(q.begin) <= keys.begin) ++q.begin;
  while (!q.empty() && band.begin(q.end - 1) >= keys.end) --q.end;

  Block block;
  block.q = {kQ, query.q.row + q.begin - query.rows.begin, q.size()};
  block.out = {kOut, block.q.row, block.q.count};
  block.dq = {kDq, block.q.row, block.q.count};
  block.q_pos = q.begin;
  block.k = places.pieces(document.batch, {document.rows.begin + keys.begin, document.rows.begin + keys.end});
  block.k_pos = keys.begin;
  const auto own_band = std::lower_bound(band_of_.begin(), band_of_.end(), query.document,
                                         [](const auto& entry, size_t wanted) { return entry.first < wanted; });
  block.band = own_band != band_of_.end() && own_band->first == query.document ? own_band->second : 0;
  for (const Piece& piece : block.k) block.dkv.push_back({gradients[piece.buffer], piece.row, piece.count});
  return block;
}

void append(std::vector<Piece>& pieces, Piece piece) {
  if (piece.count == 0) return;
  if (!pieces.empty() && piece.buffer >= kFirstScratch) {
    Piece& last = pieces.back();
    if (last.buffer == piece.buffer && last.row + last.count == piece.row) {
      last.count += piece.count;
      return;
    }
  }
  pieces.push_back(piece);
}

Move& move_of(std::vector<Move>& moves, int peer) {
  const auto at =
      std::lower_bound(moves.begin(), moves.end(), peer, [](const Move& m, int wanted) { return m.peer < wanted; });
  if (at != moves.end() && at->peer == peer) return *at;
  return *moves.insert(at, Move{peer, {}});
}

}  // namespace blockcp
