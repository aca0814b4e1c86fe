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
// x - floor(x) is one instruction there, and x times 2^floor(n) another.
HWY_INLINE Vector<float> fraction(Vector<float> x) { return {_mm512_reduce_ps(x.raw, 9)}; }
HWY_INLINE Vector<double> fraction(Vector<double> x) { return {_mm512_reduce_pd(x.raw, 9)}; }
HWY_INLINE Vector<float> scale_by_power(Vector<float> x, Vector<float> n) { return {_mm512_scalef_ps(x.raw, n.raw)}; }
HWY_INLINE Vector<double> scale_by_power(Vector<double> x, Vector<double> n) {
  return {_mm512_scalef_pd(x.raw, n.raw)};
}
#endif

// 2^f on [0, 1] is 1 + f (c0 + f (c1 + ...)), exact at 0. Largest relative error, rounding included: 1.9e-7 in fp32,
// 2.0e-16 in fp64.
template <class T>
struct Exp2;

template <>
struct Exp2<float> {
  static constexpr float coefficients[] = {0.69315131f, 0.24016445f, 0.055799913f, 0.0090170300f, 0.0018671302f};
  static constexpr int kMantissaBits = 23;
  static constexpr float kRounder = 0x1.8p23f;  // adding it to an integer leaves that in the low bits
  static constexpr float kLowest = -127;        // 2^n is 0 from here on
};

template <>
struct Exp2<double> {
  static constexpr double coefficients[] = {0.69314718055994593,   0.2402265069590633,    0.055504108665602253,
                                            0.0096181290995507956, 0.0013333558629566755, 0.0001540351230962866,
                                            1.5253175055562796e-5, 1.3208367288949112e-6, 1.0253212435721934e-7,
                                            6.5595293227705284e-9, 6.2634661462220210e-10};
  static constexpr int kMantissaBits = 52;
  static constexpr double kRounder = 0x1.8p52;
  static constexpr double kLowest = -1023;
};

template <class T>
HWY_INLINE Vector<T> exp2_polynomial(Vector<T> f) {
  const Tag<T> tag;
  constexpr auto& coefficients = Exp2<T>::coefficients;
  constexpr int kLast = sizeof(coefficients) / sizeof(T) - 1;
  auto poly = hn::Set(tag, coefficients[kLast]);
#pragma GCC unroll 16
  for (int i = kLast - 1; i >= 0; --i) poly = hn::MulAdd(poly, f, hn::Set(tag, coefficients[i]));
  return hn::MulAdd(poly, f, hn::Set(tag, T{1}));
}

// For x <= 0, and a little above; -inf gives exactly 0, NaN stays NaN.
template <class T>
HWY_INLINE Vector<T> exp2(Vector<T> x) {
#if HWY_TARGET == HWY_AVX3
  return scale_by_power(exp2_polynomial<T>(fraction(x)), x);
#else
  const Tag<T> tag;
  const auto lowest = hn::Set(tag, Exp2<T>::kLowest);
#if HWY_TARGET == HWY_AVX2
  x = hn::Max(lowest, x);  // if one is NaN, the second operand
#else
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);  // other maxima lose NaN
#endif
  const auto n = hn::Floor(x);
  // 2^n, which is 0 for the lowest n. A product, not a sum of exponents, so that no NaN is lost.
  const hn::RebindToUnsigned<Tag<T>> bits;
  const auto exponent = hn::BitCast(bits, hn::Add(n, hn::Set(tag, Exp2<T>::kRounder)));
  const auto power = hn::Add(hn::ShiftLeft<Exp2<T>::kMantissaBits>(exponent), hn::BitCast(bits, hn::Set(tag, T{1})));
  return hn::Mul(exp2_polynomial<T>(hn::Sub(x, n)), hn::BitCast(tag, power));
#endif
}

// Scores base 2 from the products of queries and keys. Where packed queries carry the factor already, it is 1 here.
// Nothing is fused with it: the largest score less itself must be 0, however large it is.
template <class E>
HWY_INLINE Vector<Sum<E>> scaled(Vector<Sum<E>> product, Vector<Sum<E>> factor) {
  if constexpr (kTerms<E> == 1) return product;
  return hn::Mul(product, factor);
}

// Columns outside [first, end) become `hidden`, in those steps of `step` columns that hold some inside.
template <class T>
HWY_INLINE void hide_others(T* scores, int64_t first, int64_t end, int64_t step, T hidden) {
  const Tag<T> tag;
  const auto hiding = hn::Set(tag, hidden);
  for (int64_t c = first / step * step; c < first; c += kLanes<T>) {
    const auto before = hn::FirstN(tag, static_cast<size_t>(first - c));
    hn::Store(hn::IfThenElse(before, hiding, hn::Load(tag, scores + c)), tag, scores + c);
  }
  for (int64_t c = end / kLanes<T> * kLanes<T>; c < (end + step - 1) / step * step; c += kLanes<T>) {
    const auto inside = hn::FirstN(tag, static_cast<size_t>(HWY_MAX(end - c, 0)));
    hn::Store(hn::IfThenElse(inside, hn::Load(tag, scores + c), hiding), tag, scores + c);
  }
}

// The running softmax of a tile over one key block: products become weights relative to the new top, as elements that
// lie densely from the start of the row on, and `top`, `sum` and `keep` move on. One loop over rows after the other, so
// that no row waits for the last step of the one before.
template <class E>
class Softmax {
 public:
  HWY_INLINE Softmax(const Seen& seen, ForwardTile<E>& tile) : seen_(seen), tile_(tile) {}

  HWY_INLINE void run() const {
    for (int64_t r = 0; r < tile_.rows; ++r) tile_.keep[r] = sees_some(r) ? top_of(r) : tile_.top[r];
    for (int64_t r = 0; r < tile_.rows; r += kLanes<T>) move_tops(r);
    for (int64_t r = 0; r < tile_.rows; ++r) {
      if (sees_some(r)) tile_.sum[r] = tile_.sum[r] * tile_.keep[r] + weigh(r);
    }
  }

 private:
  using T = Sum<E>;
  using V = Vector<T>;
  static constexpr Tag<T> tag{};
  static constexpr int64_t kStep = kLanes<T> * kTerms<E>;

  HWY_INLINE bool sees_some(int64_t r) const { return seen_.first_key[r] < seen_.end_key[r]; }
  HWY_INLINE int64_t from(int64_t r) const { return seen_.first_key[r] / kStep * kStep; }

  HWY_INLINE T top_of(int64_t r) const {
    T* scores = tile_.weights.row(r);
    const int64_t end = seen_.end_key[r];
    const V factor = hn::Set(tag, tile_.score_factor);
    hide_others(scores, seen_.first_key[r], end, kStep,
                tile_.score_factor < 0 ? -kMinusInfinity<T> : kMinusInfinity<T>);
    V top = hn::Set(tag, tile_.top[r]);
    for (int64_t c = from(r); c < end; c += kLanes<T>) {
      top = hn::Max(top, scaled<E>(hn::Load(tag, scores + c), factor));
    }
    return hn::GetLane(hn::MaxOfLanes(tag, top));
  }

  // Only infinite scores can leave the top at -inf: their weights are 0, relative to anything.
  static HWY_INLINE V base(V top) { return hn::IfThenZeroElse(hn::Eq(top, hn::Set(tag, kMinusInfinity<T>)), top); }

  HWY_INLINE void move_tops(int64_t r) const {
    const V before = hn::Load(tag, tile_.top + r), top = hn::Load(tag, tile_.keep + r);
    hn::Store(exp2<T>(hn::Sub(before, base(top))), tag, tile_.keep + r);
    hn::Store(top, tag, tile_.top + r);
  }

  HWY_INLINE T weigh(int64_t r) const {
    T* scores = tile_.weights.row(r);
    const V factor = hn::Set(tag, tile_.score_factor), less = base(hn::Set(tag, tile_.top[r]));
    const auto weight = [&](int64_t c)
                            HWY_ATTR { return exp2<T>(hn::Sub(scaled<E>(hn::Load(tag, scores + c), factor), less)); };
    V sums = hn::Zero(tag);
    for (int64_t c = from(r); c < seen_.end_key[r]; c += kStep) {
      const V first = weight(c);
      sums = hn::Add(sums, first);
      if constexpr (kTerms<E> == 1) {
        hn::Store(first, tag, scores + c);
      } else {
        const V second = weight(c + kLanes<T>);
        sums = hn::Add(sums, second);
        hn::Store(hn::BitCast(tag, round_to_bf16(first, second)), tag, scores + c / kTerms<E>);
      }
    }
    return hn::GetLane(hn::SumOfLanes(tag, sums));
  }

  const Seen& seen_;
  ForwardTile<E>& tile_;
};

// What backward needs of a row to make weights of its scores.
template <class E>
struct Weigher {
  using T = Sum<E>;
  using V = Vector<T>;
  V score_factor, lse, ds_factor, delta;

  HWY_INLINE Weigher(const BackwardTile<E>& tile, int64_t r)
      : score_factor(hn::Set(Tag<T>(), tile.score_factor)),
        lse(hn::Set(Tag<T>(), tile.lse[r])),
        ds_factor(hn::Set(Tag<T>(), tile.through[r] * tile.ds_factor)),
        delta(hn::Set(Tag<T>(), tile.through[r] * tile.ds_factor * tile.delta[r])) {}

  HWY_INLINE V p(V product) const { return exp2<T>(hn::Sub(scaled<E>(product, score_factor), lse)); }
  // p (<dout, v> - delta), or 0 for a row that sees a single key.
  HWY_INLINE V ds(V p, V dp) const { return hn::Mul(p, hn::MulSub(dp, ds_factor, delta)); }
};

// kTerms<E> rows of backward from `r` on: <q, k> becomes p, and <dout, v> becomes ds, at least in [first, end). What
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
