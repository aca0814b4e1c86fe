// Half-open intervals of rows and the little algebra over sorted lists of them that the fillers need.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace blockcp {

struct Range {
  int64_t begin = 0, end = 0;

  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

inline Range intersect(Range a, Range b) {
  Range both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.empty() ? Range{both.begin, both.begin} : both;
}

// A set of rows: ranges that are ascending, not empty and not touching.
using RangeSet = std::vector<Range>;

// Sorts, joins and drops what is empty.
RangeSet normalized(std::vector<Range> ranges);
RangeSet intersect(const RangeSet& a, const RangeSet& b);
RangeSet subtract(const RangeSet& a, const RangeSet& b);
RangeSet unite(const RangeSet& a, const RangeSet& b);
int64_t count(const RangeSet& set);

}  // namespace blockcp
