#include "blockcp/schedule/mask.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "refusal.h"

namespace blockcp {
namespace {

using testing::HasSubstr;

constexpr auto kNone = std::nullopt;

Packing one_document(int64_t rows) { return Packing::from_lengths({{rows}}); }

TEST(Mask, AnIntegerWindowCountsTheRowItself) {
  EXPECT_EQ(windowed(4), (Mask{.causal = true, .left = 3}));
  EXPECT_EQ(windowed(1), (Mask{.causal = true, .left = 0}));
  EXPECT_EQ(windowed(4, false), (Mask{.causal = false, .left = 3, .right = 3}));
  EXPECT_EQ(windowed(2, kNone, false), (Mask{.causal = false, .left = 2}));
}

TEST(CasesMask, KN_02_unbounded_has_one_meaning_and_nonsense_is_refused) {
  const Packing packing = Packing::from_lengths({{3, 5}});
  const Mask unbounded;
  EXPECT_EQ(windowed(kNone), unbounded);
  EXPECT_EQ(windowed(-1), unbounded);
  EXPECT_EQ(windowed(-1, 0, true), unbounded);
  EXPECT_EQ(windowed(kNone, 0, true), unbounded);
  for (const Mask& mask : {windowed(-1, 0, true), windowed(kNone, 0, true), windowed(8), windowed(80)}) {
    const Bands bands(packing, mask);
    EXPECT_EQ(bands.keys(1, {0, 5}), (Range{0, 5}));
    EXPECT_EQ(bands.pairs(1, {0, 5}), 15);
  }
  EXPECT_THAT(refusal([] { windowed(0); }), HasSubstr("it is 0"));
  EXPECT_THAT(refusal([] { windowed(-2); }), HasSubstr("it is -2"));
  EXPECT_THAT(refusal([] { windowed(4, -3, true); }), HasSubstr("it is -3"));
  EXPECT_THAT(refusal([] { windowed(3, 2, true); }), HasSubstr("(3, 2)"));
  EXPECT_THAT(refusal([] { windowed(3, -1, true); }), HasSubstr("must be 0 under causal"));
}

TEST(CasesMask, VA_04_a_window_is_one_mask_however_it_is_written) {
  for (int64_t w : {int64_t{1}, int64_t{4}, INT64_MAX}) {
    EXPECT_EQ(windowed(w), windowed(w - 1, 0, true));
    EXPECT_EQ(text(windowed(w)), text(windowed(w - 1, 0, true)));
    EXPECT_EQ(windowed(w, false), windowed(w - 1, w - 1, false));
  }
  // Whatever was given fits beside the positions of a document.
  const Band band = closed_form(windowed(INT64_MAX, INT64_MAX, false));
  EXPECT_EQ(band.left, Band::kUnbounded);
  EXPECT_EQ(band.right, Band::kUnbounded);
}

TEST(CasesMask, KN_05_a_window_longer_than_the_text_stays_causal) {
  const Packing packing = Packing::from_lengths({{3, 5}});
  for (int64_t w : {5, 8, 100}) {
    const Bands bands(packing, windowed(w));
    EXPECT_EQ(bands.keys(1, {0, 1}), (Range{0, 1}));
    EXPECT_EQ(bands.keys(1, {4, 5}), (Range{0, 5}));
  }
}

TEST(Bands, SpansLookAheadAndTheThreeRulesDiffer) {
  const Packing packing = one_document(8);
  Mask mask = windowed(3);
  mask.spans = {0, 1, 1, 1, 1, 1, 1, 0};
  const auto keys = [&](SpanWindow rule, int64_t row) {
    mask.span_window = rule;
    return Bands(packing, mask).keys(0, {row, row + 1});
  };
  EXPECT_EQ(keys(SpanWindow::left, 1), (Range{0, 7}));
  EXPECT_EQ(keys(SpanWindow::both, 1), (Range{0, 4}));
  EXPECT_EQ(keys(SpanWindow::none, 5), (Range{1, 7}));
  EXPECT_EQ(keys(SpanWindow::left, 5), (Range{3, 7}));
}

TEST(Bands, SpansAreCutAtDocumentsAndCheckedInTheStream) {
  const Packing packing = Packing::from_lengths({{4, 4}});
  Mask mask;
  mask.spans = {0, 0, 1, 1, 1, 1, 0, 0};
  const Bands bands(packing, mask);
  EXPECT_EQ(bands.keys(0, {2, 3}), (Range{0, 4}));
  EXPECT_EQ(bands.keys(1, {0, 1}), (Range{0, 2}));
  mask.spans = {1, 1, 0, 1, 0, 0, 0, 0};
  EXPECT_THAT(refusal([&] { Bands(packing, mask); }), HasSubstr("row 3 of sequence 0 has id 1 again"));
  mask.spans = {1, 1};
  EXPECT_THAT(refusal([&] { Bands(packing, mask); }), HasSubstr("2 for 1 x 8 rows"));
  mask.spans = {0, 0, -5, 0, 0, 0, 0, 0};
  EXPECT_THAT(refusal([&] { Bands(packing, mask); }), HasSubstr("row 2 of sequence 0 has id -5"));
}

TEST(Bands, BoundsNeverDecreaseAndPairsAreTheirSum) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  for (int i = 0; i < 2000; ++i) {
    const int64_t rows = 1 + below(20);
    const Packing packing = one_document(rows);
    Mask mask{.causal = below(2) == 0};
    if (below(2)) mask.left = below(rows + 2);
    if (!mask.causal && below(2)) mask.right = below(rows + 2);
    for (int64_t row = 0, id = 1; below(2) && row < rows; ++id) {
      const int64_t length = std::min(rows - row, 1 + below(5));
      mask.spans.insert(mask.spans.end(), length, below(2) ? id : 0);
      row += length;
    }
    if (static_cast<int64_t>(mask.spans.size()) != rows) mask.spans.clear();
    mask.span_window = static_cast<SpanWindow>(below(3));
    const Bands bands(packing, mask);
    int64_t pairs = 0;
    Range before{0, 0};
    for (int64_t p = 0; p < rows; ++p) {
      const Range keys = bands.keys(0, {p, p + 1});
      ASSERT_GE(keys.begin, before.begin);
      ASSERT_GE(keys.end, before.end);
      ASSERT_TRUE(keys.begin <= p && p < keys.end);
      before = keys;
      pairs += keys.size();
    }
    ASSERT_EQ(bands.pairs(0, {0, rows}), pairs);
    const int64_t cut = below(rows + 1);
    ASSERT_EQ(bands.pairs(0, {0, cut}) + bands.pairs(0, {cut, rows}), pairs);
  }
}

}  // namespace
}  // namespace blockcp
