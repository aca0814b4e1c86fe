#include "blockcp/schedule/deliver.h"

#include <algorithm>
#include <map>

namespace blockcp {
namespace {

Range moved(Range range, int64_t by) { return {range.begin + by, range.end + by}; }

// Rows of one sequence that the holders of document `index` need: for each rank its keys, own rows included.
std::map<int, RangeSet> needs(const Problem& problem, size_t index, const std::vector<Segment>& holders) {
  const Document& document = problem.packing.documents()[index];
  std::map<int, RangeSet> needs;
  for (const Segment& held : holders) {
    const Range keys = problem.bands.keys(index, moved(held.rows, -document.rows.begin));
    RangeSet& set = needs[held.rank];
    set = unite(set, {moved(keys, document.rows.begin)});
  }
  return needs;
}

RangeSet held_by(int rank, const std::vector<Segment>& holders) {
  RangeSet set;
  for (const Segment& held : holders) {
    if (held.rank == rank) set.push_back(held.rows);
  }
  return normalized(std::move(set));
}

// Scratch rows for what is received, by ascending holder, and the transfer that fills them.
Transfer receive_into(Frame& frame, const Delivery& delivery, Places& places, BufferId buffer) {
  Transfer transfer{Role::kv, Combine::copy, delivery.send, {}};
  int64_t row = 0;
  for (const Segment& part : delivery.recv) {
    append(move_of(transfer.recv, part.rank).rows, {buffer, row, part.rows.size()});
    places.add(part.batch, part.rows, buffer, row);
    row += part.rows.size();
  }
  places.sort();
  frame.schedule.buffers[buffer].rows = row;
  return transfer;
}

bool all_own(const Block& block) {
  return std::all_of(block.k.begin(), block.k.end(), [](const Piece& p) { return p.buffer == kKv; });
}

}  // namespace

bool moves_rows(const Problem& problem) {
  for (size_t i = 0; i < problem.packing.documents().size(); ++i) {
    const Document& document = problem.packing.documents()[i];
    const auto holders = problem.layout.holders(document.batch, document.rows);
    if (holders.size() < 2) continue;
    for (const auto& [rank, need] : needs(problem, i, holders)) {
      if (!subtract(need, held_by(rank, holders)).empty()) return true;
    }
  }
  return false;
}

Schedule deliver_once(Frame frame, const Delivery& delivery) {
  const BufferId kv = frame.add_buffer(Role::kv, 0), dkv = frame.add_buffer(Role::dkv, 0);
  std::vector<BufferId> gradients(kv + 1, kDkv);
  gradients[kv] = dkv;
  Places places = frame.own;
  const Transfer transfer = receive_into(frame, delivery, places, kv);
  frame.schedule.buffers[dkv].rows = frame.schedule.buffers[kv].rows;

  Step here, there;
  for (const Query& query : frame.queries) {
    Block block = frame.block(query, frame.problem.bands.keys(query.document, query.rows), places, gradients);
    (all_own(block) ? here : there).blocks.push_back(std::move(block));
  }
  if (delivery.moves) here.starts.push_back(transfer);

  Schedule& schedule = frame.schedule;
  schedule.forward.push_back(here);
  here.clear = {kDq, kDkv, dkv};
  schedule.backward.push_back(std::move(here));
  if (delivery.moves) {
    schedule.forward.push_back(there);
    schedule.backward.push_back(std::move(there));
    schedule.backward.push_back(Step{{}, {adjoint(transfer, gradients)}, {}});
  }
  return std::move(schedule);
}

Delivery needed_rows(const Frame& frame) {
  const Problem& problem = frame.problem;
  Delivery delivery;
  size_t last = problem.packing.documents().size();  // of the document seen last: it may have several queries here
  for (const Query& query : frame.queries) {
    if (query.document == last) continue;
    last = query.document;
    const Document& document = problem.packing.documents()[last];
    const auto holders = problem.layout.holders(document.batch, document.rows);
    if (holders.size() < 2) continue;
    const RangeSet own = held_by(frame.rank, holders);
    for (const auto& [peer, need] : needs(problem, last, holders)) {
      const RangeSet missing = subtract(need, held_by(peer, holders));
      if (peer == frame.rank) {
        for (const Range& range : missing) {
          for (const Segment& part : problem.layout.holders(document.batch, range)) delivery.recv.push_back(part);
        }
        continue;
      }
      for (const Range& range : intersect(missing, own)) {
        for (const Piece& piece : frame.own.pieces(document.batch, range))
          append(move_of(delivery.send, peer).rows, piece);
      }
    }
  }
  std::stable_sort(delivery.recv.begin(), delivery.recv.end(),
                   [](const Segment& a, const Segment& b) { return a.rank < b.rank; });
  return delivery;
}

Schedule deliver_needed(const Problem& problem, Path path, int rank) {
  Frame frame(problem, path, rank);
  Delivery delivery = needed_rows(frame);
  delivery.moves = moves_rows(problem);
  return deliver_once(std::move(frame), delivery);
}

}  // namespace blockcp
