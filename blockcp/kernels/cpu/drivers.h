// A whole call of the CPU kernel on one instruction set: work items in order, pulled by threads.
#pragma once

#include "blockcp/kernels/attention.h"
#include "blockcp/kernels/cpu/isa.h"

namespace blockcp::cpu {

enum class Pass { forward, backward };

// Part of the same-bits rule, as bits depend on the key grid: so these depend on pass, widths, type and instruction set
// alone.
template <class E>
Sizes sizes_of(const AttentionShape& shape, const Isa<E>& isa, Pass pass);

template <class E>
void run_forward(const ForwardArgs& args, const Isa<E>& isa);

template <class E>
void run_backward(const BackwardArgs& args, const Isa<E>& isa);

}  // namespace blockcp::cpu
