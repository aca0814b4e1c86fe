// The CPU kernels, best first: cpu_avx512_bf16 for bf16 alone, cpu_avx512, cpu_avx2, and what every processor that the
// build is for can run, which is called cpu_neon on 64-bit ARM and cpu_baseline elsewhere.
#pragma once

#include <vector>

#include "blockcp/kernels/attention.h"

namespace blockcp {

std::vector<Kernel> cpu_kernels();

}  // namespace blockcp
