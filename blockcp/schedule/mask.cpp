#include "blockcp/schedule/mask.h"

#include <algorithm>

#include "blockcp/base/error.h"
#include "blockcp/schedule/runs.h"

namespace blockcp {
namespace {

// Sum over p in [a, b) of min(limit, p + offset).
int64_t sum_min(int64_t a, int64_t b, int64_t offset, int64_t limit) {
  const int64_t turn = std::clamp(limit - offset, a, b);  // from here on the limit is the smaller one
  return (turn - a) * (a + turn - 1 + 2 * offset) / 2 + (b - turn) * limit;
}

Band band_with_spans(const Band& closed, int64_t length, const std::vector<Range>& spans, SpanWindow rule) {
  Band band = closed;
  band.lo.resize(length);
  band.hi.resize(length);
  size_t next = 0;
  for (int64_t p = 0; p < length; ++p) {
    while (next < spans.size() && spans[next].end <= p) ++next;
    int64_t lo = closed.begin(p), hi = closed.end(p);
    if (next < spans.size() && spans[next].begin <= p) {
      const Range span = spans[next];
      if (rule == SpanWindow::none) lo = std::min(lo, span.begin);
      hi = std::max(hi, rule == SpanWindow::both ? std::min(span.end, p + closed.left + 1) : span.end);
    }
    band.lo[p] = static_cast<int32_t>(std::max<int64_t>(lo, 0));
    band.hi[p] = static_cast<int32_t>(std::min(hi, length));
  }
  return band;
}

std::optional<int64_t> side(std::optional<int64_t> value, const char* which) {
  if (!value || *value == -1) return std::nullopt;
  check_argument(*value >= 0, "[mask] the {} side of a window must be None, -1 or at least 0, but it is {}.", which,
                 *value);
  return value;
}

}  // namespace

Mask windowed(std::optional<int64_t> w, bool causal) {
  Mask mask{.causal = causal};
  if (!w || *w == -1) return mask;
  check_argument(
      *w >= 1,
      "[mask] a window must be None, -1 or at least 1 (the keys that a row sees, itself included), but it is {}.", *w);
  mask.left = *w - 1;
  if (!causal) mask.right = *w - 1;
  return mask;
}

Mask windowed(std::optional<int64_t> left, std::optional<int64_t> right, bool causal) {
  Mask mask{.causal = causal, .left = side(left, "left"), .right = side(right, "right")};
  check_argument(!causal || (mask.right && *mask.right == 0),
                 "[mask] the right side of a window must be 0 under causal, but the window is ({}, {}). Only "
                 "a mask that is not causal looks ahead.",
                 left.value_or(-1), right.value_or(-1));
  if (causal) mask.right.reset();  // as where the window is an integer: one mask, however it is written
  return mask;
}

std::string text(const Mask& mask) {
  std::string text = mask.causal ? "causal" : "both ways";
  // The row itself is a key too; the sum fits unsigned.
  if (mask.causal && mask.left) text += fmt::format(", window {}", static_cast<uint64_t>(*mask.left) + 1);
  if (!mask.causal && (mask.left || mask.right))
    text += fmt::format(", window ({}, {})", mask.left.value_or(-1), mask.right.value_or(-1));
  constexpr const char* rules[] = {"left", "both", "none"};
  if (!mask.spans.empty()) text += fmt::format(", spans ({})", rules[static_cast<int>(mask.span_window)]);
  return text;
}

Band closed_form(const Mask& mask) {
  check_argument(mask.left.value_or(0) >= 0 && mask.right.value_or(0) >= 0,
                 "[mask] a window must not be negative, but it is ({}, {}).", mask.left.value_or(0),
                 mask.right.value_or(0));
  check_argument(!mask.causal || mask.right.value_or(0) == 0,
                 "[mask] the right side of a window must be 0 under causal, but it is {}. Only a mask that is not "
                 "causal looks ahead.",
                 mask.right.value_or(0));
  Band band;
  band.left = std::min(mask.left.value_or(Band::kUnbounded), Band::kUnbounded);
  band.right = mask.causal ? 0 : std::min(mask.right.value_or(Band::kUnbounded), Band::kUnbounded);
  return band;
}

Bands::Bands(const Packing& packing, const Mask& mask) : packing_(&packing), closed_(closed_form(mask)) {
  if (mask.spans.empty()) return;
  const int64_t rows = packing.rows();
  check_argument(static_cast<int64_t>(mask.spans.size()) == packing.batch() * rows,
                 "[mask] spans must have one id a row, but there are {} for {} x {} rows.", mask.spans.size(),
                 packing.batch(), rows);
  for (int64_t b = 0; b < packing.batch(); ++b) {
    const std::vector<Range> runs = id_runs(std::span(mask.spans).subspan(b * rows, rows), b, "mask", "span");
    for (auto [i, last] = packing.overlapping(b, {0, rows}); i < last; ++i) {
      const Range document = packing.documents()[i].rows;
      auto run = std::partition_point(runs.begin(), runs.end(), [&](Range r) { return r.end <= document.begin; });
      std::vector<Range> inside;  // in positions of the document
      for (; run != runs.end() && run->begin < document.end; ++run) {
        const Range cut = intersect(*run, document);
        inside.push_back({cut.begin - document.begin, cut.end - document.begin});
      }
      if (!inside.empty())
        with_spans_.emplace_back(i, band_with_spans(closed_, document.size(), inside, mask.span_window));
    }
  }
}

const Band& Bands::of(size_t index) const {
  const auto at = std::lower_bound(with_spans_.begin(), with_spans_.end(), index,
                                   [](const auto& entry, size_t wanted) { return entry.first < wanted; });
  return at != with_spans_.end() && at->first == index ? at->second : closed_;
}

Range Bands::keys(size_t index, Range q) const {
  const Band& band = of(index);
  const int64_t length = packing_->documents()[index].rows.size();
  return {std::max<int64_t>(band.begin(q.begin), 0), std::min(band.end(q.end - 1), length)};
}

int64_t Bands::pairs(size_t index, Range q) const {
  const Band& band = of(index);
  if (!band.lo.empty()) {
    int64_t sum = 0;
    for (int64_t p = q.begin; p < q.end; ++p) sum += band.end(p) - band.begin(p);
    return sum;
  }
  const int64_t length = packing_->documents()[index].rows.size();
  const int64_t right = std::min(band.right, length), left = std::min(band.left, length);
  // begin(p) = max(0, p - left) = -min(0, left - p), summed as p - min(p, left)
  return sum_min(q.begin, q.end, right + 1, length) -
         (sum_min(q.begin, q.end, 0, Band::kUnbounded) - sum_min(q.begin, q.end, 0, left));
}

}  // namespace blockcp
