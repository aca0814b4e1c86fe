// exp2, and what needs it: the running softmax of forward, and the weights of backward. Mostly these are finishes of
// the product that makes the scores, which then are never stored.
#if defined(BLOCKCP_CPU_SOFTMAX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKCP_CPU_SOFTMAX_INL_H
#undef BLOCKCP_CPU_SOFTMAX_INL_H
#else
#define BLOCKCP_CPU_SOFTMAX_INL_H
#endif

#include <hwy/highway.h>

#include <cmath>
#include <utility>

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
  static constexpr float kLowest = -127;        // 2^n is 0 from here on down
  static constexpr float kHighest = 128;        // and infinite from here on up
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
  static constexpr double kHighest = 1024;
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

// -inf gives exactly 0, NaN stays NaN. Beyond the largest number it is infinite; on AVX2 that costs an instruction
// more, and without kAlsoLarge it is of no meaning there.
template <class T, bool kAlsoLarge = true>
HWY_INLINE Vector<T> exp2(Vector<T> x) {
#if HWY_TARGET == HWY_AVX3
  return scale_by_power(exp2_polynomial<T>(fraction(x)), x);
#else
  const Tag<T> tag;
  const auto lowest = hn::Set(tag, Exp2<T>::kLowest), highest = hn::Set(tag, Exp2<T>::kHighest);
#if HWY_TARGET == HWY_AVX2
  x = hn::Max(lowest, x);  // if one is NaN, the second operand
  if constexpr (kAlsoLarge) x = hn::Min(highest, x);
#else
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);  // other maxima lose NaN
  x = hn::IfThenElse(hn::Gt(x, highest), highest, x);
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

// exp2(score - base)
template <class E, bool kAlsoLarge = true>
HWY_INLINE Vector<Sum<E>> weight(Vector<Sum<E>> product, Vector<Sum<E>> factor, Vector<Sum<E>> base) {
  return exp2<Sum<E>, kAlsoLarge>(hn::Sub(scaled<E>(product, factor), base));
}

// Weights are relative to the base of their row: the score of the first key that it sees. Later scores may be larger,
// as long as the weights of a key block add up to less than this; else the base moves to the largest of them. That is
// rare, so the base is known before the scores are, and they become weights in registers.
template <class T>
inline constexpr T kMostWeight = 0x1p32;

// What forward makes of <q, k> for rows that have a base and see the whole panel: weights, as elements that lie densely
// from the start of the row on, and their sums, lane by lane.
template <class E>
struct PutWeights {
  static constexpr bool kOfPanels = true;
  static constexpr bool kWholePanels = true;
  using T = Sum<E>;
  Packed<T> weights, sums;
  const T* base;
  T score_factor;

  HWY_INLINE PutWeights at(int64_t row, int64_t column) const {
    return {{weights.row(row) + column / kTerms<E>, weights.ld}, {sums.row(row), sums.ld}, base + row, score_factor};
  }

  template <int kRows, int kVectors>
  HWY_INLINE void row(int i, const Vector<T> (&sum)[kRows][kVectors]) const {
    const Tag<T> tag;
    const auto factor = hn::Set(tag, score_factor), less = hn::Set(tag, base[i]);
    auto total = hn::Load(tag, sums.row(i));
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVectors; v += kTerms<E>) {
      const auto first = weight<E>(sum[i][v], factor, less);
      total = hn::Add(total, first);
      T* to = weights.row(i) + v / kTerms<E> * kLanes<T>;
      if constexpr (kTerms<E> == 1) {
        hn::Store(first, tag, to);
      } else {
        const auto second = weight<E>(sum[i][v + 1], factor, less);
        total = hn::MulAdd(second, hn::Set(tag, T{1}), total);  // a sum, where there is room for it
        hn::Store(hn::BitCast(tag, round_to_bf16(first, second)), tag, to);
      }
    }
    hn::Store(total, tag, sums.row(i));
  }
};

// The running softmax of a tile over one key block: products become weights, laid out as above, and `base`, `sum` and
// `keep` move on. What becomes of a row depends on its scores alone, not on the rows beside it, nor on which of the
// ways it goes.
template <class E>
class Softmax {
 public:
  // With 16 registers PutWeights had to keep sums in memory, which costs more than it saves.
  static constexpr bool kInRegisters = kTileVectors == 4;

  HWY_INLINE Softmax(const Seen& seen, const ForwardTile<E>& tile) : seen_(seen), tile_(tile) {}

  // The way of nearly all tiles: weights are made without a look at the scores, panel by panel, or row by row.
  HWY_INLINE void start() {
    all_have_bases_ = true;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      hn::Store(hn::Zero(tag), tag, tile_.sums.row(r));
      all_have_bases_ &= tile_.base[r] > kMinusInfinity<T>;
    }
  }

  // Whether PutWeights can do these keys: they are a whole panel that all the rows see, and all have a base.
  HWY_INLINE bool all_see(int64_t row, int64_t height, int64_t begin, int64_t end) const {
    const int64_t first = seen_.first_key[row + height - 1];
    return end - begin == kPanel<T> && end <= seen_.end_key[row] && first <= begin &&
           (first < begin || all_have_bases_);
  }

  HWY_INLINE PutWeights<E> put_weights() const { return {tile_.weights, tile_.sums, tile_.base, tile_.score_factor}; }

  // Scores in columns [begin, end), after Put, become weights.
  HWY_INLINE void weigh_rows(int64_t row, int64_t height, int64_t begin, int64_t end) const {
    for (int64_t r = row; r < row + height; ++r) {
      start_base(r, begin, end);
      weigh(r, begin, end, tile_.base[r]);
    }
  }

  // False if some weights are too large, or NaN: then the products are needed again, for run().
  HWY_INLINE bool finish() const {
    bool all = true;
    for (int64_t r = 0; r < tile_.rows; ++r) {
      tile_.keep[r] = sum_of_lanes(r);
      all &= tile_.keep[r] < kMostWeight<T>;
    }
    for (int64_t r = 0; all && r < tile_.rows; ++r) tile_.sum[r] += tile_.keep[r];
    return all;
  }

  // After finish() and Put.
  HWY_INLINE void run() const {
    for (int64_t r = 0; r < tile_.rows; ++r) {
      tile_.keep[r] = tile_.keep[r] < kMostWeight<T> ? 1 : move_base(r);
      hn::Store(hn::Zero(tag), tag, tile_.sums.row(r));
      // Only infinite scores leave a row without a base: their weights are 0, relative to anything.
      weigh(r, 0, seen_.end_key[r], or_zero(tile_.base[r]));
      tile_.sum[r] = tile_.sum[r] * tile_.keep[r] + sum_of_lanes(r);
    }
  }

 private:
  using T = Sum<E>;
  using V = Vector<T>;
  static constexpr Tag<T> tag{};
  static constexpr int64_t kStep = kLanes<T> * kTerms<E>;

  HWY_INLINE T sum_of_lanes(int64_t r) const {
    return hn::GetLane(hn::SumOfLanes(tag, hn::Load(tag, tile_.sums.row(r))));
  }

  HWY_INLINE void start_base(int64_t r, int64_t begin, int64_t end) const {
    const int64_t first = seen_.first_key[r];
    if (tile_.base[r] > kMinusInfinity<T> || first < begin || first >= HWY_MIN(end, seen_.end_key[r])) return;
    tile_.base[r] = hn::GetLane(scaled<E>(hn::Set(tag, tile_.weights.row(r)[first]), hn::Set(tag, tile_.score_factor)));
  }

  // x in the columns from c on that the row sees, `other` elsewhere.
  HWY_INLINE V if_seen(int64_t r, int64_t c, V x, V other) const {
    const int64_t first = seen_.first_key[r] - c, end = seen_.end_key[r] - c;
    if (first <= 0 && end >= kLanes<T>) return x;
    if (end < kLanes<T>) x = hn::IfThenElse(hn::FirstN(tag, static_cast<size_t>(HWY_MAX(end, 0))), x, other);
    return first > 0 ? hn::IfThenElse(hn::FirstN(tag, static_cast<size_t>(first)), other, x) : x;
  }

  HWY_INLINE T top_of(int64_t r) const {
    const T* scores = tile_.weights.row(r);
    const V factor = hn::Set(tag, tile_.score_factor), hidden = hn::Set(tag, kMinusInfinity<T>);
    V top = hidden;
    for (int64_t c = seen_.first_key[r] / kLanes<T> * kLanes<T>; c < seen_.end_key[r]; c += kLanes<T>) {
      top = hn::Max(top, if_seen(r, c, scaled<E>(hn::Load(tag, scores + c), factor), hidden));
    }
    return hn::GetLane(hn::MaxOfLanes(tag, top));
  }

  static HWY_INLINE T or_zero(T base) { return base == kMinusInfinity<T> ? 0 : base; }

  // Returns what remains of the weights so far.
  HWY_INLINE T move_base(int64_t r) const {
    const T before = std::exchange(tile_.base[r], top_of(r));
    return hn::GetLane(exp2<T>(hn::Set(tag, before - or_zero(tile_.base[r]))));
  }

  HWY_INLINE void weigh(int64_t r, int64_t begin, int64_t end, T relative_to) const {
    T* scores = tile_.weights.row(r);
    const V factor = hn::Set(tag, tile_.score_factor), base = hn::Set(tag, relative_to);
    const auto weight_at = [&](int64_t c) HWY_ATTR {
      return if_seen(r, c, weight<E>(hn::Load(tag, scores + c), factor, base), hn::Zero(tag));
    };
    V sums = hn::Load(tag, tile_.sums.row(r));
    for (int64_t c = HWY_MAX(begin, seen_.first_key[r]) / kStep * kStep; c < HWY_MIN(end, seen_.end_key[r]);
         c += kStep) {
      const V first = weight_at(c);
      sums = hn::Add(sums, first);
      if constexpr (kTerms<E> == 1) {
        hn::Store(first, tag, scores + c);
      } else {
        const V second = weight_at(c + kLanes<T>);
        sums = hn::Add(sums, second);
        hn::Store(hn::BitCast(tag, round_to_bf16(first, second)), tag, scores + c / kTerms<E>);
      }
    }
    hn::Store(sums, tag, tile_.sums.row(r));
  }

  const Seen& seen_;
  const ForwardTile<E>& tile_;
  bool all_have_bases_ = false;
};

// What backward makes of <q, k>: p, which is exp2(score - lse), and at most 1.
template <class E>
struct PutP {
  static constexpr bool kOfPanels = true;
  static constexpr bool kWholePanels = false;
  using T = Sum<E>;
  Packed<T> p;
  const T* lse;  // base 2
  T score_factor;

  HWY_INLINE PutP at(int64_t row, int64_t column) const {
    return {{p.row(row) + column, p.ld}, lse + row, score_factor};
  }

  template <int kRows, int kVectors>
  HWY_INLINE void row(int i, const Vector<T> (&sum)[kRows][kVectors]) const {
    const Tag<T> tag;
    const auto factor = hn::Set(tag, score_factor), less = hn::Set(tag, lse[i]);
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVectors; ++v) {
      hn::Store(weight<E, false>(sum[i][v], factor, less), tag, p.row(i) + v * kLanes<T>);
    }
  }
};

// What it makes of <dout, v>: ds, which is p (<dout, v> - delta). Of Pairs, kTerms<E> rows at a time, both p and ds
// then become elements. What comes out of keys that a row does not see is of no meaning, as is a row behind the last:
// products take nothing outside their ranges.
template <class E>
struct PutDs {
  static constexpr bool kOfPanels = true;
  static constexpr bool kWholePanels = false;
  using T = Sum<E>;
  Packed<T> p, ds;
  Packed<E> ds_rows;
  const T *factor, *delta;

  HWY_INLINE PutDs at(int64_t row, int64_t column) const {
    return {{p.row(row) + column, p.ld},
            {ds.row(row) + column, ds.ld},
            {ds_rows.row(row) + column / kTerms<E>, ds_rows.ld},
            factor + row,
            delta + row};
  }

  template <int kRows, int kVectors>
  HWY_INLINE void row(int i, const Vector<T> (&sum)[kRows][kVectors]) const {
    const Tag<T> tag;
    const auto ds_of = [&](int r, int v, Vector<T> weight) HWY_ATTR {
      return hn::Mul(weight, hn::MulSub(sum[r][v], hn::Set(tag, factor[r]), hn::Set(tag, delta[r])));
    };
    if constexpr (kTerms<E> == 1) {
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVectors; ++v) {
        const int c = v * kLanes<T>;
        hn::Store(ds_of(i, v, hn::Load(tag, p.row(i) + c)), tag, ds.row(i) + c);
      }
    } else {
      if (i % 2 == 0 && i + 1 < kRows) return;
      const int r = i - i % 2;
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVectors; ++v) {
        const int c = v * kLanes<T>;
        const auto first = hn::Load(tag, p.row(r) + c), second = r == i ? first : hn::Load(tag, p.row(i) + c);
        const auto both = round_to_bf16(ds_of(r, v, first), ds_of(i, v, second));
        hn::Store(pair_up(round_to_bf16(first, second)), tag, p.row(r) + c);
        hn::Store(pair_up(both), tag, ds.row(r) + c);
        store_apart(both, ds_rows.row(r) + c / 2, ds_rows.row(r + 1) + c / 2);
      }
    }
  }
};

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
