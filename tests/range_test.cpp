#include "blockcp/base/range.h"

#include <gtest/gtest.h>

#include <random>

#include "blockcp/base/dtype.h"
#include "blockcp/base/error.h"

namespace blockcp {
namespace {

constexpr int64_t kRows = 40;
using Bits = std::vector<bool>;

Bits bits(const std::vector<Range>& ranges) {
  Bits set(kRows);
  for (const Range& range : ranges)
    for (int64_t row = range.begin; row < range.end; ++row) set[static_cast<size_t>(row)] = true;
  return set;
}

template <class Op>
Bits combine(const Bits& a, const Bits& b, Op op) {
  Bits set(kRows);
  for (size_t i = 0; i < set.size(); ++i) set[i] = op(a[i], b[i]);
  return set;
}

void expect_normal(const RangeSet& set) {
  for (const Range& range : set) EXPECT_FALSE(range.empty());
  for (size_t i = 1; i < set.size(); ++i) EXPECT_GT(set[i].begin, set[i - 1].end) << "ranges touch or are out of order";
}

TEST(Range, intersect_of_apart_ranges_is_empty) {
  EXPECT_TRUE(intersect(Range{0, 3}, Range{3, 5}).empty());
  EXPECT_EQ(intersect(Range{0, 3}, Range{7, 9}).size(), 0);
  EXPECT_EQ(intersect(Range{0, 8}, Range{3, 5}), (Range{3, 5}));
}

TEST(RangeSet, joins_what_touches_and_drops_what_is_empty) {
  EXPECT_EQ(normalized({{5, 7}, {2, 2}, {0, 3}, {3, 5}, {9, 9}}), (RangeSet{{0, 7}}));
  EXPECT_TRUE(normalized({{4, 4}, {6, 5}}).empty());
}

TEST(RangeSet, algebra_agrees_with_bit_sets) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const auto some = [&] {
    std::vector<Range> ranges(random() % 7);
    for (Range& range : ranges) {
      range.begin = static_cast<int64_t>(random() % kRows);
      range.end = std::min<int64_t>(kRows, range.begin + static_cast<int64_t>(random() % 9));
    }
    return ranges;
  };
  for (int round = 0; round < 3000; ++round) {
    const std::vector<Range> raw_a = some(), raw_b = some();
    const RangeSet a = normalized(raw_a), b = normalized(raw_b);
    const RangeSet both = intersect(a, b), rest = subtract(a, b), all = unite(a, b);
    for (const RangeSet& set : {a, b, both, rest, all}) expect_normal(set);
    EXPECT_EQ(bits(a), bits(raw_a));
    EXPECT_EQ(bits(both), combine(bits(a), bits(b), [](bool x, bool y) { return x && y; }));
    EXPECT_EQ(bits(rest), combine(bits(a), bits(b), [](bool x, bool y) { return x && !y; }));
    EXPECT_EQ(bits(all), combine(bits(a), bits(b), [](bool x, bool y) { return x || y; }));
    EXPECT_EQ(count(all), count(rest) + count(b));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(DType, names_are_read_back_and_others_refused) {
  for (DType type : {DType::f32, DType::f64, DType::bf16, DType::f16}) EXPECT_EQ(parse_dtype(name(type)), type);
  for (const char* text : {"", "float32", "fp8", "FP32"}) {
    try {
      parse_dtype(text);
      ADD_FAILURE() << text << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::argument);
      EXPECT_NE(std::string(error.what()).find("\"" + std::string(text) + "\""), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace blockcp
