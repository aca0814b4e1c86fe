// The four fillers: each turns packing, layout and mask into the schedule of one rank.
#pragma once

#include <string>

#include "blockcp/schedule/layout.h"
#include "blockcp/schedule/mask.h"
#include "blockcp/schedule/packing.h"
#include "blockcp/schedule/schedule.h"

namespace blockcp {

// What every rank knows.
struct Problem {
  const Packing& packing;
  const Layout& layout;
  const Bands& bands;
  Origin origin;  // of the above
};

// Whether some rank needs rows that another holds; equal on all ranks.
bool moves_rows(const Problem& problem);

// Empty if `path` can run this problem, otherwise one clause that says what stops it, the same on every rank.
std::string why_not(Path path, const Problem& problem);

// The schedule of `rank`. Throws Error(argument) with why_not()'s clause where the path cannot run.
Schedule build_schedule(const Problem& problem, Path path, int rank);

}  // namespace blockcp
