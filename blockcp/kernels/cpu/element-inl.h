// What differs between elements: float and double are one term each, a Pair is two bf16. Nothing else in the -inl.h
// files knows. Vectors of Pairs are handled as vectors of floats, by their bits.
#if defined(BLOCKCP_CPU_ELEMENT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKCP_CPU_ELEMENT_INL_H
#undef BLOCKCP_CPU_ELEMENT_INL_H
#else
#define BLOCKCP_CPU_ELEMENT_INL_H
#endif

#include <hwy/highway.h>

#include "blockcp/kernels/cpu/isa.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The whole vector of a type, and its lanes.
template <class T>
using Tag = hn::ScalableTag<T>;
template <class T>
using Vector = hn::Vec<Tag<T>>;
template <class T>
inline constexpr int kLanes = HWY_LANES(T);

template <class E>
HWY_INLINE Vector<Sum<E>> load_elements(const E* from) {
  return hn::Load(Tag<Sum<E>>(), reinterpret_cast<const Sum<E>*>(from));
}

template <class E>
HWY_INLINE Vector<Sum<E>> spread_element(const E& from) {
  Sum<E> bits;
  __builtin_memcpy(&bits, &from, sizeof bits);
  return hn::Set(Tag<Sum<E>>(), bits);
}

// The bits of those terms of an element that are in [first, end).
template <class E>
HWY_INLINE Vector<Sum<E>> terms_inside(int64_t first, int64_t end) {
  const Tag<Sum<E>> tag;
  const hn::RebindToUnsigned<Tag<Sum<E>>> bits;
  if constexpr (kTerms<E> == 1) return hn::BitCast(tag, hn::Not(hn::Zero(bits)));
  const uint32_t low = first <= 0 ? 0xffff : 0, high = end >= 2 ? 0xffff0000 : 0;
  return hn::BitCast(tag, hn::Set(bits, static_cast<hn::TFromD<decltype(bits)>>(low | high)));
}

#if HWY_TARGET == HWY_AVX3
// Highway has no names for the instructions of AVX-512 BF16. Spelled out they need no compiler flag, under which code
// for other processors could end up in this file; registers are the compiler's to choose.
HWY_INLINE Vector<float> multiply_pairs(Vector<float> a, Vector<float> b, Vector<float> sum) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
}

// Both rounded to bf16, one after the other.
HWY_INLINE hn::Vec<hn::ScalableTag<uint16_t>> round_to_bf16(Vector<float> first, Vector<float> second) {
  hn::Vec<hn::ScalableTag<uint16_t>> both;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both.raw) : "v"(first.raw), "v"(second.raw));
  return both;
}

HWY_INLINE void store_apart(hn::Vec<hn::ScalableTag<uint16_t>> halves, Pair* first, Pair* second) {
  const hn::Half<hn::ScalableTag<uint16_t>> half;
  hn::Store(hn::LowerHalf(half, halves), half, &first->low);
  hn::Store(hn::UpperHalf(half, halves), half, &second->low);
}

// One after the other becomes one beside the other.
HWY_INLINE Vector<float> pair_up(hn::Vec<hn::ScalableTag<uint16_t>> halves) {
  alignas(64) static constexpr uint16_t kOrder[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const hn::ScalableTag<uint16_t> tag;
  return hn::BitCast(Tag<float>(),
                     hn::Vec<decltype(tag)>{_mm512_permutexvar_epi16(hn::Load(tag, kOrder).raw, halves.raw)});
}
#endif

// sum + a b, term by term. Where there are 16 registers the instruction is spelled out: GCC 12 likes to leave the
// result in the place of a factor, then lacks registers, and keeps sums in memory, which costs a tenth of the speed.
template <class E>
HWY_INLINE Vector<Sum<E>> multiply_add(Vector<Sum<E>> a, Vector<Sum<E>> b, Vector<Sum<E>> sum) {
  if constexpr (kTerms<E> != 1) {
    return multiply_pairs(a, b, sum);
  } else {
#if HWY_ARCH_X86_64 && HWY_TARGET == HWY_AVX2
    if constexpr (sizeof(E) == 4) {
      asm("vfmadd231ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    } else {
      asm("vfmadd231pd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    }
    return sum;
#else
    return hn::MulAdd(a, b, sum);
#endif
  }
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
