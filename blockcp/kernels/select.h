// The fixed list of kernels, best first; nothing registers itself.
#pragma once

#include <span>
#include <string_view>

#include "blockcp/kernels/attention.h"

namespace blockcp {

std::span<const Kernel> all_kernels();

// The first kernel with nothing against it, or, for a name, that kernel. A name matches whole or as a family: "cpu" is
// the best of the cpu kernels. Throws Error(argument) with every refusal, or the list of names.
const Kernel& select_kernel(const AttentionShape& shape, const Machine& machine, std::string_view wanted = "");

}  // namespace blockcp
