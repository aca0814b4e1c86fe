// The CPU kernels, best first: cpu_avx512, cpu_avx2, cpu_baseline.
#pragma once

#include <vector>

#include "blockcp/kernels/attention.h"

namespace blockcp {

std::vector<Kernel> cpu_kernels();

}  // namespace blockcp
