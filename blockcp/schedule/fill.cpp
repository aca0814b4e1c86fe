#include "blockcp/schedule/fill.h"

#include "blockcp/base/error.h"
#include "blockcp/schedule/deliver.h"

namespace blockcp {

std::string why_not(Path path, const Problem& problem) { return path == Path::halo ? halo_why_not(problem) : ""; }

Schedule build_schedule(const Problem& problem, Path path, int rank) {
  check_argument(rank >= 0 && rank < problem.layout.world(), "[plan] the rank must be in [0, {}), but it is {}.",
                 problem.layout.world(), rank);
  const std::string refusal = why_not(path, problem);
  check_argument(refusal.empty(), "[plan] exchange '{}' cannot run here: {}. Use auto, a2a, ring or allgather.",
                 name(path), refusal);
  switch (path) {
    case Path::allgather:
      return fill_allgather(problem, rank);
    case Path::halo:
      return fill_halo(problem, rank);
    case Path::a2a:
      return fill_a2a(problem, rank);
    case Path::ring:
      return fill_ring(problem, rank);
  }
  fail_argument("[plan] unknown path {}.", static_cast<int>(path));
}

}  // namespace blockcp
