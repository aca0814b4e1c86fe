#include "blockcp/base/range.h"

namespace blockcp {

RangeSet normalized(std::vector<Range> ranges) {
  std::erase_if(ranges, [](const Range& range) { return range.empty(); });
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  RangeSet set;
  for (const Range& range : ranges) {
    if (!set.empty() && range.begin <= set.back().end)
      set.back().end = std::max(set.back().end, range.end);
    else
      set.push_back(range);
  }
  return set;
}

RangeSet intersect(const RangeSet& a, const RangeSet& b) {
  RangeSet both;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const Range common = intersect(a[i], b[j]);
    if (!common.empty()) both.push_back(common);
    a[i].end < b[j].end ? ++i : ++j;
  }
  return both;
}

RangeSet subtract(const RangeSet& a, const RangeSet& b) {
  RangeSet rest;
  size_t j = 0;
  for (Range left : a) {
    while (j < b.size() && b[j].end <= left.begin) ++j;
    // A range of b may reach into the next range of a, so j stays at the last one used.
    for (size_t k = j; k < b.size() && b[k].begin < left.end; ++k) {
      if (b[k].begin > left.begin) rest.push_back({left.begin, b[k].begin});
      left.begin = std::min(b[k].end, left.end);
    }
    if (!left.empty()) rest.push_back(left);
  }
  return rest;
}

RangeSet unite(const RangeSet& a, const RangeSet& b) {
  std::vector<Range> all = a;
  all.insert(all.end(), b.begin(), b.end());
  return normalized(std::move(all));
}

int64_t count(const RangeSet& set) {
  int64_t rows = 0;
  for (const Range& range : set) rows += range.size();
  return rows;
}

}  // namespace blockcp
