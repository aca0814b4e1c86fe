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

template <class T>
constexpr Isa<T> make_isa() {
  return {.lanes = static_cast<int>(kLanes<T>),
          .panel = static_cast<int>(kPanel<T>),
          .pack = pack<T>,
          .unpack = unpack<T>,
          .add = add<T>,
          .make_panels = make_panels<T>,
          .forward = forward<T>,
          .backward = backward<T>,
          .backward_dq = backward_dq<T>};
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
