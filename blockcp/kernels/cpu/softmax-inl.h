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

#if HWY_TARGET == HWY_AVX3
HWY_INLINE Vector<float> maximum(Vector<float> a, Vector<float> b) { return {_mm512_max_ps(a.raw, b.raw)}; }
HWY_INLINE Vector<double> maximum(Vector<double> a, Vector<double> b) { return {_mm512_max_pd(a.raw, b.raw)}; }
HWY_INLINE Vector<float> scale_by_power(Vector<float> x, Vector<float> n) { return {_mm512_scalef_ps(x.raw, n.raw)}; }
HWY_INLINE Vector<double> scale_by_power(Vector<double> x, Vector<double> n) {
  return {_mm512_scalef_pd(x.raw, n.raw)};
}
#endif

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

template <class T>
HWY_INLINE Vector<T> exp2_polynomial(Vector<T> f) {
  const Tag<T> tag;
  constexpr int kTerms = sizeof(Exp2<T>::coefficients) / sizeof(T);
  auto poly = hn::Set(tag, Exp2<T>::coefficients[kTerms - 1]);
#pragma GCC unroll 16
  for (int i = kTerms - 2; i >= 0; --i) poly = hn::MulAdd(poly, f, hn::Set(tag, Exp2<T>::coefficients[i]));
  return hn::MulAdd(poly, f, hn::Set(tag, T{1}));
}

// For x <= 0, and a little above; -inf gives exactly 0, NaN stays NaN.
template <class T>
HWY_INLINE Vector<T> exp2(Vector<T> x) {
  const Tag<T> tag;
#if HWY_TARGET == HWY_AVX3
  // The maximum that gives the second operand if one is NaN; and 2^n times as one instruction.
  const auto n = hn::Round(x = maximum(hn::Set(tag, 2 * Exp2<T>::kLowest), x));
  return scale_by_power(exp2_polynomial<T>(hn::Sub(x, n)), n);
#else
  const auto lowest = hn::Set(tag, Exp2<T>::kLowest);
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);  // not a maximum, of which some lose NaN
  const auto rounder = hn::Set(tag, Exp2<T>::kRounder);
  const auto shifted = hn::Add(x, rounder);
  const auto poly = exp2_polynomial<T>(hn::Sub(x, hn::Sub(shifted, rounder)));
  // 2^n, which is 0 for the lowest n. A product, not a sum of exponents, so that no NaN is lost.
  const hn::RebindToUnsigned<Tag<T> > bits;
  const auto exponent = hn::ShiftLeft<Exp2<T>::kMantissaBits>(hn::BitCast(bits, shifted));
  return hn::Mul(poly, hn::BitCast(tag, hn::Add(exponent, hn::BitCast(bits, hn::Set(tag, T{1})))));
#endif
}

// Columns outside [first, end) become -inf, in those steps of `step` columns that hold some inside.
template <class T>
HWY_INLINE void hide_others(T* scores, int64_t first, int64_t end, int64_t step) {
  const Tag<T> tag;
  const auto hidden = hn::Set(tag, kMinusInfinity<T>);
  for (int64_t c = first / step * step; c < first; c += kLanes<T>) {
    const auto before = hn::FirstN(tag, static_cast<size_t>(first - c));
    hn::Store(hn::IfThenElse(before, hidden, hn::Load(tag, scores + c)), tag, scores + c);
  }
  for (int64_t c = end / kLanes<T> * kLanes<T>; c < (end + step - 1) / step * step; c += kLanes<T>) {
    const auto inside = hn::FirstN(tag, static_cast<size_t>(HWY_MAX(end - c, 0)));
    hn::Store(hn::IfThenElse(inside, hn::Load(tag, scores + c), hidden), tag, scores + c);
  }
}

// One row over one key block: scores become weights relative to the new top, as elements that lie densely from the
// start of the row on, and `sum` and `top` move on. Returns the factor by which what was summed so far shrinks.
template <class E>
HWY_INLINE Sum<E> soften(Sum<E>* scores, int64_t first, int64_t end, Sum<E>& top, Sum<E>& sum) {
  using T = Sum<E>;
  const Tag<T> tag;
  constexpr int64_t kStep = kLanes<T> * kTerms<E>;
  const int64_t from = first / kStep * kStep;
  hide_others(scores, first, end, kStep);
  auto largest = hn::Set(tag, top);
  for (int64_t c = from; c < end; c += kLanes<T>) largest = hn::Max(largest, hn::Load(tag, scores + c));
  const T new_top = hn::GetLane(hn::MaxOfLanes(tag, largest));
  // Only infinite scores can leave the top at -inf: their weights are 0, relative to anything.
  const auto base = hn::Set(tag, new_top == kMinusInfinity<T> ? T{0} : new_top);

  auto sums = hn::Zero(tag);
  for (int64_t c = from; c < end; c += kStep) {
    const auto weight = exp2<T>(hn::Sub(hn::Load(tag, scores + c), base));
    sums = hn::Add(sums, weight);
    if constexpr (kTerms<E> == 1) {
      hn::Store(weight, tag, scores + c);
    } else {
      const auto next = exp2<T>(hn::Sub(hn::Load(tag, scores + c + kLanes<T>), base));
      sums = hn::Add(sums, next);
      hn::Store(hn::BitCast(tag, round_to_bf16(weight, next)), tag, scores + c / kTerms<E>);
    }
  }
  const T keep = top == kMinusInfinity<T> ? T{0} : hn::GetLane(exp2<T>(hn::Sub(hn::Set(tag, top), base)));
  sum = sum * keep + hn::GetLane(hn::SumOfLanes(tag, sums));
  top = new_top;
  return keep;
}

// What backward needs of a row to make weights of its scores.
template <class E>
struct Weigher {
  using T = Sum<E>;
  using V = Vector<T>;
  V lse, ds_factor, delta;

  HWY_INLINE Weigher(const BackwardTile<E>& tile, int64_t r)
      : lse(hn::Set(Tag<T>(), tile.lse[r])),
        ds_factor(hn::Set(Tag<T>(), tile.through[r] * tile.ds_factor)),
        delta(hn::Set(Tag<T>(), tile.through[r] * tile.ds_factor * tile.delta[r])) {}

  HWY_INLINE V p(V score) const { return exp2<T>(hn::Sub(score, lse)); }
  // p (<dout, v> - delta), or 0 for a row that sees a single key.
  HWY_INLINE V ds(V p, V dp) const { return hn::Mul(p, hn::MulSub(dp, ds_factor, delta)); }
};

// kTerms<E> rows of backward from `r` on: scores become p, and <dout, v> becomes ds, at least in [first, end). What
// comes out elsewhere, and of a row behind the last, is of no meaning: products take nothing outside their ranges.
template <class E>
HWY_INLINE void weigh(const BackwardTile<E>& tile, int64_t r, int64_t first, int64_t end) {
  using T = Sum<E>;
  const Tag<T> tag;
  const Weigher<E> row(tile, r);
  T *scores = tile.p.row(r), *dps = tile.ds.row(r);
  if constexpr (kTerms<E> == 1) {
    for (int64_t c = first / kLanes<T> * kLanes<T>; c < end; c += kLanes<T>) {
      const auto p = row.p(hn::Load(tag, scores + c));
      hn::Store(p, tag, scores + c);
      hn::Store(row.ds(p, hn::Load(tag, dps + c)), tag, dps + c);
    }
  } else {
    const Weigher<E> next(tile, r + 1);
    const T *next_scores = tile.p.row(r + 1), *next_dps = tile.ds.row(r + 1);
    for (int64_t c = first / kLanes<T> * kLanes<T>; c < end; c += kLanes<T>) {
      const auto p = row.p(hn::Load(tag, scores + c)), next_p = next.p(hn::Load(tag, next_scores + c));
      const auto ds = round_to_bf16(row.ds(p, hn::Load(tag, dps + c)), next.ds(next_p, hn::Load(tag, next_dps + c)));
      hn::Store(pair_up(round_to_bf16(p, next_p)), tag, scores + c);
      hn::Store(pair_up(ds), tag, dps + c);
      store_apart(ds, tile.ds_rows.row(r) + c / 2, tile.ds_rows.row(r + 1) + c / 2);
    }
  }
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
