#include "blockcp/schedule/packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "refusal.h"

namespace blockcp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Packing from_ids(const std::vector<int64_t>& ids, int64_t batch = 1) {
  return Packing::from_ids(ids, batch, static_cast<int64_t>(ids.size()) / batch);
}

TEST(Packing, IdsBecomeDocuments) {
  EXPECT_THAT(from_ids({1, 1, 1, 2, 2, 0, 0, 7}).documents(),
              ElementsAre(Document{0, {0, 3}}, Document{0, {3, 5}}, Document{0, {7, 8}}));
  EXPECT_EQ(from_ids({0, 0, 4, 4}).real_rows(), 2);
  EXPECT_TRUE(from_ids({}).documents().empty());
  EXPECT_EQ(Packing::from_ids({}, 0, 16).rows(), 16);
}

TEST(Packing, IdsAreLabels) { EXPECT_EQ(from_ids({5, 5, 2, 2, 9, 9, 9, 9}), from_ids({1, 1, 2, 2, 3, 3, 3, 3})); }

TEST(Packing, AnIdThatComesBackIsRefused) {
  const std::string again = refusal([] { from_ids({1, 1, 2, 2, 1, 1, 2, 2}); });
  EXPECT_THAT(again, HasSubstr("row 4 of sequence 0 has id 1 again, whose run ended at row 2"));
  EXPECT_THAT(refusal([] { from_ids({3, 3, 0, 3}); }), HasSubstr("row 3 of sequence 0 has id 3 again"));
  EXPECT_THAT(refusal([] { from_ids({1, 2, 1, 1, 1, 2, 1, 1}, 2); }), HasSubstr("sequence 0"));
}

TEST(Packing, NegativeIdsAndWrongSizesAreRefused) {
  EXPECT_THAT(refusal([] { from_ids({1, -3}); }), HasSubstr("row 1 of sequence 0 has id -3"));
  EXPECT_THAT(refusal([] { Packing::from_ids(std::vector<int64_t>(7, 1), 1, 8); }), HasSubstr("7 for 1 x 8 rows"));
}

TEST(Packing, LengthsFromTheStartThenPadding) {
  EXPECT_EQ(Packing::from_lengths({{3, 0, 2}}, 7), from_ids({1, 1, 1, 2, 2, 0, 0}));
  EXPECT_EQ(Packing::from_lengths({{2}, {1, 2}}), from_ids({1, 1, 0, 1, 2, 2}, 2));
  EXPECT_EQ(Packing::from_lengths({{}}, 8), from_ids({0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_THAT(refusal([] {
                Packing::from_lengths({{4, 1, 3, -2}});
              }),
              HasSubstr("lengths[3] of sequence 0 is -2 (4 documents)"));
  EXPECT_THAT(refusal([] { Packing::from_lengths({{4, 5}}, 8); }), HasSubstr("sum to 9 and rows = 8"));
  EXPECT_THAT(refusal([] { Packing::from_lengths({{INT64_MAX, 1}}); }), HasSubstr("fewer than 2^31 rows"));
}

TEST(Packing, MalformedCumulativeLengthsAreRefused) {
  const auto cu = [](std::vector<int64_t> values) { return Packing::from_cu_seqlens(values); };
  EXPECT_THAT(refusal([&] { cu({}); }), HasSubstr("it is empty"));
  EXPECT_THAT(refusal([&] { cu({1, 3}); }), HasSubstr("cu_seqlens[0] = 1"));
  EXPECT_THAT(refusal([&] { cu({0, 5, 3}); }), HasSubstr("cu_seqlens[2] = 3 follows 5"));
  EXPECT_THAT(refusal([&] { cu({0, 5, INT64_MAX}); }), HasSubstr("cu_seqlens[2] = 9223372036854775807"));
  EXPECT_THAT(refusal([] {
                Packing::from_cu_seqlens(std::vector<int64_t>{0, 3, 8}, 7);
              }),
              HasSubstr("the last is 8 and rows = 7"));
}

TEST(Packing, PositionsStartDocumentsWhereTheyDoNotContinue) {
  const auto positions = [](std::vector<int64_t> values) {
    return Packing::from_positions(values, {}, 1, values.size());
  };
  EXPECT_EQ(positions({0, 1, 2, 3, 0, 0, 0, 0, 1, 2, 3, 4}), from_ids({1, 1, 1, 1, 2, 3, 4, 5, 5, 5, 5, 5}));
  EXPECT_EQ(positions({5, 6, 7, 8}), from_ids({1, 1, 1, 1}));
  EXPECT_EQ(positions({2, 3, 4, 2, 3}), from_ids({1, 1, 1, 2, 2}));
  EXPECT_EQ(positions({INT64_MAX - 1, INT64_MAX, 0}), from_ids({1, 1, 2}));
  const std::vector<int64_t> values = {0, 1, 2, 3, 4};
  const std::vector<uint8_t> padding = {0, 0, 1, 0, 0};
  EXPECT_EQ(Packing::from_positions(values, padding, 1, 5), from_ids({1, 1, 0, 2, 2}));
  EXPECT_THAT(refusal([&] { positions({0, -1}); }), HasSubstr("row 1 of sequence 0 has -1"));
}

TEST(Packing, OverlappingFindsDocumentsOfARange) {
  const Packing packing = from_ids({1, 1, 0, 2, 3, 3, 1, 1, 1, 2, 2, 2}, 2);
  EXPECT_EQ(packing.overlapping(0, {1, 4}), (std::pair<size_t, size_t>{0, 2}));
  EXPECT_EQ(packing.overlapping(0, {2, 3}).first, packing.overlapping(0, {2, 3}).second);
  EXPECT_EQ(packing.overlapping(1, {0, 6}), (std::pair<size_t, size_t>{3, 5}));
}

TEST(Packing, FingerprintTellsPackingsApart) {
  EXPECT_EQ(from_ids({1, 1, 2, 2}).fingerprint(), from_ids({8, 8, 3, 3}).fingerprint());
  EXPECT_NE(from_ids({1, 1, 2, 2}).fingerprint(), from_ids({1, 1, 1, 2}).fingerprint());
  EXPECT_NE(from_ids({1, 1, 0, 0}).fingerprint(), from_ids({1, 1}).fingerprint());
  EXPECT_NE(from_ids({1, 1, 1, 1}, 2).fingerprint(), from_ids({1, 1, 1, 1}, 1).fingerprint());
}

TEST(CasesPacking, PL_09_padding_is_one_run_and_never_documents) {
  EXPECT_EQ(Packing::from_lengths({{100}}, 70100).documents().size(), 1u);
  std::vector<int64_t> ids(70100, 0);
  std::fill_n(ids.begin(), 100, 1);
  EXPECT_EQ(from_ids(ids).documents().size(), 1u);
}

TEST(CasesPacking, PL_17_repeated_offsets_are_no_documents) {
  const Packing expected = Packing::from_cu_seqlens(std::vector<int64_t>{0, 3, 8});
  EXPECT_EQ(Packing::from_cu_seqlens(std::vector<int64_t>{0, 3, 8, 8, 8, 8}), expected);
  EXPECT_EQ(Packing::from_cu_seqlens(std::vector<int64_t>{0, 3, 3, 8}), expected);
}

TEST(CasesPacking, DT_03_huge_ids_are_labels_not_sizes) {
  const int64_t huge = int64_t{1} << 40;
  EXPECT_EQ(from_ids({huge, huge, huge - 1, huge - 1}), from_ids({1, 1, 2, 2}));
}

}  // namespace
}  // namespace blockcp
