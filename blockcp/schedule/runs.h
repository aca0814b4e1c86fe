// Rows that carry the same id side by side: documents of a packing, spans of a mask.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "blockcp/base/range.h"

namespace blockcp {

// The maximal runs of rows of one sequence with equal id, 0 left out. `place` and `thing` are for errors ("plan",
// "document"). Throws Error(argument) for a negative id and for one that comes back after its run has ended, naming the
// row and the values.
std::vector<Range> id_runs(std::span<const int64_t> ids, int64_t sequence, std::string_view place,
                           std::string_view thing);

}  // namespace blockcp
