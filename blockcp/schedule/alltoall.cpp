// a2a: exactly the rows that each rank needs and does not hold, each once per rank that needs it; the fewest rows that
// any exchange can move for the layout.
#include "blockcp/schedule/deliver.h"

namespace blockcp {

Schedule fill_a2a(const Problem& problem, int rank) { return deliver_needed(problem, Path::a2a, rank); }

}  // namespace blockcp
