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
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace blockcp {

namespace {

// At least latency times width of any processor at hand; ARM has some with four units and twice the registers.
#if defined(__aarch64__)
constexpr int kChains = 16;
#else
constexpr int kChains = 12;
#endif
constexpr int64_t kSteps = 2'000'000;
constexpr int kUnroll = 16;

// Keeps a result from being dropped.
void use(double result) { [[maybe_unused]] const volatile double kept = result; }

// Each runs kSteps times kChains instructions and returns the operations of one instruction.
#if defined(__x86_64__) || defined(__aarch64__)
#if defined(__x86_64__)
#define BLOCKCP_ISA(isa) __attribute__((target(isa)))
#define BLOCKCP_REGISTER "+v"
#else
#define BLOCKCP_ISA(isa)
#define BLOCKCP_REGISTER "+w"
#endif
#define BLOCKCP_CHAINS(name, isa, vector, set, step, operations)                                 \
  BLOCKCP_ISA(isa) double name() {                                                               \
    vector sums[kChains];                                                                        \
    const auto factor = set;                                                                     \
    _Pragma("GCC unroll 16") for (auto& sum : sums) {                                            \
      sum = vector{};                                                                            \
      asm volatile("" : BLOCKCP_REGISTER(sum)); /* so that no chain is known to equal another */ \
    }                                                                                            \
    for (int64_t n = 0; n < kSteps; ++n) {                                                       \
      _Pragma("GCC unroll 16") for (auto& sum : sums) sum = step;                                \
    }                                                                                            \
    double total = 0;                                                                            \
    for (auto& sum : sums) total += sum[0];                                                      \
    use(total);                                                                                  \
    return operations;                                                                           \
  }

#if defined(__x86_64__)
BLOCKCP_CHAINS(fp32_avx512, "avx512f", __m512, _mm512_set1_ps(0.5f), _mm512_fmadd_ps(sum, factor, factor), 32)
BLOCKCP_CHAINS(fp32_avx2, "avx2,fma", __m256, _mm256_set1_ps(0.5f), _mm256_fmadd_ps(sum, factor, factor), 16)
BLOCKCP_CHAINS(fp64_avx512, "avx512f", __m512d, _mm512_set1_pd(0.5), _mm512_fmadd_pd(sum, factor, factor), 16)
BLOCKCP_CHAINS(fp64_avx2, "avx2,fma", __m256d, _mm256_set1_pd(0.5), _mm256_fmadd_pd(sum, factor, factor), 8)
BLOCKCP_CHAINS(bf16_avx512, "avx512f,avx512bw,avx512bf16", __m512,
               _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f)), _mm512_dpbf16_ps(sum, factor, factor),
               64)
#else  // the sum is added to, as the instruction has it, so that no copy is needed
BLOCKCP_CHAINS(fp32_neon, "", float32x4_t, vdupq_n_f32(0.5f), vfmaq_f32(sum, factor, factor), 8)
BLOCKCP_CHAINS(fp64_neon, "", float64x2_t, vdupq_n_f64(0.5), vfmaq_f64(sum, factor, factor), 4)
#endif
#undef BLOCKCP_CHAINS
#undef BLOCKCP_REGISTER
#undef BLOCKCP_ISA
#endif

double scalar() {
  double sums[kChains] = {};
  for (int64_t n = 0; n < kSteps; ++n) {
#pragma GCC unroll kUnroll
    for (double& sum : sums) sum = sum * 0.5 + 0.5;
  }
  double total = 0;
  for (double sum : sums) total += sum;
  use(total);
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
#elif defined(__aarch64__)
    case Fma::fp32_neon:
      return fp32_neon();
    case Fma::fp64_neon:
      return fp64_neon();
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
