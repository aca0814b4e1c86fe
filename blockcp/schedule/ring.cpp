// ring: K/V travel from neighbour to neighbour, to the right for ranks that look back and to the left for ranks that
// look ahead, and each hop carries only the rows that some rank still further on needs. Two receive buffers in turn, so
// memory does not grow with the world.
//
//   hop        0          1          2
//   rank 0     0                                 which rank's rows each rank computes with; a document over four
//   rank 1     1    <-    0                      ranks, causal: everything moves to the right
//   rank 2     2    <-    1    <-    0
//
// Backward: K/V make the same hops. The gradients of travelling rows travel one step behind them, each rank adding its
// own share; a row's gradient goes home from the last rank that needed the row.
#include <algorithm>

#include "blockcp/schedule/deliver.h"

namespace blockcp {
namespace {

enum class Way { right, left };

class Ring {
 public:
  Ring(const Problem& problem, int rank) : problem_(problem), frame_(problem, Path::ring, rank), rank_(rank) {
    const int back = hops(Way::right), ahead = hops(Way::left);
    hops_ = std::max(back, ahead);
    both_ways_ = std::min(back, ahead);
  }

  Schedule fill();

 private:
  // Rows of `owner` that ranks at least `hop` further on need; at most one run in each sequence, since layouts are
  // contiguous and the nearest of those ranks needs the most.
  std::vector<Segment> stretch(int owner, int hop, Way way) const;
  // What stretch() holds at `hop` and no longer at the next: rows whose last reader is `hop` away.
  std::vector<Segment> finished(int owner, int hop, Way way) const;
  int hops(Way way) const;
  bool inside(int rank) const { return rank >= 0 && rank < problem_.layout.world(); }
  static int step(int rank, int by, Way way) { return way == Way::right ? rank + by : rank - by; }

  // The rows with which this rank computes at a hop, and where they lie: right-going ones first.
  std::vector<Segment> visiting(int hop) const;
  Places places_at(int hop) const;
  BufferId buffer(const std::vector<BufferId>& pair, int hop) const { return pair[hop % 2]; }

  Transfer deliver(int hop) const;
  Transfer send_gradients(int hop) const;
  std::vector<Block> blocks(int hop, const std::vector<Segment>& rows) const;

  const Problem& problem_;
  Frame frame_;
  int rank_;
  int hops_ = 0;
  int both_ways_ = 0;  // up to this hop some rank may compute with rows from either side
  std::vector<BufferId> kv_, dkv_, gradients_;
};

std::vector<Segment> Ring::stretch(int owner, int hop, Way way) const {
  std::vector<Segment> rows;
  const int reader = step(owner, hop, way);
  const int64_t length = problem_.layout.local_rows();
  if (!inside(owner) || !inside(reader) || length == 0) return rows;
  const Range own{owner * length, (owner + 1) * length}, theirs{reader * length, (reader + 1) * length};
  const int64_t edge = way == Way::right ? own.end - 1 : own.begin;
  for (int64_t b = 0; b < problem_.layout.batch(); ++b) {
    const auto [index, last] = problem_.packing.overlapping(b, {edge, edge + 1});
    if (index == last) continue;
    const Range document = problem_.packing.documents()[index].rows;
    const Range q = intersect(document, theirs);
    if (q.empty()) continue;
    const Range keys = problem_.bands.keys(index, {q.begin - document.begin, q.end - document.begin});
    const Range needed = intersect({keys.begin + document.begin, keys.end + document.begin}, own);
    if (!needed.empty()) rows.push_back({owner, b, needed, b * length + needed.begin - own.begin});
  }
  return rows;
}

std::vector<Segment> Ring::finished(int owner, int hop, Way way) const {
  std::vector<Segment> done;
  const std::vector<Segment> further = stretch(owner, hop + 1, way);
  for (const Segment& now : stretch(owner, hop, way)) {
    RangeSet rest = {now.rows};
    for (const Segment& later : further) {
      if (later.batch == now.batch) rest = subtract(rest, {later.rows});
    }
    for (const Range& range : rest) done.push_back({owner, now.batch, range, now.local + range.begin - now.rows.begin});
  }
  return done;
}

int Ring::hops(Way way) const {
  int most = 0;
  for (int owner = 0; owner < problem_.layout.world(); ++owner) {
    while (!stretch(owner, most + 1, way).empty()) ++most;
  }
  return most;
}

std::vector<Segment> Ring::visiting(int hop) const {
  std::vector<Segment> rows = stretch(rank_ - hop, hop, Way::right);
  for (const Segment& segment : stretch(rank_ + hop, hop, Way::left)) rows.push_back(segment);
  return rows;
}

Places Ring::places_at(int hop) const {
  if (hop == 0) return frame_.own;
  Places places;
  int64_t row = 0;
  for (const Segment& segment : visiting(hop)) {
    places.add(segment.batch, segment.rows, buffer(kv_, hop), row);
    row += segment.rows.size();
  }
  places.sort();
  return places;
}

void append_all(std::vector<Move>& moves, int peer, const std::vector<Segment>& rows, const Places& places,
                const std::vector<BufferId>& to) {
  for (const Segment& segment : rows) {
    for (Piece piece : places.pieces(segment.batch, segment.rows)) {
      piece.buffer = to[piece.buffer];
      append(move_of(moves, peer).rows, piece);
    }
  }
}

// Rows that arrive for `hop`, sent on by the neighbours from what they had at the hop before.
Transfer Ring::deliver(int hop) const {
  Transfer transfer{Role::kv, Combine::copy, {}, {}};
  std::vector<BufferId> same(frame_.schedule.buffers.size());
  for (size_t i = 0; i < same.size(); ++i) same[i] = static_cast<BufferId>(i);
  const Places before = places_at(hop - 1), after = places_at(hop);
  for (Way way : {Way::right, Way::left}) {
    const int next = step(rank_, 1, way), previous = step(rank_, -1, way);
    if (inside(next)) append_all(transfer.send, next, stretch(step(rank_, 1 - hop, way), hop, way), before, same);
    if (inside(previous)) append_all(transfer.recv, previous, stretch(step(rank_, -hop, way), hop, way), after, same);
  }
  return transfer;
}

// The gradients that were summed at `hop`: on to the next rank where it needs the rows too, else home.
Transfer Ring::send_gradients(int hop) const {
  Transfer transfer{Role::dkv, Combine::add, {}, {}};
  const Places now = places_at(hop), next_hop = places_at(hop + 1);
  for (Way way : {Way::right, Way::left}) {
    const int next = step(rank_, 1, way), previous = step(rank_, -1, way);
    const int owner = step(rank_, -hop, way), reader = step(rank_, hop, way);
    // Sender and receiver list a pair's rows in one order: by way, and within it what travels on before what goes home.
    if (inside(next)) append_all(transfer.send, next, stretch(owner, hop + 1, way), now, gradients_);
    if (inside(owner)) append_all(transfer.send, owner, finished(owner, hop, way), now, gradients_);
    if (inside(previous))
      append_all(transfer.recv, previous, stretch(step(previous, -hop, way), hop + 1, way), next_hop, gradients_);
    if (inside(reader)) append_all(transfer.recv, reader, finished(rank_, hop, way), frame_.own, gradients_);
  }
  return transfer;
}

std::vector<Block> Ring::blocks(int hop, const std::vector<Segment>& rows) const {
  std::vector<Block> blocks;
  const Places places = places_at(hop);
  for (const Query& query : frame_.queries) {
    const Document& document = problem_.packing.documents()[query.document];
    const Range keys = problem_.bands.keys(query.document, query.rows);
    for (const Segment& segment : rows) {
      if (segment.batch != document.batch) continue;
      const Range sequence =
          intersect({keys.begin + document.rows.begin, keys.end + document.rows.begin}, segment.rows);
      const Range seen{sequence.begin - document.rows.begin, sequence.end - document.rows.begin};
      if (!seen.empty()) blocks.push_back(frame_.block(query, seen, places, gradients_));
    }
  }
  return blocks;
}

Schedule Ring::fill() {
  for (int i = 0; i < 2; ++i) kv_.push_back(frame_.add_buffer(Role::kv, 0));
  for (int i = 0; i < 2; ++i) dkv_.push_back(frame_.add_buffer(Role::dkv, 0));
  gradients_.assign(frame_.schedule.buffers.size(), kDkv);
  for (int i = 0; i < 2; ++i) gradients_[kv_[i]] = dkv_[i];

  Schedule& schedule = frame_.schedule;
  schedule.partial = hops_ > 0;
  for (int hop = 0; hop <= hops_; ++hop) {
    int64_t rows = 0;
    for (const Segment& segment : visiting(hop)) rows += segment.rows.size();
    for (BufferId id : {buffer(kv_, hop), buffer(dkv_, hop)}) {
      if (hop > 0) schedule.buffers[id].rows = std::max(schedule.buffers[id].rows, rows);
    }
    // A query may see rows from both sides, and no two blocks of a step share one: the other side is a step of its own.
    const bool both = hop > 0 && hop <= both_ways_;
    Step step{{}, {}, {}}, ahead{{}, {}, {}};
    if (both) {
      step.blocks = blocks(hop, stretch(rank_ - hop, hop, Way::right));
      ahead.blocks = blocks(hop, stretch(rank_ + hop, hop, Way::left));
    } else {
      step.blocks = blocks(hop, hop == 0 ? problem_.layout.of(rank_) : visiting(hop));
    }
    if (hop < hops_) step.starts.push_back(deliver(hop + 1));
    schedule.forward.push_back(step);
    if (both) schedule.forward.push_back(ahead);

    step.clear = hop == 0 ? std::vector<BufferId>{kDq, kDkv} : std::vector<BufferId>{buffer(dkv_, hop)};
    if (hop > 1) step.starts.push_back(send_gradients(hop - 1));
    schedule.backward.push_back(std::move(step));
    if (both) schedule.backward.push_back(std::move(ahead));
  }
  if (hops_ > 0) schedule.backward.push_back(Step{{}, {send_gradients(hops_)}, {}});
  return std::move(schedule);
}

}  // namespace

Schedule fill_ring(const Problem& problem, int rank) { return Ring(problem, rank).fill(); }

}  // namespace blockcp
