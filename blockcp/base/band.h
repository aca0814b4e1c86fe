// Which keys a query row sees: one interval of its document.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace blockcp {

// Positions count from the start of the document. Row p sees the keys [begin(p), end(p)); the ends of the document
// are not known here, so a closed form may reach below 0 or past the last row: whoever reads it clips to the keys
// at hand. Both bounds never decrease with p, so rows [a, b) together see exactly [begin(a), end(b - 1)).
struct Band {
  // Far beyond any row, and small enough to be added to one without overflow.
  static constexpr int64_t kUnbounded = int64_t{1} << 60;

  int64_t left = kUnbounded;  // keys before the row itself
  int64_t right = 0;          // keys after it
  std::vector<int32_t> lo;    // per row of one document, instead of the closed form, where spans need it
  std::vector<int32_t> hi;

  int64_t begin(int64_t p) const { return lo.empty() ? p - left : lo[static_cast<size_t>(p)]; }
  int64_t end(int64_t p) const { return lo.empty() ? p + right + 1 : hi[static_cast<size_t>(p)]; }

  friend bool operator==(const Band&, const Band&) = default;
};

}  // namespace blockcp
