#include "blockcp/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <limits>
#include <nlohmann/json.hpp>

#include "refusal.h"

namespace blockcp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Matrix = std::vector<std::vector<int64_t>>;

Plan plan_of(std::vector<int64_t> lengths, int64_t rows, int world, const Mask& mask = {}, int rank = 0) {
  return Plan(Packing::from_lengths({std::move(lengths)}, rows),
              {.world = world, .rank = rank, .masks = {{"full", mask}}});
}

PlanOptions asking_for(Path path, int world) { return {.world = world, .exchange = {{"full", path}}}; }

TEST(Plan, ChoosesHaloWhereNeighboursSufficeAndSaysWhy) {
  const Plan plan = plan_of({6, 2, 5, 3}, 16, 4);
  EXPECT_EQ(plan.entry().choice.path, Path::halo);
  EXPECT_THAT(plan.entry().choice.reason, HasSubstr("left neighbour"));
  const Plan far = plan_of({10, 6}, 16, 4);
  EXPECT_EQ(far.entry().choice.path, Path::a2a);
  EXPECT_THAT(far.entry().choice.reason, HasSubstr("rank 2 needs 8 rows of sequence 0 from its left, more than the 4"));
  EXPECT_THAT(plan_of({4, 4, 4, 4}, 16, 4).entry().choice.reason, HasSubstr("nothing to exchange"));
  EXPECT_THAT(plan_of({16}, 16, 1).entry().choice.reason, HasSubstr("one rank"));
}

TEST(Plan, APathThatCannotRunIsRefusedWithItsReason) {
  const std::string text = refusal([] { Plan(Packing::from_lengths({{10, 6}}), asking_for(Path::halo, 4)); });
  EXPECT_THAT(text, HasSubstr("exchange 'halo' cannot run here: rank 2 needs 8 rows"));
  Mask mask{.causal = false};
  EXPECT_THAT(
      refusal([&] {
        Plan(Packing::from_lengths({{8}}), {.world = 2, .masks = {{"full", mask}}, .exchange = {{"full", Path::halo}}});
      }),
      HasSubstr("from its right"));
}

TEST(Plan, MasksAreNamedAndUndeclaredOnesSaySo) {
  const Plan plan(Packing::from_lengths({{16}}), {.world = 4, .masks = {{"full", Mask{}}, {"local", windowed(3)}}});
  EXPECT_EQ(plan.entry("local").choice.path, Path::halo);
  EXPECT_EQ(plan.entry("full").choice.path, Path::a2a);
  EXPECT_THAT(refusal([&] { plan.entry("other"); }), HasSubstr("'other' is not (declared: 'full', 'local')"));
  EXPECT_THAT(refusal([&] { plan.entry(); }), HasSubstr("none was named (declared: 'full', 'local')"));
  EXPECT_THAT(refusal([] {
                Plan(Packing::from_lengths({{16}}), {.world = 4, .exchange = {{"ful", Path::ring}}});
              }),
              HasSubstr("it names 'ful'"));
}

TEST(Plan, FingerprintIsEqualOnAllRanksAndDiffersBetweenPlans) {
  EXPECT_EQ(plan_of({6, 2}, 8, 2, {}, 0).fingerprint(), plan_of({6, 2}, 8, 2, {}, 1).fingerprint());
  EXPECT_NE(plan_of({6, 2}, 8, 2).fingerprint(), plan_of({5, 3}, 8, 2).fingerprint());
  EXPECT_NE(plan_of({6, 2}, 8, 2).fingerprint(), plan_of({6, 2}, 8, 2, windowed(3)).fingerprint());
  EXPECT_NE(plan_of({6, 2}, 8, 2).fingerprint(), plan_of({6, 2}, 8, 4).fingerprint());
  EXPECT_NE(plan_of({6, 2}, 8, 2).fingerprint(),
            Plan(Packing::from_lengths({{6, 2}}), asking_for(Path::ring, 2)).fingerprint());
}

TEST(Plan, TheOriginTellsWhatDiffers) {
  const auto origin = [](std::vector<int64_t> lengths, const Mask& mask, int rank = 0) {
    return plan_of(std::move(lengths), 8, 2, mask, rank).entry().schedule.origin;
  };
  Mask spans{.spans = {0, 1, 1, 0, 0, 0, 0, 0}}, others{.spans = {0, 0, 1, 1, 0, 0, 0, 0}};
  const Origin first = origin({6, 2}, spans);
  EXPECT_EQ(first, origin({6, 2}, spans, 1));
  EXPECT_EQ(first.mask, "causal, spans (left)");
  Origin changed = origin({5, 3}, spans);
  EXPECT_NE(std::exchange(changed.documents, first.documents), first.documents);
  EXPECT_EQ(changed, first);
  changed = origin({6, 2}, others);
  EXPECT_NE(std::exchange(changed.spans, first.spans), first.spans);
  EXPECT_EQ(changed, first);
  EXPECT_EQ(origin({6, 2}, windowed(3)).mask, "causal, window 3");
  EXPECT_EQ(origin({6, 2}, windowed(3, 1, false)).mask, "both ways, window (3, 1)");
  EXPECT_EQ(origin({6, 2}, windowed({}, 1, false)).mask, "both ways, window (-1, 1)");
  EXPECT_EQ(origin({6, 2}, windowed(INT64_MAX, 0, true)).mask, "causal, window 9223372036854775808");
  EXPECT_EQ(origin({6, 2}, Mask{}).spans, 0u);
}

TEST(Plan, SpansArePaddedWithTheRows) {
  Mask mask;
  mask.spans = {0, 1, 1, 0, 0, 2, 2, 0, 0, 0};
  const Plan plan(Packing::from_lengths({{10}}), {.world = 4, .masks = {{"full", mask}}, .pad = true});
  EXPECT_EQ(plan.entry().mask.spans.size(), 12u);
  EXPECT_EQ(plan.entry().bands.keys(0, {5, 6}), (Range{0, 7}));
}

TEST(Plan, ExplainNamesPathsReasonsAndBalance) {
  const Plan plan = plan_of({10, 6}, 16, 4);
  const std::string text = explain(plan, Shape{});
  for (const char* part : {"2 documents in 1 x 16 rows", "mask 'full' (causal): a2a",
                           "halo       cannot run: rank 2 needs 8 rows", "work max/mean", "allgather"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  const auto json =
      nlohmann::json::parse(explain_json(plan, Shape{.q_heads = 4, .kv_heads = 2, .head_dim = 8, .value_dim = 8}));
  const auto& full = json["masks"]["full"];
  EXPECT_EQ(full["path"], "a2a");
  EXPECT_EQ(full["visible_pairs"], 55 + 21);
  EXPECT_EQ(full["paths"][0]["rows_received"], (std::vector<int64_t>{12, 12, 12, 12}));
  EXPECT_EQ(full["paths"][2]["rows_received"], (std::vector<int64_t>{0, 4, 8, 2}));
  EXPECT_EQ(full["paths"][2]["forward_bytes_received"][1], 4 * 2 * 16 * 4);
  EXPECT_EQ(full["kv"][0]["recv"], (std::vector<int64_t>{0, 4, 8, 2}));
}

TEST(CasesPlan, PL_03_tail_padding_is_not_a_document) {
  for (int64_t real = 697; real <= 704; ++real) {
    const Plan plan = plan_of({real}, 704, 4);
    const KvPlan kv = kv_plan(plan, plan.entry());
    EXPECT_THAT(kv.nreal, ElementsAre(176, 176, 176, real - 528));
    EXPECT_THAT(kv.recv, ElementsAre(0, 176, 352, 528));
    EXPECT_EQ(kv.real_end[3], real);
  }
}

TEST(CasesPlan, PL_05_offsets_are_local) {
  const Plan plan = plan_of({2048}, 2048, 2, {}, 1);
  ASSERT_EQ(plan.entry().schedule.forward.back().blocks.size(), 1u);
  const Block& block = plan.entry().schedule.forward.back().blocks[0];
  EXPECT_EQ(block.q, (Piece{kQ, 0, 1024}));
  EXPECT_EQ(block.q_pos, 1024);
  EXPECT_EQ(block.k_pos, 0);
  const Plan two = plan_of({1000, 1048}, 2048, 2, {}, 1);
  const KvPlan kv = kv_plan(two, two.entry());
  EXPECT_THAT(kv.s_first, ElementsAre(0, 1000));
  EXPECT_THAT(kv.nreal, ElementsAre(1024, 1024));
  EXPECT_THAT(kv.real_end, ElementsAre(1024, 2048));
  EXPECT_THAT(kv.recv, ElementsAre(0, 24));
  EXPECT_THAT(kv.send, ElementsAre(24, 0));
  EXPECT_TRUE(kv.use_halo);
}

TEST(CasesPlan, PL_14_one_row_per_rank) {
  const Plan plan = plan_of({4}, 4, 4);
  EXPECT_EQ(split_matrix(plan, plan.entry()), (Matrix{{1, 1, 1, 1}, {0, 1, 1, 1}, {0, 0, 1, 1}, {0, 0, 0, 1}}));
  EXPECT_FALSE(kv_plan(plan, plan.entry()).use_halo);
  EXPECT_THAT(refusal([] { Plan(Packing::from_lengths({{4}}), asking_for(Path::halo, 4)); }),
              HasSubstr("rank 3 needs 3 rows"));
  EXPECT_EQ(plan_of({2}, 4, 4).entry().choice.path, Path::halo);
  EXPECT_EQ(plan_of({1}, 1, 1).local_rows(), 1);
}

TEST(CasesPlan, PL_15_a_length_that_the_world_does_not_divide) {
  const std::string text = refusal([] { plan_of({10}, 10, 4); });
  EXPECT_THAT(text, HasSubstr("10 rows on 4 ranks"));
  const Plan plan(Packing::from_lengths({{10}}), {.world = 4, .pad = true});
  EXPECT_EQ(plan.packing().rows(), 12);
  EXPECT_EQ(plan.given_rows(), 10);
  EXPECT_EQ(plan.packing().real_rows(), 10);
}

TEST(CasesPlan, PL_17_repeated_offsets_give_the_same_plan) {
  const auto plan = [](std::vector<int64_t> cu) {
    return Plan(Packing::from_cu_seqlens(cu), {.world = 2}).fingerprint();
  };
  EXPECT_EQ(plan({0, 3, 8, 8, 8, 8}), plan({0, 3, 8}));
  EXPECT_EQ(plan({0, 3, 3, 8}), plan({0, 3, 8}));
}

TEST(CasesPlan, PL_18_the_window_starts_at_the_document) {
  const Plan plan = plan_of({5, 11}, 16, 4, windowed(4));
  EXPECT_THAT(kv_plan(plan, plan.entry()).recv, ElementsAre(0, 3, 3, 3));
  EXPECT_EQ(plan.entry().choice.path, Path::halo);
}

TEST(CasesPlan, KN_04_a_window_between_L_and_S_is_kept) {
  const Plan plan = plan_of({16}, 16, 4, windowed(6));
  EXPECT_THAT(kv_plan(plan, plan.entry()).recv, ElementsAre(0, 4, 5, 5));
  EXPECT_EQ(plan.entry().choice.path, Path::a2a);
  EXPECT_THAT(plan.entry().choice.reason, HasSubstr("needs 5 rows of sequence 0 from its left, more than the 4"));
}

TEST(CasesPlan, EX_03_zero_splits) {
  const Plan plan = plan_of({5}, 16, 4);
  EXPECT_EQ(split_matrix(plan, plan.entry()), (Matrix{{4, 4, 0, 0}, {0, 1, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}}));
  const NeededSplits splits = needed_splits(plan, plan.entry(), 0);
  EXPECT_THAT(splits.in_splits, ElementsAre(4, 4, 0, 0));
  EXPECT_THAT(splits.out_splits, ElementsAre(4, 0, 0, 0));
  EXPECT_THAT(splits.send_index, ElementsAre(0, 1, 2, 3, 0, 1, 2, 3));
  const Plan aligned = plan_of({4, 4, 4, 4}, 16, 4);
  EXPECT_EQ(split_matrix(aligned, aligned.entry()), (Matrix{{4, 0, 0, 0}, {0, 4, 0, 0}, {0, 0, 4, 0}, {0, 0, 0, 4}}));
  const Plan nothing = plan_of({}, 16, 4);
  EXPECT_EQ(split_matrix(nothing, nothing.entry()), Matrix(4, std::vector<int64_t>(4, 0)));
}

TEST(CasesPlan, EX_04_nothing_to_exchange_is_no_transfer_on_any_rank) {
  for (int rank = 0; rank < 4; ++rank) {
    for (const Mask& mask : {Mask{}, windowed(1)}) {
      const Plan plan = plan_of({4, 4, 4, 4}, 16, 4, mask, rank);
      for (const auto* steps : {&plan.entry().schedule.forward, &plan.entry().schedule.backward}) {
        for (const Step& step : *steps) EXPECT_TRUE(step.starts.empty());
      }
    }
  }
}

TEST(CasesPlan, EX_16_fetches_and_matrices_for_any_number_of_ranks) {
  const Plan near = plan_of({6, 2, 5, 3}, 16, 4);
  EXPECT_THAT(kv_plan(near, near.entry()).recv, ElementsAre(0, 4, 0, 4));
  EXPECT_TRUE(kv_plan(near, near.entry()).use_halo);
  const Plan far = plan_of({10, 6}, 16, 4);
  EXPECT_THAT(kv_plan(far, far.entry()).recv, ElementsAre(0, 4, 8, 2));
  EXPECT_FALSE(kv_plan(far, far.entry()).use_halo);
  EXPECT_EQ(split_matrix(far, far.entry()), (Matrix{{4, 4, 4, 0}, {0, 4, 4, 0}, {0, 0, 4, 2}, {0, 0, 0, 4}}));
  const Plan three = plan_of({2, 9, 1}, 12, 3);
  EXPECT_THAT(kv_plan(three, three.entry()).recv, ElementsAre(0, 2, 6));
  EXPECT_EQ(split_matrix(three, three.entry()), (Matrix{{4, 2, 2}, {0, 4, 4}, {0, 0, 4}}));
}

TEST(CasesPlan, PM_06_bytes_follow_the_kv_heads) {
  const Plan plan = plan_of({6, 2}, 8, 2);
  const RankCost counted = cost(plan.problem(plan.entry()), plan.entry().schedule);
  Shape shape{.q_heads = 16, .kv_heads = 2, .head_dim = 8, .value_dim = 8};
  const Plan other = plan_of({6, 2}, 8, 2, {}, 1);
  const RankCost received = cost(other.problem(other.entry()), other.entry().schedule);
  EXPECT_EQ(counted.forward_sent, 4);
  EXPECT_EQ(forward_bytes_received(received, shape), 4 * 2 * 16 * 4);
  shape.q_heads = 2;
  EXPECT_EQ(forward_bytes_received(received, shape), 4 * 2 * 16 * 4);
}

TEST(CasesPlan, PM_07_schedules_hold_a_block_for_each_document_of_the_rank_and_no_more) {
  const int64_t rows = 131072;
  for (int64_t documents : {1, 1024, 16384}) {
    const Plan plan = plan_of(std::vector<int64_t>(documents, rows / documents), rows, 8, {}, 3);
    size_t blocks = 0;
    for (const Step& step : plan.entry().schedule.forward) blocks += step.blocks.size();
    EXPECT_EQ(blocks, static_cast<size_t>(std::max<int64_t>(documents / 8, 1)));
  }
}

double seconds_to_plan(int64_t documents, int world) {
  const std::vector<int64_t> lengths(documents, 131072 / documents);
  const std::clock_t start = std::clock();  // of the processor's time, not of the machine's other work
  plan_of(lengths, 131072, world, {}, world / 2);
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

// How many times longer the second plan takes, measured side by side: the least of several, which other work on the
// machine disturbs least.
double least_ratio(std::pair<int64_t, int> documents_and_world, std::pair<int64_t, int> more) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 9; ++i) {
    const double once = seconds_to_plan(documents_and_world.first, documents_and_world.second);
    least = std::min(least, seconds_to_plan(more.first, more.second) / once);
  }
  return least;
}

TEST(CasesPlan, PM_07_planning_takes_time_by_documents_and_not_by_their_square_or_the_ranks) {
  EXPECT_LT(least_ratio({2048, 8}, {16384, 8}), 20) << "of 8 times the documents; their square is 64 times";
  EXPECT_LT(least_ratio({16384, 8}, {16384, 256}), 4) << "of 32 times the ranks";
}

}  // namespace
}  // namespace blockcp
