#include "blockcp/base/peak.h"

#include <time.h>

#include <algorithm>
#include <cmath>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace blockcp {

namespace {

constexpr int kChains = 12;  // more than latency times width of any processor at hand
constexpr int64_t kSteps = 2'000'000;
constexpr int kUnroll = 16;

double volatile sink;  // keeps results from being dropped

// Each runs kSteps times kChains instructions and returns the operations of one instruction.
#if defined(__x86_64__)
#define BLOCKCP_CHAINS(name, isa, vector, set, step, operations)                     \
  __attribute__((target(isa))) double name() {                                       \
    vector sums[kChains];                                                            \
    const auto factor = set;                                                         \
    _Pragma("GCC unroll 16") for (auto& sum : sums) {                                \
      sum = vector{};                                                                \
      asm volatile("" : "+v"(sum)); /* so that no chain is known to equal another */ \
    }                                                                                \
    for (int64_t n = 0; n < kSteps; ++n) {                                           \
      _Pragma("GCC unroll 16") for (auto& sum : sums) sum = step;                    \
    }                                                                                \
    double total = 0;                                                                \
    for (auto& sum : sums) total += sum[0];                                          \
    sink = total;                                                                    \
    return operations;                                                               \
  }

BLOCKCP_CHAINS(fp32_avx512, "avx512f", __m512, _mm512_set1_ps(0.5f), _mm512_fmadd_ps(sum, factor, factor), 32)
BLOCKCP_CHAINS(fp32_avx2, "avx2,fma", __m256, _mm256_set1_ps(0.5f), _mm256_fmadd_ps(sum, factor, factor), 16)
BLOCKCP_CHAINS(fp64_avx512, "avx512f", __m512d, _mm512_set1_pd(0.5), _mm512_fmadd_pd(sum, factor, factor), 16)
BLOCKCP_CHAINS(fp64_avx2, "avx2,fma", __m256d, _mm256_set1_pd(0.5), _mm256_fmadd_pd(sum, factor, factor), 8)
BLOCKCP_CHAINS(bf16_avx512, "avx512f,avx512bw,avx512bf16", __m512,
               _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f)), _mm512_dpbf16_ps(sum, factor, factor),
               64)
#undef BLOCKCP_CHAINS
#endif

double scalar() {
  double sums[kChains] = {};
  for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll kUnroll
    for (double& sum : sums) sum = sum * 0.5 + 0.5;
  }
  double total = 0;
  for (double sum : sums) total += sum;
  sink = total;
  return 2;
}

double chains(Fma kind) {
  switch (kind) {
#if defined(__x86_64__)
    case Fma::fp32_avx512:
      return fp32_avx512();
    case Fma::fp32_avx2:
      return fp32_avx2();
    case Fma::fp64_avx512:
      return fp64_avx512();
    case Fma::fp64_avx2:
      return fp64_avx2();
    case Fma::bf16_avx512:
      return bf16_avx512();
#endif
    default:
      return scalar();
  }
}

}  // namespace

double Clock::operator()() const {
  timespec now;
  clock_gettime(threads_ == 0 ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &now);
  return (static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec)) / std::max(threads_, 1);
}

double fma_peak(Parallel& parallel, Fma kind, const Clock& clock) {
  double best = 0;
  for (int attempt = 0; attempt < 5; ++attempt) {
    double operations = 0;
    const double begin = clock();
    parallel.run(parallel.threads(), [&](int64_t item, int) {
      const double each = chains(kind);
      if (item == 0) operations = each;
    });
    const double time = clock() - begin;
    best = std::max(best, operations * kChains * static_cast<double>(kSteps) * parallel.threads() / time * 1e-9);
  }
  return best;
}

}  // namespace blockcp
