// The table of isa.h for the instruction set that is being compiled.
#if defined(BLOCKCP_CPU_ISA_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKCP_CPU_ISA_INL_H
#undef BLOCKCP_CPU_ISA_INL_H
#else
#define BLOCKCP_CPU_ISA_INL_H
#endif

#include <hwy/highway.h>

#include "blockcp/kernels/cpu/pack-inl.h"
#include "blockcp/kernels/cpu/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {

static_assert(!HWY_ARCH_ARM_A64 || HWY_TARGET == HWY_NEON, "cpu_neon, as kernels.h calls it there, must be NEON");

template <class E>
constexpr Isa<E> make_isa() {
  using T = Sum<E>;
  Isa<E> isa{.lanes = static_cast<int>(kLanes<T>),
             .panel = static_cast<int>(kPanel<T>),
             .pack = pack<E>,
             .pack_sums = pack<T>,
             .unpack = unpack<T>,
             .dot_rows = dot_rows<T>,
             .add = add<T>,
             .make_panels = make_panels<E>,
             .pair_rows = nullptr,
             .forward = forward<E>,
             .backward = backward<E>,
             .backward_dq = backward_dq<E>};
  if constexpr (kTerms<E> != 1) isa.pair_rows = pair_rows<E>;
  return isa;
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
