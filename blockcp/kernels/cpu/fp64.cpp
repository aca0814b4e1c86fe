// The fp64 code of every instruction set: this file is read once for each.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "blockcp/kernels/cpu/fp64.cpp"
#include <hwy/foreach_target.h>

#include "blockcp/kernels/cpu/isa-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {

const Isa<double>& isa_fp64() {
  static constexpr Isa<double> isa = make_isa<double>();
  return isa;
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace blockcp::cpu {

const IsaTable<double>& isas(double) {
  static const IsaTable<double> table = {
    &HWY_STATIC_DISPATCH(isa_fp64)(),
#if HWY_TARGETS & HWY_AVX2
    &N_AVX2::isa_fp64(),
#else
    nullptr,
#endif
#if HWY_TARGETS & HWY_AVX3
    &N_AVX3::isa_fp64(),
#else
    nullptr,
#endif
  };
  return table;
}

}  // namespace blockcp::cpu
#endif
