#include "blockcp/base/error.h"
#include "blockcp/plan/plan.h"

namespace blockcp {

// a2a moves the fewest rows possible for a layout, so no other path is ever chosen for its rows. halo moves the very
// same ones with a single neighbour, so it goes first where it is admitted; why_not() clauses are equal on all ranks.
Choice choose(const Problem& problem) {
  if (problem.layout.world() == 1) return {Path::halo, "one rank: nothing to exchange"};
  if (!moves_rows(problem)) return {Path::halo, "no rank needs rows of another: nothing to exchange"};
  const std::string refusal = why_not(Path::halo, problem);
  if (!refusal.empty()) return {Path::a2a, fmt::format("fewest rows of all paths; halo cannot run: {}", refusal)};
  return {Path::halo, "fewest rows of all paths, and each rank needs rows of its left neighbour only"};
}

}  // namespace blockcp
