// The most multiply-adds that this processor can do, to measure kernels against.
#pragma once

#include "blockcp/base/parallel.h"

namespace blockcp {

// Seconds: of the wall, or, with `threads` not 0, of this process's processors for each of so many threads, which is
// what to look at while the machine does other work as well.
class Clock {
 public:
  explicit Clock(int threads) : threads_(threads) {}
  double operator()() const;

 private:
  int threads_;
};

enum class Fma { fp32_avx512, fp32_avx2, fp64_avx512, fp64_avx2, bf16_avx512, fp32_neon, fp64_neon, scalar };

// GFLOP/s on all threads of `parallel`, from chains of independent multiply-adds in registers; best of a few tries.
double fma_peak(Parallel& parallel, Fma kind, const Clock& clock);

}  // namespace blockcp
