// Who may see whom inside a document, and the bands of keys that follow from it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "blockcp/base/band.h"
#include "blockcp/schedule/packing.h"

namespace blockcp {

// How a span (a run of rows that see each other both ways, an image say) and the window combine; |i - j| counts rows.
//   left   (causal or same span) and i - j < w        the window cuts what lies behind, a span may look ahead freely
//   both   (causal or same span) and |i - j| < w      the window cuts both sides
//   none   (causal and i - j < w) or same span        a span is never cut
enum class SpanWindow : uint8_t { left, both, none };

// Row i of a document sees row j of the same document if
//   not before i - left, and not after i + right (causal: right = 0), or by a span.
struct Mask {
  bool causal = true;
  std::optional<int64_t> left, right;  // rows seen before and after the row itself; empty: unbounded
  std::vector<int64_t> spans;          // empty, or one id per row [batch, rows], 0 = none
  SpanWindow span_window = SpanWindow::left;

  friend bool operator==(const Mask&, const Mask&) = default;
};

// The two spellings of a window. An integer w counts keys, the row itself included: causal (w-1, 0), otherwise
// (w-1, w-1); empty or -1 is unbounded. A pair is (left, right) in flash-attention's counting, without the row itself,
// -1 is unbounded, and right must be 0 under causal. Anything else throws Error(argument).
Mask windowed(std::optional<int64_t> w, bool causal = true);
Mask windowed(std::optional<int64_t> left, std::optional<int64_t> right, bool causal);

// "causal, window 4", "both ways, window (3, -1), spans (left)".
std::string text(const Mask& mask);

// The band of rows without spans. Throws Error(argument) for sides that make no sense.
Band closed_form(const Mask& mask);

// The bands of one mask over one packing.
class Bands {
 public:
  // Checks the spans against the packing: throws Error(argument) if they do not cover every row, if an id is negative,
  // or if an id comes back after the span has ended. Ids count per sequence; a span that crosses a document's border
  // is cut there.
  Bands(const Packing& packing, const Mask& mask);

  const Band& closed() const { return closed_; }  // of documents without spans
  // The band of documents()[index].
  const Band& of(size_t index) const;
  // Keys that rows `q` of documents()[index] see together; all in positions of the document.
  Range keys(size_t index, Range q) const;
  // Visible (q, k) pairs of rows `q` of documents()[index].
  int64_t pairs(size_t index, Range q) const;

 private:
  const Packing* packing_;
  Band closed_;                                      // documents without spans
  std::vector<std::pair<size_t, Band>> with_spans_;  // ascending by document
};

}  // namespace blockcp
