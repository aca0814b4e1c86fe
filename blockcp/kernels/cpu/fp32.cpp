// The fp32 code of every instruction set: this file is read once for each.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "blockcp/kernels/cpu/fp32.cpp"
#include <hwy/foreach_target.h>

#include "blockcp/kernels/cpu/isa-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {

const Isa<float>& isa_fp32() {
  static constexpr Isa<float> isa = make_isa<float>();
  return isa;
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace blockcp::cpu {

const IsaTable<float>& isas(float) {
  static const IsaTable<float> table = {
    &HWY_STATIC_DISPATCH(isa_fp32)(),
#if HWY_TARGETS & HWY_AVX2
    &N_AVX2::isa_fp32(),
#else
    nullptr,
#endif
#if HWY_TARGETS & HWY_AVX3
    &N_AVX3::isa_fp32(),
#else
    nullptr,
#endif
  };
  return table;
}

}  // namespace blockcp::cpu
#endif
