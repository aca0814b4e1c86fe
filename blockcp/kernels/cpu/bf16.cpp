// The bf16 code of the one instruction set that has dot products of bf16. Other processors convert to fp32 as they
// pack.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "blockcp/kernels/cpu/bf16.cpp"
#include <hwy/foreach_target.h>

#include "blockcp/kernels/cpu/isa-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {

const Isa<Pair>& isa_bf16() {
  static constexpr Isa<Pair> isa = make_isa<Pair>();
  return isa;
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace blockcp::cpu {

const Isa<Pair>* avx512_bf16() {
#if HWY_TARGETS & HWY_AVX3
  return &N_AVX3::isa_bf16();
#else
  return nullptr;
#endif
}

}  // namespace blockcp::cpu
#endif
