// allgather: all K/V to all ranks, needed or not. Each rank receives (W - 1) L rows of each sequence and holds S of
// them while it computes. Its adjoint is a reduce-scatter.
#include "blockcp/schedule/deliver.h"

namespace blockcp {

Schedule fill_allgather(const Problem& problem, int rank) {
  Frame frame(problem, Path::allgather, rank);
  const int world = problem.layout.world();
  Delivery delivery{world > 1 && problem.layout.batch() * problem.layout.local_rows() > 0, {}, {}};
  for (int peer = 0; delivery.moves && peer < world; ++peer) {
    if (peer == rank) continue;
    for (const Segment& segment : problem.layout.of(peer)) delivery.recv.push_back(segment);
    for (const Segment& segment : problem.layout.of(rank)) {
      append(move_of(delivery.send, peer).rows, {kKv, segment.local, segment.rows.size()});
    }
  }
  return deliver_once(std::move(frame), delivery);
}

}  // namespace blockcp
