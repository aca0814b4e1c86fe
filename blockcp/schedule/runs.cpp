#include "blockcp/schedule/runs.h"

#include <unordered_map>

#include "blockcp/base/error.h"

namespace blockcp {

std::vector<Range> id_runs(std::span<const int64_t> ids, int64_t sequence, std::string_view place,
                           std::string_view thing) {
  std::vector<Range> runs;
  std::unordered_map<int64_t, int64_t> ended;  // id -> one past its last row
  const auto rows = static_cast<int64_t>(ids.size());
  for (int64_t begin = 0; begin < rows;) {
    const int64_t id = ids[begin];
    int64_t end = begin + 1;
    while (end < rows && ids[end] == id) ++end;
    check_argument(id >= 0,
                   "[{}] {} ids must not be negative, but row {} of sequence {} has id {}. Use 0 for rows in none.",
                   place, thing, begin, sequence, id);
    if (id != 0) {
      const auto [before, fresh] = ended.emplace(id, end);
      check_argument(
          fresh,
          "[{}] a {} must be one run of rows, but row {} of sequence {} has id {} again, whose run ended at row "
          "{}. Give every {} an id of its own.",
          place, thing, begin, sequence, id, before->second, thing);
      runs.push_back({begin, end});
    }
    begin = end;
  }
  return runs;
}

}  // namespace blockcp
