// halo: the needed suffix of each rank to its right neighbour. The same rows as a2a, where it can be shown that no
// other pair of ranks has anything to exchange.
#include <fmt/format.h>

#include "blockcp/base/text.h"
#include "blockcp/schedule/deliver.h"

namespace blockcp {

std::string halo_why_not(const Problem& problem) {
  Segment worst{};
  int64_t longest = problem.layout.local_rows();  // reach that the left neighbour still covers
  for (size_t i = 0; i < problem.packing.documents().size(); ++i) {
    const Document& document = problem.packing.documents()[i];
    const auto holders = problem.layout.holders(document.batch, document.rows);
    if (holders.size() < 2) continue;
    for (const Segment& held : holders) {
      const Range q = {held.rows.begin - document.rows.begin, held.rows.end - document.rows.begin};
      const Range keys = problem.bands.keys(i, q);
      if (keys.end > q.end) {
        return fmt::format("rank {} needs {} of sequence {} from its right", held.rank,
                           counted(keys.end - q.end, "row"), held.batch);
      }
      if (q.begin - keys.begin > longest) {
        worst = held;
        longest = q.begin - keys.begin;
      }
    }
  }
  if (longest == problem.layout.local_rows()) return "";
  return fmt::format("rank {} needs {} of sequence {} from its left, more than the {} that its neighbour holds",
                     worst.rank, counted(longest, "row"), worst.batch, problem.layout.local_rows());
}

Schedule fill_halo(const Problem& problem, int rank) { return deliver_needed(problem, Path::halo, rank); }

}  // namespace blockcp
