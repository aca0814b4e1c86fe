// exp2, and the two places that need it: the running softmax of forward, and the weights of backward.
#if defined(BLOCKCP_CPU_SOFTMAX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKCP_CPU_SOFTMAX_INL_H
#undef BLOCKCP_CPU_SOFTMAX_INL_H
#else
#define BLOCKCP_CPU_SOFTMAX_INL_H
#endif

#include <hwy/highway.h>

#include <cmath>

#include "blockcp/kernels/cpu/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {

template <class T>
inline constexpr T kMinusInfinity = static_cast<T>(-HUGE_VAL);

// 2^f on [-1/2, 1/2] is 1 + f (c0 + f (c1 + ...)), exact at 0. Largest relative error, rounding included: 1.1e-7 in
// fp32, 2.5e-16 in fp64.
template <class T>
struct Exp2;

template <>
struct Exp2<float> {
  static constexpr float coefficients[] = {0.69314724f,  0.24022652f,   0.055503104f,
                                           0.009617693f, 0.0013406643f, 0.00015594678f};
  static constexpr int kMantissaBits = 23;
  static constexpr float kRounder = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  static constexpr float kLowest = -127;        // from here on 0
};

template <>
struct Exp2<double> {
  static constexpr double coefficients[] = {0.69314718055994573,    0.24022650695910097,    0.055504108664790455,
                                            0.0096181291076070322,  0.0013333558153427992,  0.00015403530441528734,
                                            1.5252727395175984e-05, 1.3215442695988711e-06, 1.0180643947588783e-07,
                                            7.072567212082643e-09,  4.0785809690370662e-10};
  static constexpr int kMantissaBits = 52;
  static constexpr double kRounder = 0x1.8p52;
  static constexpr double kLowest = -1023;
};

// For x <= 0, and a little above; -inf gives exactly 0, NaN stays NaN.
template <class T>
HWY_INLINE hn::Vec<Tag<T>> exp2(hn::Vec<Tag<T>> x) {
  const Tag<T> tag;
  constexpr int kTerms = sizeof(Exp2<T>::coefficients) / sizeof(T);
  const auto lowest = hn::Set(tag, Exp2<T>::kLowest);
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);  // not a maximum, of which some lose NaN
  const auto rounder = hn::Set(tag, Exp2<T>::kRounder);
  const auto shifted = hn::Add(x, rounder);
  const auto f = hn::Sub(x, hn::Sub(shifted, rounder));
  auto poly = hn::Set(tag, Exp2<T>::coefficients[kTerms - 1]);
#pragma GCC unroll 16
  for (int i = kTerms - 2; i >= 0; --i) poly = hn::MulAdd(poly, f, hn::Set(tag, Exp2<T>::coefficients[i]));
  poly = hn::MulAdd(poly, f, hn::Set(tag, T{1}));
  // 2^n, which is 0 for the lowest n. A product, not a sum of exponents, so that no NaN is lost.
  const hn::RebindToUnsigned<Tag<T>> bits;
  const auto exponent = hn::ShiftLeft<Exp2<T>::kMantissaBits>(hn::BitCast(bits, shifted));
  return hn::Mul(poly, hn::BitCast(tag, hn::Add(exponent, hn::BitCast(bits, hn::Set(tag, T{1})))));
}

// Columns outside [first, end) of the vectors that hold some inside become -inf.
template <class T>
HWY_INLINE void hide_others(T* scores, int64_t first, int64_t end) {
  const Tag<T> tag;
  const auto hidden = hn::Set(tag, kMinusInfinity<T>);
  const int64_t head = first % kLanes<T>, tail = end % kLanes<T>;
  if (head != 0) {
    T* at = scores + first - head;
    hn::Store(hn::IfThenElse(hn::FirstN(tag, static_cast<size_t>(head)), hidden, hn::Load(tag, at)), tag, at);
  }
  if (tail != 0) {
    T* at = scores + end - tail;
    hn::Store(hn::IfThenElse(hn::FirstN(tag, static_cast<size_t>(tail)), hn::Load(tag, at), hidden), tag, at);
  }
}

// One row over one key block: scores become weights relative to the new top, and `sum` and `top` move on. Returns the
// factor by which what was summed so far shrinks.
template <class T>
HWY_INLINE T soften(T* scores, int64_t first, int64_t end, T& top, T& sum) {
  const Tag<T> tag;
  hide_others(scores, first, end);
  const int64_t from = first / kLanes<T> * kLanes<T>;
  auto largest = hn::Set(tag, top);
  for (int64_t c = from; c < end; c += kLanes<T>) largest = hn::Max(largest, hn::Load(tag, scores + c));
  const T new_top = hn::GetLane(hn::MaxOfLanes(tag, largest));
  // Only infinite scores can leave the top at -inf: their weights are 0, relative to anything.
  const auto base = hn::Set(tag, new_top == kMinusInfinity<T> ? T{0} : new_top);

  auto sums = hn::Zero(tag);
  for (int64_t c = from; c < end; c += kLanes<T>) {
    const auto weight = exp2<T>(hn::Sub(hn::Load(tag, scores + c), base));
    hn::Store(weight, tag, scores + c);
    sums = hn::Add(sums, weight);
  }
  const T keep = top == kMinusInfinity<T> ? T{0} : hn::GetLane(exp2<T>(hn::Sub(hn::Set(tag, top), base)));
  sum = sum * keep + hn::GetLane(hn::SumOfLanes(tag, sums));
  top = new_top;
  return keep;
}

// One row of backward: p holds scores and becomes exp2(score - lse); ds holds <dout, v> and becomes p (ds - delta), or
// 0 where `through` is 0 and not 1.
template <class T>
HWY_INLINE void weigh(T* p, T* ds, int64_t first, int64_t end, T lse, T delta, T through) {
  const Tag<T> tag;
  const auto lses = hn::Set(tag, lse), factors = hn::Set(tag, through), deltas = hn::Set(tag, delta * through);
  for (int64_t c = first / kLanes<T> * kLanes<T>; c < end; c += kLanes<T>) {
    const auto weight = exp2<T>(hn::Sub(hn::Load(tag, p + c), lses));
    hn::Store(weight, tag, p + c);
    hn::Store(hn::Mul(weight, hn::MulSub(hn::Load(tag, ds + c), factors, deltas)), tag, ds + c);
  }
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
