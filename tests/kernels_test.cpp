// Every kernel against the double reference, and the promises of attention.h: what is not seen is not read, same bits.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <functional>

#include "blockcp/base/error.h"
#include "blockcp/base/range.h"
#include "blockcp/kernels/select.h"
#include "kernel_problem.h"

namespace blockcp::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const Machine& machine() {
  static const Machine machine = detect_machine();
  return machine;
}

const Kernel& reference() { return select_kernel({}, machine(), "reference"); }

std::vector<Kernel> kernels_here(bool fast_only = false, DType type = DType::f32) {
  std::vector<Kernel> kernels;
  for (const Kernel& kernel : all_kernels()) {
    if (kernel.why_not({type}, machine()).empty() && !(fast_only && kernel.name == std::string_view("reference"))) {
      kernels.push_back(kernel);
    }
  }
  return kernels;
}

uint64_t fresh_seed() { return std::random_device{}(); }

int64_t up_to(std::mt19937_64& random, int64_t n) { return std::uniform_int_distribution<int64_t>(0, n)(random); }

double largest(const Values& values) {
  double top = 0;
  for (double x : values.data) {
    if (std::isfinite(x)) top = std::max(top, std::fabs(x));
  }
  return top;
}

// The largest difference; infinite where one is NaN or infinite and the other is not the same.
double difference(const Values& a, const Values& b) {
  double top = 0;
  for (size_t i = 0; i < a.data.size(); ++i) {
    if (a.data[i] == b.data[i] || (std::isnan(a.data[i]) && std::isnan(b.data[i]))) continue;
    const double apart = std::fabs(a.data[i] - b.data[i]);
    top = std::max(top, std::isfinite(apart) ? apart : kInfinity);
  }
  return top;
}

void expect_same_bits(const Values& a, const Values& b, const char* what) {
  ASSERT_EQ(a.data.size(), b.data.size());
  for (size_t i = 0; i < a.data.size(); ++i) {
    ASSERT_TRUE(std::memcmp(&a.data[i], &b.data[i], sizeof(double)) == 0 || a.data[i] == b.data[i])
        << what << " differs at element " << i << ": " << a.data[i] << " and " << b.data[i];
  }
}

// The rows of k that row i of q sees.
Range seen(const Document& d, int64_t i) {
  const int64_t position = d.q_pos + i - d.q_row;
  const int64_t begin = std::max(d.band.begin(position), d.k_pos) - d.k_pos + d.k_row;
  const int64_t end = std::min(d.band.end(position), d.k_pos + d.k_count()) - d.k_pos + d.k_row;
  return {begin, std::max(begin, end)};
}

// The formulas once more, dense and in fp32, to see how far fp32 can be trusted for this very problem. Dot products run
// over columns upwards or downwards.
Result dense_fp32(const Problem& p, const Result& given, bool upwards) {
  const AttentionShape& s = p.shape;
  Result r{Values(p.q.rows, s.q_heads, s.value_dim),
           Values(p.q.rows, s.q_heads, 1, -kInfinity),
           given.delta,
           Values(p.q.rows, s.q_heads, s.head_dim),
           Values(p.k.rows, s.kv_heads, s.head_dim),
           Values(p.k.rows, s.kv_heads, s.value_dim)};
  for (const Document& d : p.documents) {
    for (int64_t h = 0; h < s.q_heads; ++h) {
      const int64_t g = h / s.group();
      for (int64_t i = d.q_row; i < d.q_row + d.q_count; ++i) {
        const auto [begin, end] = seen(d, i);
        if (end == begin) continue;
        std::vector<float> scores;
        float top = -HUGE_VALF, sum = 0;
        for (int64_t j = begin; j < end; ++j) {
          float dot = 0;
          for (int64_t n = 0; n < s.head_dim; ++n) {
            const int64_t c = upwards ? n : s.head_dim - 1 - n;
            dot += static_cast<float>(p.q.at(i, h, c)) * static_cast<float>(p.k.at(j, g, c));
          }
          scores.push_back(dot * static_cast<float>(p.scale));
          top = std::max(top, scores.back());
        }
        for (float x : scores) sum += std::exp(x - top);
        r.lse.at(i, h) = top + std::log(sum);
        const auto lse = static_cast<float>(given.lse.at(i, h)), delta = static_cast<float>(given.delta.at(i, h));
        for (int64_t j = begin; j < end; ++j) {
          const float score = scores[static_cast<size_t>(j - begin)];
          const float own = std::exp(score - top) / sum, weight = std::exp(score - lse);
          float dp = 0;
          for (int64_t n = 0; n < s.value_dim; ++n) {
            const int64_t c = upwards ? n : s.value_dim - 1 - n;
            const auto v = static_cast<float>(p.v.at(j, g, c)), dout = static_cast<float>(p.dout.at(i, h, c));
            r.out.at(i, h, c) = static_cast<float>(r.out.at(i, h, c)) + own * v;
            r.dv.at(j, g, c) = static_cast<float>(r.dv.at(j, g, c)) + weight * dout;
            dp += v * dout;
          }
          const float ds = weight * (dp - delta) * static_cast<float>(p.scale);
          for (int64_t c = 0; c < s.head_dim; ++c) {
            r.dq.at(i, h, c) = static_cast<float>(r.dq.at(i, h, c)) + ds * static_cast<float>(p.k.at(j, g, c));
            r.dk.at(j, g, c) = static_cast<float>(r.dk.at(j, g, c)) + ds * static_cast<float>(p.q.at(i, h, c));
          }
        }
      }
    }
  }
  return r;
}

// For every element the sum of the sizes of the terms that it is summed from: a relative error of e in all weights or
// products changes the element by about e times that. For lse, whose error is that of the weights, 1.
Result sizes_of_terms(const Problem& p, const Result& exact) {
  const AttentionShape& s = p.shape;
  Result r{Values(p.q.rows, s.q_heads, s.value_dim), Values(p.q.rows, s.q_heads, 1, 1),
           Values(p.q.rows, s.q_heads, 1),           Values(p.q.rows, s.q_heads, s.head_dim),
           Values(p.k.rows, s.kv_heads, s.head_dim), Values(p.k.rows, s.kv_heads, s.value_dim)};
  const auto add = [](Values& to, int64_t i, int64_t h, double factor, const Values& x, int64_t j, int64_t g) {
    for (int64_t c = 0; c < x.width; ++c) to.at(i, h, c) += factor * std::fabs(x.at(j, g, c));
  };
  const auto dot = [](const Values& a, int64_t i, int64_t h, const Values& b, int64_t j, int64_t g, bool sizes) {
    double sum = 0;
    for (int64_t c = 0; c < a.width; ++c) {
      const double term = a.at(i, h, c) * b.at(j, g, c);
      sum += sizes ? std::fabs(term) : term;
    }
    return sum;
  };
  for (const Document& d : p.documents) {
    for (int64_t h = 0; h < s.q_heads; ++h) {
      const int64_t g = h / s.group();
      for (int64_t i = d.q_row; i < d.q_row + d.q_count; ++i) {
        const auto [begin, end] = seen(d, i);
        std::vector<double> weights;
        for (int64_t j = begin; j < end; ++j) {
          weights.push_back(std::exp(p.scale * dot(p.q, i, h, p.k, j, g, false) - exact.lse.at(i, h)));
          add(r.out, i, h, weights.back(), p.v, j, g);
        }
        r.delta.at(i, h) = dot(r.out, i, h, p.dout, i, h, true);
        for (int64_t j = begin; j < end; ++j) {
          const double weight = weights[static_cast<size_t>(j - begin)];
          const double ds = std::fabs(p.scale) * weight * (dot(p.dout, i, h, p.v, j, g, true) + r.delta.at(i, h));
          add(r.dq, i, h, ds, p.k, j, g);
          add(r.dk, j, g, ds, p.q, i, h);
          add(r.dv, j, g, weight, p.dout, i, h);
        }
      }
    }
  }
  return r;
}

// How many roundings of unit 2^-24 a result may be off by, in sizes of its terms: 16 for exp, quotients and sums over
// blocks, and (2 hops + 2) A, where A is the largest |lse|: rounding a score or an lse of size A changes it by up to
// 2^-24 A, and a weight by that much relatively (a score far below the lse may be larger, but exp(s - lse) |s| <
// |lse| + 1). Each merged call rounds its own lse and the merged one; backward takes a score and an lse once more.
double roundings(const Result& exact, int hops) { return 16 + (2 * hops + 2) * largest(exact.lse); }

// The unit of a 16-bit type.
double storage_unit(DType type) { return type == DType::bf16 ? 0x1p-8 : type == DType::f16 ? 0x1p-11 : 0; }

// The problem in double, as the reference computes it: the truth for any type.
Result truth_of(const Problem& problem) {
  Problem exact = problem;
  exact.shape.dtype = DType::f64;
  return run(reference(), exact);
}

// fp64: 1e-12 of the size of terms. Others: twice the error of the dense fp32 computation (the larger of two orders of
// summation, for one may be lucky), and of the size of terms the roundings above; for 16-bit inputs also the storage
// type's unit once for each number that is rounded to it: P as an operand and the result in out, P in dv, dS in dq and
// dk, whose sums stay fp32 here and whose delta is given. 2^-14 is the least normal number of fp16.
void expect_all_right(const Problem& problem, Run how = {}) {
  const DType type = problem.shape.dtype;
  const Result exact = truth_of(problem), sizes = sizes_of_terms(problem, exact);
  const Result dense[] = {dense_fp32(problem, exact, true), dense_fp32(problem, exact, false)};
  how.forward_of = &exact;
  for (const Kernel& kernel : kernels_here(false, type)) {
    SCOPED_TRACE(kernel.name);
    const Result result = run(kernel, problem, how);
    const auto check = [&](Values Result::*tensor, int stored, const char* what) {
      const double size = largest(sizes.*tensor);
      const double other =
          std::max(difference(dense[0].*tensor, exact.*tensor), difference(dense[1].*tensor, exact.*tensor));
      const double allowed = type == DType::f64 ? 1e-12 * size
                                                : 2 * other + roundings(exact, 1) * 0x1p-24 * size +
                                                      stored * storage_unit(type) * (size + 0x1p-14);
      EXPECT_LE(difference(result.*tensor, exact.*tensor), allowed)
          << what << " (dense error " << other << ", size of terms " << size << ")";
    };
    // Where delta is computed, out and P in it come before it, and results are rounded.
    check(&Result::out, 2, "out");
    check(&Result::lse, 0, "lse");
    check(&Result::dq, how.whole ? 4 : 1, "dq");
    check(&Result::dk, how.whole ? 4 : 1, "dk");
    check(&Result::dv, how.whole ? 2 : 1, "dv");
  }
}

Band random_band(std::mt19937_64& random, int64_t rows) {
  Band band;
  if (up_to(random, 2) == 0) band.left = up_to(random, 90);
  if (up_to(random, 3) == 0) band.right = up_to(random, 1) ? Band::kUnbounded : up_to(random, 40);
  if (up_to(random, 3) != 0) return band;
  int64_t lo = 0, hi = 0;
  for (int64_t i = 0; i < rows; ++i) {
    lo += up_to(random, 5) == 0 ? up_to(random, 7) : 0;
    hi = std::max(hi, lo) + (up_to(random, 2) == 0 ? up_to(random, 6) : 0);
    band.lo.push_back(static_cast<int32_t>(lo));
    band.hi.push_back(static_cast<int32_t>(hi));
  }
  return band;
}

Problem random_problem(std::mt19937_64& random, DType type) {
  const int64_t kv_heads = 1 + up_to(random, 2), group = 1 + up_to(random, 4);
  const AttentionShape shape{type, kv_heads * group, kv_heads, 1 + up_to(random, 90), 1 + up_to(random, 90)};
  std::vector<Document> documents;
  int64_t q_row = 0, k_row = 0;
  for (int64_t n = 1 + up_to(random, 2); n > 0; --n) {
    Document d;
    d.q_row = q_row;
    d.k_row = k_row;
    d.q_count = up_to(random, 130);
    d.k_pos = up_to(random, 1) ? 0 : up_to(random, 300);
    for (int64_t pieces = up_to(random, 3); pieces > 0; --pieces) d.pieces.push_back(up_to(random, 150));
    d.q_pos = d.k_pos + up_to(random, 200);
    d.band = random_band(random, d.q_pos + d.q_count);
    if (d.band.lo.empty() && up_to(random, 2) == 0) d.q_pos = -up_to(random, 50);
    q_row += d.q_count;
    k_row += d.k_count();
    documents.push_back(d);
  }
  return Problem(random, shape, documents);
}

Placement random_placement(std::mt19937_64& random) {
  return {1 + up_to(random, 1), up_to(random, 3), up_to(random, 5), up_to(random, 1) == 1};
}

class KernelTypes : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, KernelTypes, testing::Values(DType::f32, DType::f64, DType::bf16, DType::f16),
                         [](const auto& p) { return std::string(name(p.param)); });

TEST_P(KernelTypes, random_problems_against_the_reference) {
  for (int n = 0; n < 25; ++n) {
    const uint64_t seed = fresh_seed();
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const Problem problem = random_problem(random, GetParam());
    expect_all_right(problem, {.place = random_placement(random),
                               .threads = static_cast<int>(1 + up_to(random, 2)),
                               .whole = up_to(random, 1) == 1});
    if (HasFailure()) return;
  }
}

// Head 0 of the plainest layout against any other placement, and one thread against several.
TEST_P(KernelTypes, KE_07_same_bits_in_any_place_on_any_threads) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (const Kernel& kernel : kernels_here(true, GetParam())) {
    SCOPED_TRACE(kernel.name);
    const Problem problem(random, {GetParam(), 4, 2, 40, 24}, causal({300, 1, 70, 513}));
    const Result plain = run(kernel, problem, {.whole = true});
    const std::vector<Placement> places = {{}, {2, 0, 0, false}, {1, 3, 1, true}, {1, 0, 5, false}, {3, 1, 2, true}};
    for (const Placement& place : places) {
      const Result other =
          run(kernel, problem, {.place = place, .threads = 1 + static_cast<int>(up_to(random, 4)), .whole = true});
      expect_same_bits(plain.out, other.out, "out");
      expect_same_bits(plain.lse, other.lse, "lse");
      expect_same_bits(plain.dq, other.dq, "dq");
      expect_same_bits(plain.dk, other.dk, "dk");
      expect_same_bits(plain.dv, other.dv, "dv");
    }
  }
}

// Long documents before short ones, more of them than threads and fewer: how chains share slots and threads.
TEST_P(KernelTypes, KE_07_same_bits_for_documents_in_any_order_on_many_threads) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const std::vector<Kernel> kernels = kernels_here(false, GetParam());
  for (int draw = 0; draw < 4; ++draw) {
    std::vector<int64_t> lengths;
    for (int64_t n = 2 + up_to(random, 4); n > 0; --n) lengths.push_back(1 + up_to(random, 600));
    if (draw % 2 == 0) std::sort(lengths.rbegin(), lengths.rend());
    const int64_t kv_heads = 1 + up_to(random, 2);
    const Problem problem(random, {GetParam(), 2 * kv_heads, kv_heads, 24, 8}, causal(lengths));
    const Kernel& kernel = kernels[static_cast<size_t>(up_to(random, std::ssize(kernels) - 1))];
    const Result one = run(kernel, problem, {.whole = true});
    for (const int threads : {2, 3, 8}) {
      SCOPED_TRACE(testing::Message() << kernel.name << ", draw " << draw << ", " << threads << " threads");
      const Result many = run(kernel, problem, {.threads = threads, .whole = true});
      expect_same_bits(one.out, many.out, "out");
      expect_same_bits(one.dq, many.dq, "dq");
      expect_same_bits(one.dk, many.dk, "dk");
      expect_same_bits(one.dv, many.dv, "dv");
    }
  }
}

Values rows_of(const Values& values, int64_t first, int64_t count) {
  Values part(count, values.heads, values.width);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t h = 0; h < values.heads; ++h) {
      for (int64_t c = 0; c < values.width; ++c) part.at(i, h, c) = values.at(first + i, h, c);
    }
  }
  return part;
}

// A single key has weight 1 whatever shows it: the band, or the end of the keys.
TEST_P(KernelTypes, rows_with_a_single_key_have_no_gradient_through_the_softmax) {
  std::mt19937_64 random(fresh_seed());
  Problem problem(random, {GetParam(), 2, 1, 19, 5}, causal({1, 4, 1, 300}));
  for (Document& d : problem.documents) d.band.right = Band::kUnbounded;
  for (const Kernel& kernel : kernels_here(false, GetParam())) {
    SCOPED_TRACE(kernel.name);
    const Result result = run(kernel, problem, {.whole = true});
    for (const int64_t row : {0, 5}) {
      for (int64_t c = 0; c < 19; ++c) {
        EXPECT_EQ(result.dq.at(row, 0, c), 0);
        EXPECT_EQ(result.dk.at(row, 0, c), 0);
      }
    }
    EXPECT_GT(largest(rows_of(result.dq, 1, 4)), 0);
  }
}

// Gradients that are written are those that are added to nothing, but for their last rounding and the sums of delta.
TEST_P(KernelTypes, written_and_added_gradients) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const Problem problem(random, {GetParam(), 4, 2, 40, 24}, causal({300, 1, 70, 513, 256, 257}));
  const double unit = GetParam() == DType::f64 ? 0x1p-50 : std::max(0x1p-20, storage_unit(GetParam()));
  for (const Kernel& kernel : kernels_here(false, GetParam())) {
    SCOPED_TRACE(kernel.name);
    const Result added = run(kernel, problem), written = run(kernel, problem, {.threads = 3, .whole = true});
    for (const auto tensor : {&Result::dq, &Result::dk, &Result::dv})
      EXPECT_LE(difference(written.*tensor, added.*tensor), unit * largest(added.*tensor));
  }
}

// Queries [first, first + count) of a single causal document, with the keys from k_pos on.
Problem part_of(const Problem& whole, int64_t first, int64_t count, int64_t k_pos, const std::vector<int64_t>& pieces) {
  Problem part = whole;
  part.q = rows_of(whole.q, first, count);
  part.dout = rows_of(whole.dout, first, count);
  part.k = rows_of(whole.k, k_pos, first + count - k_pos);
  part.v = rows_of(whole.v, k_pos, first + count - k_pos);
  part.documents = {{0, count, first, 0, k_pos, pieces, whole.documents[0].band}};
  return part;
}

// Scores double from one key block to the next, so that what weights are relative to moves, in some rows and blocks and
// not in others beside them.
TEST_P(KernelTypes, KN_09_logits_that_grow_along_the_document) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const int64_t rows = 1100;
  Problem whole(random, {GetParam(), 3, 1, 24, 33}, causal({rows}));
  whole.scale = .4;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < whole.k.width; ++c) whole.k.at(i, 0, c) *= std::ldexp(1., static_cast<int>(i / 256));
  }
  expect_all_right(whole, {.whole = true});
  for (const Kernel& kernel : kernels_here(true, GetParam())) {
    SCOPED_TRACE(kernel.name);
    const Result expected = run(kernel, whole, {.whole = true});
    for (int n = 0; n < 4; ++n) {
      const int64_t first = up_to(random, rows - 1), count = 1 + up_to(random, rows - first - 1);
      const Result result = run(kernel, part_of(whole, first, count, 0, {first + count}), {.whole = true});
      expect_same_bits(result.out, rows_of(expected.out, first, count), "out");
      expect_same_bits(result.lse, rows_of(expected.lse, first, count), "lse");
      expect_same_bits(result.dq, rows_of(expected.dq, first, count), "dq");
    }
  }
}

// One key has a score so much larger than the first, or the first so much lower than all others, that a weight relative
// to that is infinite, or beyond any exponent.
TEST_P(KernelTypes, KN_09_a_spike) {
  const uint64_t seed = fresh_seed();
  std::mt19937_64 random(seed);
  for (const int64_t key : {0, 1, 300, 450}) {
    for (const double spike : {2.5, 11., 12., 16., 17.5, 26., 35., 43., 45., 52., 89., 130., 178., 276., 344.}) {
      SCOPED_TRACE(testing::Message() << "key " << key << ", 8 times " << spike << ", seed " << seed);
      Problem problem(random, {GetParam(), 2, 1, 8, 8}, {{0, 6, 594, 0, 0, {600}, Band{Band::kUnbounded, 0, {}, {}}}});
      problem.scale = 1;
      std::fill(problem.k.data.begin(), problem.k.data.end(), 0);
      for (int64_t c = 0; c < 8; ++c) {
        problem.k.at(key, 0, c) = key == 0 ? -spike : spike;
        for (int64_t i = 0; i < 6; ++i) {
          problem.q.at(i, 0, c) = 1;
          problem.q.at(i, 1, c) = i % 2 == 0 ? 0 : .5;
        }
      }
      expect_all_right(problem, {.whole = true});
    }
  }
}

// A row all of whose scores are -inf is one that sees no key: another piece of its keys may still come. Here every
// other score is 0, so that out is a mean of values.
TEST_P(KernelTypes, a_score_of_minus_infinity_weighs_nothing) {
  const uint64_t seed = fresh_seed();
  std::mt19937_64 random(seed);
  const int64_t rows = 900, first = up_to(random, 5);
  Problem problem(random, {GetParam(), 2, 1, 8, 8}, causal({rows}));
  std::fill(problem.q.data.begin(), problem.q.data.end(), 1);
  std::fill(problem.k.data.begin(), problem.k.data.end(), 0);
  const auto hidden = [&](int64_t key) { return key < first || (key > 350 && key < 800) || key % 7 == 6; };
  for (int64_t key = 0; key < rows; ++key) {
    if (hidden(key)) problem.k.at(key, 0, up_to(random, 7)) = -kInfinity;
  }
  for (const Kernel& kernel : kernels_here(false, GetParam())) {
    SCOPED_TRACE(testing::Message() << kernel.name << " first " << first << ", seed " << seed);
    const Result result = run(kernel, problem, {.whole = true});
    const double rounding = GetParam() == DType::f64 || GetParam() == DType::f32 ? 1e-5 : 1e-2;
    double sum = 0, count = 0;
    for (int64_t i = 0; i < rows; ++i) {
      if (!hidden(i)) sum += problem.v.at(i, 0, 3), ++count;
      ASSERT_NEAR(result.out.at(i, 1, 3), count == 0 ? 0 : sum / count, rounding) << "row " << i;
      if (count == 0) {
        ASSERT_EQ(result.lse.at(i, 1), -kInfinity) << "row " << i;
      } else {
        ASSERT_NEAR(result.lse.at(i, 1), std::log(count), 1e-5) << "row " << i;
      }
    }
  }
}

// Queries cut into runs, each with only the keys that its window reaches, in pieces.
TEST_P(KernelTypes, same_bits_for_any_cut_of_queries_and_keys) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (const int64_t window : {int64_t{37}, int64_t{300}, Band::kUnbounded}) {
    const int64_t rows = 700;
    const Problem whole(random, {GetParam(), 3, 1, 24, 33}, causal({rows}, window));
    for (const Kernel& kernel : kernels_here(true, GetParam())) {
      SCOPED_TRACE(testing::Message() << kernel.name << " window " << window);
      const Result expected = run(kernel, whole, {.whole = true});
      for (int n = 0; n < 3; ++n) {
        const int64_t first = up_to(random, rows - 1), count = 1 + up_to(random, rows - first - 1);
        const int64_t reach = window == Band::kUnbounded ? 0 : std::max<int64_t>(0, first - window + 1);
        const int64_t k_pos = up_to(random, reach), keys = first + count - k_pos;
        const int64_t cut = up_to(random, keys), cut2 = cut + up_to(random, keys - cut);
        const Result result = run(kernel, part_of(whole, first, count, k_pos, {cut, cut2 - cut, 0, keys - cut2}),
                                  {.threads = 3, .whole = true});
        expect_same_bits(result.out, rows_of(expected.out, first, count), "out");
        expect_same_bits(result.lse, rows_of(expected.lse, first, count), "lse");
        expect_same_bits(result.dq, rows_of(expected.dq, first, count), "dq");
      }
    }
  }
}

// DE-02 at the level of the kernel: neighbours in the pack do not matter.
TEST(CasesKernel, DE_02_place_in_the_pack) {
  std::mt19937_64 random(fresh_seed());
  // The longest has several key blocks and query tiles, and begins at no multiple of either.
  const Problem a(random, {DType::f32, 4, 2, 16, 16}, causal({56, 700, 136}));
  Problem b = a;
  const std::vector<int64_t> from = {756, 0, 56}, counts = {136, 56, 700};
  b.documents = causal(counts);
  for (Values Problem::*which : {&Problem::q, &Problem::k, &Problem::v, &Problem::dout}) {
    int64_t row = 0;
    for (size_t d = 0; d < 3; ++d) {
      for (int64_t i = 0; i < counts[d]; ++i, ++row) {
        for (int64_t h = 0; h < (a.*which).heads; ++h) {
          for (int64_t c = 0; c < (a.*which).width; ++c) (b.*which).at(row, h, c) = (a.*which).at(from[d] + i, h, c);
        }
      }
    }
  }
  for (const Kernel& kernel : kernels_here()) {
    const Result one = run(kernel, a), other = run(kernel, b);
    int64_t row = 0;
    for (size_t d = 0; d < 3; row += counts[d], ++d) {
      const auto expect_same = [&](Values Result::*which, const char* name) {
        expect_same_bits(rows_of(one.*which, from[d], counts[d]), rows_of(other.*which, row, counts[d]), name);
      };
      expect_same(&Result::out, "out");
      expect_same(&Result::lse, "lse");
      expect_same(&Result::dq, "dq");
      expect_same(&Result::dk, "dk");
      expect_same(&Result::dv, "dv");
    }
  }
}

TEST(CasesKernel, DE_01_ten_runs) {
  std::mt19937_64 random(fresh_seed());
  const AttentionShape shapes[] = {
      {DType::f32, 8, 2, 64, 64}, {DType::f32, 4, 2, 256, 256}, {DType::f32, 2, 1, 512, 512}};
  for (const AttentionShape& shape : shapes) {
    // Three key blocks and more: a sum of two is the same either way.
    const Problem problem(random, shape, causal({900, 212}));
    const Kernel& kernel = select_kernel(problem.shape, machine(), "cpu");
    const Result first = run(kernel, problem);
    for (const int threads : {1, 2, 8, 8, 2}) {
      const Result again = run(kernel, problem, {.threads = threads});
      expect_same_bits(first.out, again.out, "out");
      expect_same_bits(first.dq, again.dq, "dq");
      expect_same_bits(first.dk, again.dk, "dk");
      expect_same_bits(first.dv, again.dv, "dv");
    }
  }
}

// Two runs of queries of one document share its key rows, whose gradients both add to.
TEST(Kernels, blocks_that_share_keys) {
  std::mt19937_64 random(fresh_seed());
  const int64_t rows = 600;
  const Problem whole(random, {DType::f64, 2, 1, 8, 8}, causal({rows}));
  Problem parts = whole;
  parts.documents.clear();
  for (int64_t first = 0; first < rows; first += 150) {
    parts.documents.push_back({first, 150, first, 0, 0, {first + 150}, {}});
  }
  const Result expected = run(reference(), whole);
  for (const Kernel& kernel : kernels_here()) {
    SCOPED_TRACE(kernel.name);
    const Result one = run(kernel, parts), four = run(kernel, parts, {.threads = 4});
    EXPECT_LE(difference(one.dk, expected.dk), 1e-12 * largest(expected.dk));
    EXPECT_LE(difference(one.dv, expected.dv), 1e-12 * largest(expected.dv));
    expect_same_bits(one.dk, four.dk, "dk");
    expect_same_bits(one.dv, four.dv, "dv");
  }
}

// NaN in a key, a value, a query or its gradient reaches exactly those rows that see it or are seen by it.
TEST_P(KernelTypes, poison_stays_where_it_is) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (const Kernel& kernel : kernels_here(false, GetParam())) {
    for (int n = 0; n < 6; ++n) {
      SCOPED_TRACE(kernel.name);
      const int64_t rows = 2 + up_to(random, 300), window = up_to(random, 1) ? 1 + up_to(random, 40) : Band::kUnbounded;
      const Problem clean(random, {GetParam(), 4, n % 2 ? 1 : 4, 17, 20}, causal({rows}, window));
      const Result expected = run(kernel, clean);
      const int64_t bad = up_to(random, rows - 1);
      const double poison = n % 3 == 0 ? kInfinity : kNan;
      const auto sees = [&](int64_t i, int64_t j) { return j <= i && (window == Band::kUnbounded || i - j < window); };
      const auto poisoned = [&](Values Problem::*which) {
        Problem dirty = clean;
        for (int64_t h = 0; h < (clean.*which).heads; ++h) {
          for (int64_t c = 0; c < (clean.*which).width; ++c) (dirty.*which).at(bad, h, c) = poison;
        }
        return run(kernel, dirty);
      };
      const auto rows_equal = [&](const Values& got, const Values& want, auto may_differ, const char* what) {
        for (int64_t i = 0; i < rows; ++i) {
          if (!may_differ(i)) expect_same_bits(rows_of(got, i, 1), rows_of(want, i, 1), what);
        }
      };
      for (Values Problem::*which : {&Problem::k, &Problem::v}) {
        const Result dirty = poisoned(which);
        const auto reads = [&](int64_t i) { return sees(i, bad); };
        const auto beside = [&](int64_t j) {  // keys of rows that read it
          for (int64_t i = 0; i < rows; ++i) {
            if (sees(i, bad) && sees(i, j)) return true;
          }
          return false;
        };
        rows_equal(dirty.out, expected.out, reads, "out");
        rows_equal(dirty.lse, expected.lse, reads, "lse");
        rows_equal(dirty.dq, expected.dq, reads, "dq");
        rows_equal(dirty.dk, expected.dk, beside, "dk");
        rows_equal(dirty.dv, expected.dv, beside, "dv");
        EXPECT_FALSE(std::isfinite(dirty.out.at(bad, 0, 0)));
      }
      for (Values Problem::*which : {&Problem::q, &Problem::dout}) {
        const Result dirty = poisoned(which);
        const auto itself = [&](int64_t i) { return i == bad; };
        const auto is_read = [&](int64_t j) { return sees(bad, j); };
        rows_equal(dirty.out, expected.out, itself, "out");
        rows_equal(dirty.dq, expected.dq, itself, "dq");
        rows_equal(dirty.dk, expected.dk, is_read, "dk");
        rows_equal(dirty.dv, expected.dv, is_read, "dv");
        EXPECT_FALSE(std::isfinite(dirty.dq.at(bad, 0, 0)));
      }
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Keys in two calls, merged, are the keys in one.
TEST_P(KernelTypes, merge_of_two_calls) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const int64_t rows = 290, cut = 130;
  const Problem whole(random, {GetParam(), 4, 2, 24, 16}, causal({rows}));
  const Result exact = truth_of(whole), sizes = sizes_of_terms(whole, exact);
  // P may be rounded to the storage type as an operand; the dot product of 24 terms in a score costs 24 roundings more.
  const double unit = GetParam() == DType::f64 ? 0x1p-53 : 0x1p-24;
  const double allowed = (roundings(exact, 2) + 24) * unit;
  for (const Kernel& kernel : kernels_here(false, GetParam())) {
    SCOPED_TRACE(kernel.name);
    Problem first = whole, second = whole;
    first.documents[0].pieces = {cut};
    second.documents[0].pieces = {rows - cut};
    second.documents[0].k_row = second.documents[0].k_pos = cut;
    const Result nothing{Values(rows, 4, 16), Values(rows, 4, 1, -kInfinity), {}, {}, {}, {}};
    const Result one = run(kernel, first, {.merge = true, .start = &nothing});
    const Result both = run(kernel, second, {.place = {2, 1, 1, true}, .threads = 2, .merge = true, .start = &one});
    EXPECT_LE(difference(both.out, exact.out), (allowed + storage_unit(GetParam())) * largest(sizes.out));
    EXPECT_LE(difference(both.lse, exact.lse), allowed);
  }
}

TEST(CasesKernel, KN_11_merging_nothing_changes_nothing) {
  std::mt19937_64 random(fresh_seed());
  const Problem problem(random, {DType::f32, 2, 1, 8, 8}, causal({50}));
  Problem blind = problem;
  blind.documents[0].q_pos = -1000;
  for (const Kernel& kernel : kernels_here()) {
    SCOPED_TRACE(kernel.name);
    const Result before = run(kernel, problem);
    const Result after = run(kernel, blind, {.merge = true, .start = &before});
    expect_same_bits(after.out, before.out, "out");
    expect_same_bits(after.lse, before.lse, "lse");
  }
}

// q = 0: a row's out is the mean of the rows that it sees. v = row number, dout = 1.
Problem mean_problem(const AttentionShape& shape, std::vector<Document> documents) {
  std::mt19937_64 random(1);
  Problem problem(random, shape, std::move(documents));
  std::fill(problem.q.data.begin(), problem.q.data.end(), 0.0);
  std::fill(problem.dout.data.begin(), problem.dout.data.end(), 1.0);
  for (int64_t j = 0; j < problem.v.rows; ++j) {
    for (int64_t h = 0; h < problem.v.heads; ++h) {
      for (int64_t c = 0; c < problem.v.width; ++c) problem.v.at(j, h, c) = static_cast<double>(j);
    }
  }
  return problem;
}

void expect_column(const Values& values, const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(values.rows, static_cast<int64_t>(expected.size()));
  for (int64_t i = 0; i < values.rows; ++i) {
    for (int64_t h = 0; h < values.heads; ++h) {
      for (int64_t c = 0; c < values.width; ++c) {
        EXPECT_NEAR(values.at(i, h, c), expected[static_cast<size_t>(i)], tolerance) << "row " << i;
      }
    }
  }
}

TEST(CasesKernel, KN_01_queries_are_a_suffix_of_the_keys) {
  const Problem problem =
      mean_problem({DType::f32, 4, 2, 16, 16}, {{0, 2, 4, 0, 0, {6}, {}}, {2, 2, 0, 6, 0, {2}, {}}});
  for (const Kernel& kernel : kernels_here()) expect_column(run(kernel, problem).out, {2, 2.5, 6, 6.5}, 8e-6);
}

TEST(CasesKernel, KN_03_window_counts_the_row_itself) {
  const Problem problem = mean_problem({DType::f32, 4, 2, 16, 16}, causal({12}, 4));
  for (const Kernel& kernel : kernels_here()) {
    expect_column(run(kernel, problem).out, {0, .5, 1, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5}, 1.2e-5);
  }
  std::mt19937_64 random(fresh_seed());
  const Problem alone(random, {DType::f32, 4, 2, 16, 16}, causal({12}, 1));
  for (const Kernel& kernel : kernels_here()) {
    const Result result = run(kernel, alone);
    for (int64_t i = 0; i < 12; ++i) {
      for (int64_t h = 0; h < 4; ++h) EXPECT_EQ(result.out.at(i, h, 3), alone.v.at(i, h / 2, 3));
    }
  }
}

TEST(CasesKernel, KN_05_window_longer_than_text) {
  std::mt19937_64 random(fresh_seed());
  Problem problem(random, {DType::f32, 4, 2, 16, 16}, causal({3, 5}));
  for (const Kernel& kernel : kernels_here()) {
    problem.documents = causal({3, 5});
    const Result expected = run(kernel, problem);
    for (const int64_t window : {5, 8, 100}) {
      problem.documents = causal({3, 5}, window);
      expect_same_bits(run(kernel, problem).out, expected.out, "out");
    }
  }
}

TEST(CasesKernel, KN_06_key_blocks_behind_the_window) {
  for (const int64_t width : {2, 16}) {
    const Problem one = mean_problem({DType::f32, 4, 2, width, width}, causal({600}, 10));
    const Problem two = mean_problem({DType::f32, 4, 2, width, width}, causal({599, 1}));
    for (const Kernel& kernel : kernels_here()) {
      SCOPED_TRACE(kernel.name);
      const Result result = run(kernel, one);
      EXPECT_NEAR(result.out.at(599, 0, 0), 594.5, 6e-4);
      for (double x : result.out.data) ASSERT_TRUE(std::isfinite(x));
      for (double x : result.dq.data) ASSERT_TRUE(std::isfinite(x));
      EXPECT_EQ(run(kernel, two).out.at(599, 0, 0), 599);
    }
  }
}

TEST(CasesKernel, KN_07_odd_documents_alone_and_together) {
  std::mt19937_64 random(fresh_seed());
  const std::vector<int64_t> lengths = {128, 128, 128, 159, 57};
  const Problem together(random, {DType::bf16, 2, 2, 80, 80}, causal(lengths));
  for (const Kernel& kernel : kernels_here(true, DType::bf16)) {
    SCOPED_TRACE(kernel.name);
    const Result all = run(kernel, together);
    int64_t row = 0;
    for (const int64_t n : lengths) {
      Problem one = together;
      one.documents = causal({n});
      one.q = rows_of(together.q, row, n);
      one.k = rows_of(together.k, row, n);
      one.v = rows_of(together.v, row, n);
      one.dout = rows_of(together.dout, row, n);
      const Result alone = run(kernel, one);
      expect_same_bits(alone.out, rows_of(all.out, row, n), "out");
      expect_same_bits(alone.dv, rows_of(all.dv, row, n), "dv");
      row += n;
    }
  }
}

TEST(CasesKernel, KN_09_logits_of_a_million) {
  for (const DType type : {DType::f32, DType::bf16, DType::f64}) {
    for (const double k : {1000.0, -1000.0, -10.0}) {
      Problem problem = mean_problem({type, 1, 1, 1, 1}, causal({4, 4}));
      problem.scale = 1;
      for (double& x : problem.q.data) x = type == DType::bf16 ? -1000 : -1000;
      for (double& x : problem.k.data) x = k;
      for (const Kernel& kernel : kernels_here(false, type)) {
        SCOPED_TRACE(kernel.name);
        const Result result = run(kernel, problem);
        expect_column(result.out, {0, .5, 1, 1.5, 4, 4.5, 5, 5.5}, type == DType::f64 ? 1e-12 : 1e-5);
        for (int64_t i = 0; i < 8; ++i) {
          const double logit = -1000 * k, n = static_cast<double>(i % 4 + 1);
          EXPECT_NEAR(result.lse.at(i, 0), logit + std::log(n), std::fabs(logit) * (type == DType::f64 ? 1e-14 : 2e-7));
        }
      }
    }
  }
}

// The last key of each row has the largest score by so much that it alone counts, but a rounding of the score is an
// exponent of hundreds.
TEST(CasesKernel, KN_09_logits_of_billions) {
  for (const DType type : {DType::f32, DType::bf16, DType::f64}) {
    for (const double scale : {1.0, -1.0}) {
      Problem problem = mean_problem({type, 1, 1, 2, 1}, causal({60, 4}));
      problem.scale = scale;
      for (int64_t i = 0; i < 64; ++i) {
        for (int64_t c = 0; c < 2; ++c) {
          problem.q.at(i, 0, c) = scale * 0x1.86p16;
          problem.k.at(i, 0, c) = 0x1.2ap10 * static_cast<double>(i + 1);
        }
      }
      for (const Kernel& kernel : kernels_here(false, type)) {
        SCOPED_TRACE(testing::Message() << kernel.name << ", scale " << scale);
        const Result result = run(kernel, problem);
        for (int64_t i = 0; i < 64; ++i) {
          EXPECT_EQ(result.out.at(i, 0, 0), problem.v.at(i, 0, 0)) << "row " << i;
          EXPECT_TRUE(std::isfinite(result.lse.at(i, 0)));
        }
      }
    }
  }
}

TEST_P(KernelTypes, KN_13_scale) {
  std::mt19937_64 random(fresh_seed());
  Problem problem(random, {GetParam(), 4, 2, 64, 64}, causal({7, 300}));
  for (const double scale : {1.0, 0.125, 0.05, 0.0, -0.125}) {
    SCOPED_TRACE(scale);
    problem.scale = scale;
    expect_all_right(problem);
  }
}

TEST(CasesKernel, KN_14_each_query_head_has_its_kv_head) {
  const std::vector<std::pair<int64_t, int64_t>> ratios = {{6, 2}, {8, 2}, {7, 1}, {5, 5}, {12, 3}};
  for (const auto& [q_heads, kv_heads] : ratios) {
    Problem problem = mean_problem({DType::f32, q_heads, kv_heads, 16, 16}, causal({3, 5}));
    for (int64_t j = 0; j < 8; ++j) {
      for (int64_t h = 0; h < kv_heads; ++h) {
        for (int64_t c = 0; c < 16; ++c) problem.v.at(j, h, c) = static_cast<double>(h + 1);
      }
    }
    for (const Kernel& kernel : kernels_here()) {
      SCOPED_TRACE(testing::Message() << kernel.name << " " << q_heads << "/" << kv_heads);
      const Result result = run(kernel, problem);
      const auto group = static_cast<double>(q_heads / kv_heads);
      for (int64_t h = 0; h < q_heads; ++h) EXPECT_NEAR(result.out.at(7, h, 5), h / (q_heads / kv_heads) + 1, 1e-5);
      EXPECT_NEAR(result.dv.at(0, kv_heads - 1, 0), group * (1 + 1. / 2 + 1. / 3), 1e-5);
      EXPECT_NEAR(result.dv.at(7, kv_heads - 1, 0), group / 5, 1e-6);
    }
  }
}

// Spans come as lists of both ends.
TEST(CasesKernel, KN_15_adjacent_images) {
  Document d{0, 8, 0, 0, 0, {8}, {}};
  d.band.lo = {0, 0, 0, 0, 0, 0, 0, 0};
  d.band.hi = {1, 4, 4, 4, 7, 7, 7, 8};
  const Problem problem = mean_problem({DType::f32, 4, 2, 16, 16}, {d});
  for (const Kernel& kernel : kernels_here()) {
    const Result result = run(kernel, problem);
    expect_column(result.out, {0, 1.5, 1.5, 1.5, 3, 3, 3, 3.5}, 8e-6);
    const std::vector<double> dv = {2.303571, 1.303571, 1.303571, 1.303571, .553571, .553571, .553571, .125};
    for (int64_t j = 0; j < 8; ++j) EXPECT_NEAR(result.dv.at(j, 0, 0), 2 * dv[static_cast<size_t>(j)], 8e-6);
  }
}

TEST(CasesKernel, KN_18_image_longer_than_the_window) {
  Document d{0, 8, 0, 0, 0, {8}, {}};
  d.band.lo = {0, 0, 0, 1, 2, 3, 4, 5};
  d.band.hi = {1, 7, 7, 7, 7, 7, 7, 8};
  const Problem problem = mean_problem({DType::f32, 4, 2, 16, 16}, {d});
  for (const Kernel& kernel : kernels_here()) {
    expect_column(run(kernel, problem).out, {0, 3, 3, 3.5, 4, 4.5, 5, 6}, 8e-6);
  }
}

// Offsets are 64 bits wide: rows far apart, in memory that is never touched in between.
TEST(CasesKernel, KN_19_row_offsets_beyond_32_bits) {
  const Rows rows{nullptr, 80000, 7, 3};
  for (const int64_t row : {26844, 53687, 53688, 79999}) {
    EXPECT_EQ(offset(rows, row, 5, 2), row * int64_t{80000} + 41);
    EXPECT_GT(offset(rows, row, 5, 2), int64_t{1} << 31);
  }
}

// The same with memory behind them, of which few pages are ever there.
TEST(CasesKernel, KN_19_rows_further_apart_than_32_bits) {
  constexpr int64_t kRows = 5, kWidth = 16, kRowStride = (int64_t{1} << 30) + 64, kHeadStride = 32;
  constexpr size_t kBytes = (kRows * kRowStride + (int64_t{1} << 16)) * sizeof(float);
  static_assert((kRows - 1) * kRowStride > int64_t{1} << 32);
  char* const memory = static_cast<char*>(
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  ASSERT_NE(memory, MAP_FAILED) << "20 GiB of addresses";
  int64_t used = 0;
  const auto far = [&](DType type, const Values& values) {
    const Rows rows{memory + used, kRowStride, kHeadStride, 1};
    used += 4096;
    store_values(type, rows, values);
    return rows;
  };
  const auto near = [](DType type, const Rows& rows, const Values& like) {
    return load_values(type, rows, kRows, like.heads, like.width);
  };
  std::mt19937_64 random(fresh_seed());
  for (const DType type : {DType::f32, DType::bf16}) {
    const Problem problem(random, {type, 4, 2, kWidth, kWidth}, causal({kRows}));
    for (const Kernel& kernel : kernels_here(false, type)) {
      SCOPED_TRACE(kernel.name);
      const Result expected = run(kernel, problem, {.whole = true});
      used = 0;
      AttentionBlock b;
      b.q_count = kRows;
      b.band = &problem.documents[0].band;
      b.q = far(type, problem.q);
      b.dout = far(type, problem.dout);
      b.out = far(type, Values(kRows, 4, kWidth));
      b.dq = far(type, Values(kRows, 4, kWidth));
      b.lse = far(DType::f32, Values(kRows, 4, 1));
      b.delta = far(DType::f32, Values(kRows, 4, 1));
      const Values keys(kRows, 2, kWidth);
      b.keys = {{kRows, far(type, problem.k), far(type, problem.v), far(type, keys), far(type, keys)}};
      const auto serial = make_serial();
      kernel.forward({problem.shape, problem.scale, {&b, 1}, false, serial.get()});
      kernel.backward({problem.shape, problem.scale, {&b, 1}, serial.get(), true, true});
      expect_same_bits(near(type, b.out, expected.out), expected.out, "out");
      expect_same_bits(near(DType::f32, b.lse, expected.lse), expected.lse, "lse");
      expect_same_bits(near(type, b.dq, expected.dq), expected.dq, "dq");
      expect_same_bits(near(type, b.keys[0].dk, expected.dk), expected.dk, "dk");
      expect_same_bits(near(type, b.keys[0].dv, expected.dv), expected.dv, "dv");
    }
  }
  munmap(memory, kBytes);
}

TEST(CasesKernel, KE_01_more_queries_than_keys) {
  for (const DType type : {DType::f32, DType::f16}) {
    std::vector<Document> documents;
    const std::vector<int64_t> q = {76, 34, 146};
    int64_t row = 0;
    for (int64_t d = 0; d < 3; ++d) {
      const int64_t n = q[static_cast<size_t>(d)];
      documents.push_back({row, n, 1 - n, d, 0, {1}, {}});
      row += n;
    }
    std::mt19937_64 random(fresh_seed());
    const Problem problem(random, {type, 1, 1, 32, 32}, documents);
    for (const Kernel& kernel : kernels_here()) {
      SCOPED_TRACE(kernel.name);
      const Result result = run(kernel, problem);
      for (int64_t i = 0; i < 256; ++i) {
        const int64_t key = i == 75 ? 0 : i == 109 ? 1 : i == 255 ? 2 : -1;
        for (int64_t c = 0; c < 32; ++c) {
          EXPECT_EQ(result.out.at(i, 0, c), key < 0 ? 0 : problem.v.at(key, 0, c));
          EXPECT_TRUE(key >= 0 || result.dq.at(i, 0, c) == 0);
          if (key >= 0) {
            EXPECT_NEAR(result.dv.at(key, 0, c), problem.dout.at(i, 0, c), 1e-6 * largest(problem.dout));
          }
        }
        EXPECT_TRUE(key >= 0 || result.lse.at(i, 0) == -kInfinity);
      }
    }
  }
}

TEST(CasesKernel, KE_02_single_queries_and_empty_documents) {
  const std::vector<Document> documents = {
      {0, 0, 0, 0, 0, {}, {}}, {0, 1, 2, 0, 0, {3}, {}}, {1, 0, 0, 3, 0, {0}, {}}, {1, 1, 4, 3, 0, {5}, {}}};
  const Problem problem = mean_problem({DType::f32, 9, 3, 64, 64}, documents);
  for (const Kernel& kernel : kernels_here()) expect_column(run(kernel, problem).out, {1, 5}, 8e-6);
  std::mt19937_64 random(fresh_seed());
  expect_all_right(Problem(random, {DType::f32, 9, 3, 64, 64}, documents));  // v differs between heads
  expect_all_right(Problem(random, {DType::f32, 3, 1, 16, 16}, causal({3})));
}

TEST(CasesKernel, KE_03_keys_without_queries) {
  for (const int64_t width : {16, 128, 256}) {
    std::mt19937_64 random(fresh_seed());
    const Problem problem(
        random, {DType::f32, 4, 1, width, width},
        {{0, 0, 6, 0, 0, {6}, {}}, {0, 3, 1, 6, 0, {4}, {}}, {3, 2, 0, 10, 0, {2}, {}}, {5, 0, 8, 12, 0, {8}, {}}});
    expect_all_right(problem);
    for (const Kernel& kernel : kernels_here()) {
      const Result result = run(kernel, problem);
      for (int64_t j = 0; j < 20; ++j) {
        for (int64_t c = 0; c < width; ++c) {
          EXPECT_TRUE((j >= 6 && j < 12) || (result.dk.at(j, 0, c) == 0 && result.dv.at(j, 0, c) == 0));
        }
      }
    }
  }
}

TEST_P(KernelTypes, KE_09_lengths_around_vector_widths) {
  for (const int64_t n : {1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129}) {
    const uint64_t seed = fresh_seed();
    SCOPED_TRACE(testing::Message() << "length " << n << " seed " << seed);
    std::mt19937_64 random(seed);
    std::vector<Document> documents = causal({n, n - 1});
    // A first row that sees no key, and a document in which none does: as padding.
    documents.push_back({2 * n - 1, n, 0, 2 * n - 1, 1, {n - 1}, {}});
    documents.push_back({3 * n - 1, n, 0, 3 * n - 2, n, {n}, {}});
    expect_all_right(Problem(random, {GetParam(), 4, 2, 16, 16}, documents));
  }
}

TEST(CasesKernel, KE_10_widths) {
  for (const int64_t width : {1, 8, 20, 40, 64, 72, 80, 104, 128, 192, 256, 320, 512}) {
    const uint64_t seed = fresh_seed();
    SCOPED_TRACE(testing::Message() << "width " << width << " seed " << seed);
    std::mt19937_64 random(seed);
    const Problem problem(random, {DType::f32, 2, 1, width, width}, causal({70, 58}));
    expect_all_right(problem);
    for (const Kernel& kernel : kernels_here(true)) {
      const Result one = run(kernel, problem), two = run(kernel, problem);
      expect_same_bits(one.dq, two.dq, "dq");
      expect_same_bits(one.dk, two.dk, "dk");
    }
  }
}

// The widest have key blocks and tiles of their own size, in forward other than in backward.
TEST(CasesKernel, KE_10_widest_over_several_key_blocks) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const int64_t n = 300;
  std::vector<Document> documents = causal({n});
  documents.push_back({.q_row = n, .q_count = 40, .q_pos = 230, .k_row = n, .k_pos = 90, .pieces = {100, 3, 77}});
  expect_all_right(Problem(random, {DType::f32, 2, 1, 512, 512}, documents));
}

TEST(CasesKernel, KE_11_value_width_of_its_own) {
  std::mt19937_64 random(fresh_seed());
  expect_all_right(Problem(random, {DType::f32, 4, 2, 16, 32}, causal({40, 70})));
  expect_all_right(Problem(random, {DType::f32, 4, 2, 32, 16}, causal({40, 70})));
}

// A broadcast tensor: stride 0 between heads, and a gradient of ones with all strides 0.
TEST(CasesKernel, KE_06_stride_zero) {
  std::mt19937_64 random(fresh_seed());
  const int64_t n = 33;
  Problem problem(random, {DType::f32, 2, 2, 8, 8}, causal({n}));
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t c = 0; c < 8; ++c) problem.k.at(j, 1, c) = problem.k.at(j, 0, c);
  }
  std::fill(problem.dout.data.begin(), problem.dout.data.end(), 1.0);
  for (const Kernel& kernel : kernels_here()) {
    SCOPED_TRACE(kernel.name);
    const Result expected = run(kernel, problem);
    const Array q = array_of(DType::f32, problem.q), k = array_of(DType::f32, problem.k),
                v = array_of(DType::f32, problem.v);
    const Array out = array_of(DType::f32, expected.out), lse = array_of(DType::f32, expected.lse);
    const Array delta = array_of(DType::f32, expected.delta);
    const Array dq = array_of(DType::f32, Values(n, 2, 8)), dk = dq, dv = dq;
    const Array dk2 = array_of(DType::f32, Values(n, 2, 8)), dv2 = array_of(DType::f32, Values(n, 2, 8));
    float one = 1;
    AttentionBlock block;
    block.q_count = n;
    block.band = &problem.documents[0].band;
    Rows same_heads = k.rows();
    same_heads.head = 0;
    block.keys = {{n, same_heads, v.rows(), dk2.rows(), dv2.rows()}};
    block.q = q.rows();
    block.out = out.rows();
    block.lse = lse.rows();
    block.delta = delta.rows();
    block.dout = {&one, 0, 0, 0};
    block.dq = dq.rows();
    const auto parallel = make_serial();
    kernel.backward({problem.shape, problem.scale, {&block, 1}, parallel.get()});
    expect_same_bits(values_of(dq, n, 2, 8), expected.dq, "dq");
    expect_same_bits(values_of(dv2, n, 2, 8), expected.dv, "dv");
  }
}

TEST(CasesKernel, PL_09_seventy_thousand_documents) {
  std::mt19937_64 random(fresh_seed());
  const int64_t count = 70000;
  const Problem problem(random, {DType::f32, 1, 1, 8, 8}, causal(std::vector<int64_t>(count, 1)));
  const Result result = run(select_kernel(problem.shape, machine(), "cpu"), problem, {.threads = 2});
  expect_same_bits(result.out, problem.v, "out");
}

// Two such documents' packed keys are as much as a call may hold: two threads have documents, and the others wait for
// tiles to help with. Copies of keys change nothing but lse.
TEST(Kernels, documents_too_long_for_each_thread_to_have_one) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const int64_t documents = 3, rows = 7, keys = 1000, copies = 23, width = 512;
  const AttentionShape shape{DType::f32, 1, 1, width, width};
  Band band;
  band.left = band.right = Band::kUnbounded;
  std::vector<Document> documents_of_one_copy;
  for (int64_t d = 0; d < documents; ++d) documents_of_one_copy.push_back({d * rows, rows, 0, 0, 0, {keys}, band});
  const Problem problem(random, shape, documents_of_one_copy);
  const Result expected = run(reference(), problem);

  const Array q = array_of(shape.dtype, problem.q), k = array_of(shape.dtype, problem.k);
  const Array v = array_of(shape.dtype, problem.v);
  const auto out_and_lse = [&](int threads) {
    const Array out(shape.dtype, documents * rows, 1, width), lse(shape.dtype, documents * rows, 1, 1);
    std::vector<AttentionBlock> blocks(documents);
    for (int64_t d = 0; d < documents; ++d) {
      AttentionBlock& block = blocks[static_cast<size_t>(d)];
      block.q_count = rows;
      block.band = &band;
      block.keys.assign(copies, {keys, k.rows(), v.rows(), {}, {}});
      block.q = q.rows(d * rows);
      block.out = out.rows(d * rows);
      block.lse = lse.rows(d * rows);
    }
    const auto parallel = make_pool(threads);
    select_kernel(shape, machine(), "cpu").forward({shape, problem.scale, blocks, false, parallel.get()});
    return std::pair{values_of(out, documents * rows, 1, width), values_of(lse, documents * rows, 1, 1)};
  };
  const auto [out, lse] = out_and_lse(4);
  EXPECT_LT(difference(out, expected.out), 1e-5);
  Values lse_of_copies = expected.lse;
  for (double& x : lse_of_copies.data) x += std::log(static_cast<double>(copies));
  EXPECT_LT(difference(lse, lse_of_copies), 1e-5);
  const auto [out_alone, lse_alone] = out_and_lse(1);
  expect_same_bits(out, out_alone, "out");
  expect_same_bits(lse, lse_alone, "lse");
}

TEST_P(KernelTypes, delta) {
  std::mt19937_64 random(fresh_seed());
  const Problem problem(random, {GetParam(), 4, 2, 8, 37}, causal({30, 9}));
  for (const Placement& place : {Placement{}, Placement{2, 1, 1, true}}) {
    const Result result = run(reference(), problem, {.place = place, .threads = 2});
    for (int64_t i = 0; i < 39; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        double delta = 0;
        for (int64_t c = 0; c < 37; ++c) delta += result.out.at(i, h, c) * problem.dout.at(i, h, c);
        EXPECT_NEAR(result.delta.at(i, h), delta, GetParam() == DType::f64 ? 1e-13 : 1e-5);
      }
    }
  }
}

TEST(Kernels, nothing_to_do) {
  std::mt19937_64 random(1);
  for (const Kernel& kernel : kernels_here()) {
    run(kernel, Problem(random, {DType::f32, 4, 2, 8, 8}, {}));
    const Problem no_keys(random, {DType::f32, 4, 2, 8, 8}, {{0, 5, 0, 0, 0, {}, {}}});
    const Result result = run(kernel, no_keys, {.whole = true});
    expect_column(result.out, {0, 0, 0, 0, 0}, 0);
    expect_column(result.dq, {0, 0, 0, 0, 0}, 0);
    const Problem no_queries(random, {DType::f32, 4, 2, 8, 8}, {{0, 0, 0, 0, 0, {3}, {}}});
    expect_column(run(kernel, no_queries, {.whole = true}).dk, {0, 0, 0}, 0);
    for (double x : result.lse.data) EXPECT_EQ(x, -kInfinity);
  }
}

// Runs anywhere that the build is for; on 64-bit ARM that is vector code.
#if defined(__aarch64__)
const std::string kBaseline = "cpu_neon";
#else
const std::string kBaseline = "cpu_baseline";
#endif

TEST(Kernels, selection) {
  Machine none;
  EXPECT_EQ(select_kernel({}, none).name, kBaseline);
  EXPECT_EQ(machine().neon, kBaseline == "cpu_neon");
  EXPECT_STREQ(select_kernel({}, none, "reference").name, "reference");
  EXPECT_STREQ(select_kernel({}, machine(), "cpu").name, select_kernel({}, machine()).name);
  Machine all;
  all.avx2 = all.avx512 = all.avx512_bf16 = true;
  const bool built = select_kernel({}, all).name == std::string_view("cpu_avx512");  // for x86
  if (built) {  // a name that begins another's is its own kernel's
    EXPECT_STREQ(select_kernel({DType::bf16}, all, "cpu_avx512").name, "cpu_avx512");
    EXPECT_STREQ(select_kernel({DType::bf16}, all).name, "cpu_avx512_bf16");
    EXPECT_STREQ(select_kernel({DType::f16}, all).name, "cpu_avx512");
    EXPECT_THROW(select_kernel({}, all, "cpu_avx512_bf16"), Error);
  }
  try {
    select_kernel({}, none, "cpu_avx512");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::argument);
    EXPECT_NE(std::string(error.what()).find("AVX-512"), std::string::npos);
  }
  try {
    select_kernel({}, none, "gpu");
    FAIL();
  } catch (const Error& error) {
    const std::string names = "cpu_avx2, " + kBaseline + ", reference";
    EXPECT_NE(std::string(error.what()).find(names), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace blockcp::test
