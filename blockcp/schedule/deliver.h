// Paths that deliver K/V in one transfer: allgather, halo and a2a differ in what they deliver, and only in that.
#pragma once

#include <vector>

#include "blockcp/schedule/frame.h"

namespace blockcp {

struct Delivery {
  bool moves = false;         // some rank sends something; equal on all ranks
  std::vector<Move> send;     // pieces of kKv, ascending by peer
  std::vector<Segment> recv;  // rows and who holds them, ascending by holder, in the order in which it sends them
};

// Blocks whose keys are all here run while the others' keys travel; backward delivers K/V again and sends the gradients
// home by the adjoint.
Schedule deliver_once(Frame frame, const Delivery& delivery);

// Exactly the rows that this rank and its peers need and do not hold; `moves` is left to whoever needs it.
Delivery needed_rows(const Frame& frame);

// The schedule that delivers those.
Schedule deliver_needed(const Problem& problem, Path path, int rank);

Schedule fill_allgather(const Problem& problem, int rank);
Schedule fill_halo(const Problem& problem, int rank);
Schedule fill_a2a(const Problem& problem, int rank);
Schedule fill_ring(const Problem& problem, int rank);

std::string halo_why_not(const Problem& problem);

}  // namespace blockcp
