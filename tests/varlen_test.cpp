// The kernel alone on packed documents, in memory of exactly the size it may touch, so that sanitizers see a slip.
#include "blockcp/engine/varlen.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "blockcp/base/error.h"
#include "blockcp/kernels/select.h"

namespace blockcp {
namespace {

using testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

void add(double& sum, double term) { sum = std::isnan(sum) ? term : sum + term; }

struct Problem {
  AttentionShape shape{DType::f64, 4, 2, 5, 3};
  std::vector<int64_t> q_offsets, k_offsets;
  int64_t q_rows, k_rows;
  Band band;
  double scale = 0.7;

  Offsets q() const { return {"cu_seqlens_q", q_offsets, q_rows}; }
  Offsets k() const { return {"cu_seqlens_k", k_offsets, k_rows}; }
  // Key j of a document, seen from query i of it?
  bool sees(Range queries, Range keys, int64_t i, int64_t j) const {
    const int64_t position = i + keys.size() - queries.size();
    return j >= position - band.left && j <= position + band.right;
  }
};

// [heads, rows, width], dense.
struct Dense {
  Dense(int64_t head_count, int64_t row_count, int64_t col_count, std::mt19937_64* random = nullptr)
      : rows(row_count), width(col_count), values(static_cast<size_t>(head_count * rows * width), 1e300) {
    std::normal_distribution<double> normal;
    if (random)
      for (double& value : values) value = normal(*random);
  }
  Tensor view() { return {values.data(), 0, rows * width, width, 1}; }
  double& at(int64_t h, int64_t row, int64_t c) { return values[static_cast<size_t>((h * rows + row) * width + c)]; }

  int64_t rows, width;
  std::vector<double> values;
};

struct Tensors {
  Tensors(const Problem& p, std::mt19937_64& random)
      : q(p.shape.q_heads, p.q_rows, p.shape.head_dim, &random),
        k(p.shape.kv_heads, p.k_rows, p.shape.head_dim, &random),
        v(p.shape.kv_heads, p.k_rows, p.shape.value_dim, &random),
        dout(p.shape.q_heads, p.q_rows, p.shape.value_dim, &random),
        out(p.shape.q_heads, p.q_rows, p.shape.value_dim),
        lse(p.shape.q_heads, p.q_rows, 1),
        dq(p.shape.q_heads, p.q_rows, p.shape.head_dim),
        dk(p.shape.kv_heads, p.k_rows, p.shape.head_dim),
        dv(p.shape.kv_heads, p.k_rows, p.shape.value_dim) {}
  Dense q, k, v, dout, out, lse, dq, dk, dv;
};

void attend(const Problem& p, Tensors& t, const Kernel& kernel) {
  const auto parallel = make_pool(2);
  check_offsets(p.q(), p.k());
  const Varlen call{p.shape, p.q(), p.k(), p.band, p.scale, kernel, *parallel};
  forward(call, {t.q.view(), t.k.view(), t.v.view(), t.out.view(), t.lse.view()});
  backward(call, {t.q.view(), t.k.view(), t.v.view(), t.out.view(), t.lse.view(), t.dout.view(), t.dq.view(),
                  t.dk.view(), t.dv.view()});
}

double dot(Dense& a, int64_t a_head, int64_t a_row, Dense& b, int64_t b_head, int64_t b_row) {
  double sum = 0;
  for (int64_t c = 0; c < a.width; ++c) sum += a.at(a_head, a_row, c) * b.at(b_head, b_row, c);
  return sum;
}

// The formulas of attention.h, one row and head at a time.
void attend_row(const Problem& p, Tensors& t, Range queries, Range keys, int64_t i, int64_t h) {
  const int64_t row = queries.begin + i, kv = h / p.shape.group();
  std::vector<std::pair<int64_t, double>> seen;  // row of k and score
  double sum = 0;
  for (int64_t j = 0; j < keys.size(); ++j)
    if (p.sees(queries, keys, i, j)) {
      seen.emplace_back(keys.begin + j, p.scale * dot(t.q, h, row, t.k, kv, keys.begin + j));
      sum += std::exp(seen.back().second);
    }
  t.lse.at(h, row, 0) = seen.empty() ? -kInf : std::log(sum);
  for (const auto& [key, score] : seen)
    for (int64_t c = 0; c < t.v.width; ++c) add(t.out.at(h, row, c), std::exp(score) / sum * t.v.at(kv, key, c));
  const double delta = dot(t.out, h, row, t.dout, h, row);
  for (const auto& [key, score] : seen) {
    const double weight = std::exp(score) / sum, ds = weight * (dot(t.dout, h, row, t.v, kv, key) - delta) * p.scale;
    for (int64_t c = 0; c < t.q.width; ++c) add(t.dq.at(h, row, c), ds * t.k.at(kv, key, c));
    for (int64_t c = 0; c < t.q.width; ++c) add(t.dk.at(kv, key, c), ds * t.q.at(h, row, c));
    for (int64_t c = 0; c < t.v.width; ++c) add(t.dv.at(kv, key, c), weight * t.dout.at(h, row, c));
  }
}

// Where nothing is added NaN stays, and exactly 0 is to be expected.
Tensors expected(const Problem& p, const Tensors& given) {
  Tensors t = given;
  for (Dense* zero : {&t.out, &t.dq, &t.dk, &t.dv}) std::fill(zero->values.begin(), zero->values.end(), kNothing);
  std::fill(t.lse.values.begin(), t.lse.values.end(), -kInf);
  for (int64_t d = 0; d < p.q().documents(); ++d)
    for (int64_t i = 0; i < p.q().document(d).size(); ++i)
      for (int64_t h = 0; h < p.shape.q_heads; ++h) attend_row(p, t, p.q().document(d), p.k().document(d), i, h);
  return t;
}

void expect_near(const Dense& got, const Dense& want, const char* name) {
  for (size_t i = 0; i < want.values.size(); ++i) {
    if (std::isnan(want.values[i]) || std::isinf(want.values[i]))
      EXPECT_EQ(got.values[i], std::isinf(want.values[i]) ? want.values[i] : 0) << name << " at " << i;
    else
      EXPECT_NEAR(got.values[i], want.values[i], 1e-10 * std::max(1.0, std::abs(want.values[i])))
          << name << " at " << i;
  }
}

void expect_right(const Problem& problem) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (const Kernel& kernel : all_kernels()) {
    if (!kernel.why_not(problem.shape, detect_machine()).empty()) continue;
    SCOPED_TRACE(kernel.name);
    std::mt19937_64 random(seed);
    Tensors tensors(problem, random);
    attend(problem, tensors, kernel);
    const Tensors want = expected(problem, tensors);
    expect_near(tensors.out, want.out, "out");
    expect_near(tensors.lse, want.lse, "lse");
    expect_near(tensors.dq, want.dq, "dq");
    expect_near(tensors.dk, want.dk, "dk");
    expect_near(tensors.dv, want.dv, "dv");
  }
}

TEST(Varlen, KE_01_more_queries_than_keys) {
  expect_right({.q_offsets = {0, 76, 110, 256}, .k_offsets = {0, 3, 5, 8}, .q_rows = 256, .k_rows = 8});
}

TEST(Varlen, KE_03_keys_without_queries_and_rows_of_no_document) {
  for (const Band& band : {Band{}, Band{.left = 1}, Band{.left = 2, .right = 1}, Band{.right = Band::kUnbounded}})
    expect_right(
        {.q_offsets = {0, 0, 3, 5, 5}, .k_offsets = {0, 6, 10, 12, 20}, .q_rows = 7, .k_rows = 23, .band = band});
}

TEST(Varlen, queries_without_keys_and_nothing_at_all) {
  expect_right({.q_offsets = {0, 4, 9}, .k_offsets = {0, 0, 2}, .q_rows = 9, .k_rows = 2});
  expect_right({.q_offsets = {0}, .k_offsets = {0}, .q_rows = 0, .k_rows = 0});
  expect_right({.q_offsets = {0, 0}, .k_offsets = {0, 3}, .q_rows = 0, .k_rows = 3});
}

TEST(Varlen, KE_05_offsets_that_make_no_sense_are_refused) {
  const std::vector<int64_t> good = {0, 5, 9};
  const auto refusal = [&](std::vector<int64_t> q, const std::vector<int64_t>& k) -> std::string {
    try {
      check_offsets({"cu_seqlens_q", q, 9}, {"cu_seqlens_k", k, 9});
    } catch (const Error& error) {
      return error.kind() == ErrorKind::argument ? error.what() : "a fault";
    }
    return "";
  };
  EXPECT_EQ(refusal(good, {0, 0, 8}), "");
  EXPECT_THAT(refusal({}, good), HasSubstr("cu_seqlens_q must have"));
  EXPECT_THAT(refusal({1, 5, 9}, good), HasSubstr("cu_seqlens_q[0] = 1"));
  EXPECT_THAT(refusal(good, {0, 6, 5}), HasSubstr("cu_seqlens_k[1] = 6 and cu_seqlens_k[2] = 5"));
  EXPECT_THAT(refusal(good, {0, 6, 10}), HasSubstr("ends at 10 and there are 9 rows"));
  EXPECT_THAT(refusal(good, {0, 9}), HasSubstr("3 and 2 offsets"));
  EXPECT_NO_THROW(check_longest({"cu_seqlens_q", good, 9}, "max_seqlen_q", 5));
  EXPECT_THROW(check_longest({"cu_seqlens_q", good, 9}, "max_seqlen_q", 4), Error);
}

}  // namespace
}  // namespace blockcp
