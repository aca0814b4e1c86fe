// The kernel that is obviously right: the formulas of attention.h, one row at a time, in double precision.
#pragma once

#include "blockcp/kernels/attention.h"

namespace blockcp {

Kernel reference_kernel();

}  // namespace blockcp
