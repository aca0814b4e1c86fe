#include "blockcp/kernels/partial.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "blockcp/kernels/element.h"

namespace blockcp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Partial, merge_is_softmax_over_the_union) {
  std::mt19937 random(std::random_device{}());
  std::normal_distribution<double> normal(0, 3);
  std::vector<double> scores(7), values(7);
  for (size_t i = 0; i < 7; ++i) {
    scores[i] = normal(random);
    values[i] = normal(random);
  }
  const auto over = [&](size_t begin, size_t end, std::vector<double>& out) {
    double sum = 0;
    for (size_t i = begin; i < end; ++i) sum += std::exp(scores[i]);
    out = {0};
    for (size_t i = begin; i < end; ++i) out[0] += std::exp(scores[i]) / sum * values[i];
    return Partial<double>{out, std::log(sum)};
  };
  std::vector<double> a, b, all;
  Partial<double> mine = over(0, 3, a);
  merge(mine, over(3, 7, b));
  const Partial<double> expected = over(0, 7, all);
  EXPECT_NEAR(a[0], all[0], 1e-13);
  EXPECT_NEAR(mine.lse, expected.lse, 1e-13);
}

TEST(Partial, nothing_is_the_identity) {
  std::vector<float> out = {1.1f, -2.3f}, zero = {0, 0};
  Partial<float> mine{out, 0.7f};
  merge(mine, Partial<float>{zero});
  EXPECT_EQ(out, (std::vector<float>{1.1f, -2.3f}));
  EXPECT_EQ(mine.lse, 0.7f);

  Partial<float> nothing{zero};
  merge(nothing, mine);
  EXPECT_EQ(zero, out);
  EXPECT_EQ(nothing.lse, 0.7f);

  std::vector<float> none = {0, 0};
  Partial<float> both{none};
  merge(both, Partial<float>{none});
  EXPECT_EQ(both.lse, -kInfinity);
  EXPECT_EQ(none, (std::vector<float>{0, 0}));
}

TEST(Partial, merge_of_far_apart_weights) {
  std::vector<double> a = {1}, b = {2};
  Partial<double> mine{a, -1e6};
  merge(mine, Partial<double>{b, 1e6});
  EXPECT_EQ(a[0], 2);
  EXPECT_EQ(mine.lse, 1e6);
}

TEST(Element, every_half_comes_back) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const f16 half{static_cast<uint16_t>(bits)};
    const bf16 brain{static_cast<uint16_t>(bits)};
    if (to_float(half) == to_float(half)) {
      EXPECT_EQ(to_f16(to_float(half)).bits, bits);
    } else {
      EXPECT_TRUE(std::isnan(to_float(to_f16(to_float(half)))));
    }
    if (to_float(brain) == to_float(brain)) {
      EXPECT_EQ(to_bf16(to_float(brain)).bits, bits);
    } else {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(to_float(brain)))));
    }
  }
}

TEST(Element, rounds_to_nearest_even) {
  EXPECT_EQ(to_f16(1 + 0x1p-11f).bits, to_f16(1).bits);
  EXPECT_EQ(to_f16(1 + 0x1.8p-10f).bits, to_f16(1 + 0x1p-9f).bits);
  EXPECT_EQ(to_f16(65519).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520).bits, 0x7c00);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0);
  EXPECT_EQ(to_f16(0x1.8p-25f).bits, 1);
  EXPECT_EQ(to_bf16(1 + 0x1p-8f).bits, to_bf16(1).bits);
  EXPECT_EQ(to_bf16(1 + 0x1.8p-7f).bits, to_bf16(1 + 0x1p-6f).bits);
}

}  // namespace
}  // namespace blockcp
