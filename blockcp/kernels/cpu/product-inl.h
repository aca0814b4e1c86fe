// The micro-kernel: the one loop in which nearly all time is spent, in all seven products of forward and backward.
//
//   c[i][:] = sum over t in [first[i], end[i]) of a(i, t) b[t][:]
//
// for up to kTileHeight rows i and one to four vectors of columns. What becomes of a row of c is the business of a
// finish, which gets it in registers: it is stored, added to something, or first made weights of.
// Sums stay in registers throughout, and start at zero: added to something, long sums would lose digits. Each
// row adds its elements in ascending t, one at a time, so its bits do not depend on the rows beside it; and what lies
// outside its range is not touched for it, so that NaN there cannot reach it. Of a Pair half in the range, the other
// half is taken for zero, on both sides.
#if defined(BLOCKCP_CPU_PRODUCT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKCP_CPU_PRODUCT_INL_H
#undef BLOCKCP_CPU_PRODUCT_INL_H
#else
#define BLOCKCP_CPU_PRODUCT_INL_H
#endif

#include <hwy/highway.h>

#include "blockcp/kernels/cpu/element-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {

// How many vectors a register tile is wide: 24 sums of 32 registers, or 12 of 16.
inline constexpr int kTileVectors = HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON ? 4 : 2;
template <class T>
inline constexpr int kPanel = kTileVectors* kLanes<T>;
inline constexpr int kUnroll = 8;  // more than any tile has rows or vectors

template <class E>
struct Product {
  const E* a;
  int64_t a_ld;
  const E* b;
  int64_t b_ld;
  const int32_t* first;  // both ends never decrease with i; counted in terms
  const int32_t* end;
  Ahead* ahead;
};

// a(i, t): a[i][t], or a[t][i] where the product runs over a's rows.
enum class Along { columns, rows };

// Finishes. `at` is the same one for rows from `row` and columns from `column` on; `row` is called once for each row i
// of a register tile, in ascending order, when the sums of rows 0 to i are complete.
template <class E, bool kAdd>
struct PutOrAdd {
  static constexpr bool kWholePanels = false;  // whether it takes tiles of full width only
  Packed<Sum<E>> c;

  HWY_INLINE PutOrAdd at(int64_t row, int64_t column) const { return {{c.row(row) + column, c.ld}}; }

  template <int kRows, int kVectors>
  HWY_INLINE void row(int i, const Vector<Sum<E>> (&sum)[kRows][kVectors]) const {
    const Tag<Sum<E>> tag;
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVectors; ++v) {
      Sum<E>* to = c.row(i) + v * kLanes<Sum<E>>;
      hn::Store(kAdd ? hn::Add(hn::Load(tag, to), sum[i][v]) : sum[i][v], tag, to);
    }
  }
};

template <class E>
using Put = PutOrAdd<E, false>;  // c = sum
template <class E>
using AddTo = PutOrAdd<E, true>;  // c += sum

// c = c keep + sum. Where keep is 1 that is AddTo, bit for bit, which takes nothing from the multiplications' time.
template <class E>
struct KeepAndAdd {
  static constexpr bool kWholePanels = false;
  Packed<Sum<E>> c;
  const Sum<E>* keep;

  HWY_INLINE KeepAndAdd at(int64_t row, int64_t column) const { return {{c.row(row) + column, c.ld}, keep + row}; }

  template <int kRows, int kVectors>
  HWY_INLINE void row(int i, const Vector<Sum<E>> (&sum)[kRows][kVectors]) const {
    const Tag<Sum<E>> tag;
    const auto factor = hn::Set(tag, keep[i]);
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVectors; ++v) {
      Sum<E>* to = c.row(i) + v * kLanes<Sum<E>>;
      hn::Store(hn::MulAdd(hn::Load(tag, to), factor, sum[i][v]), tag, to);
    }
  }
};

template <class E, Along kAlong, class Finish, int kRows, int kVectors>
class Micro {
 public:
  static HWY_NOINLINE void run(const Product<E>& p, Finish finish) {
    const bool same = p.first[0] == p.first[kRows - 1] && p.end[0] == p.end[kRows - 1] && p.first[0] < p.end[0];
    return same && p.first[0] % kTerms<E> == 0 && p.end[0] % kTerms<E> == 0 ? run_whole(p, finish)
                                                                            : run_some(p, finish);
  }

 private:
  using T = Sum<E>;
  using V = hn::Vec<Tag<T>>;
  HWY_INLINE Micro() {}  // an implicit one would not be compiled for the instruction set

  // All rows take the same elements.
  static HWY_NOINLINE void run_whole(const Product<E>& p, Finish finish) {
    Micro tile;
    tile.start();
    const int64_t last = p.end[0] / kTerms<E> - 1;
    tile.add_all(p, p.first[0] / kTerms<E>, last);
    tile.template finish_rows<true>(p, last, finish);
  }

  // On both sides of where all rows take part, only some do.
  static HWY_NOINLINE void run_some(const Product<E>& p, Finish finish) {
    Micro tile;
    tile.start();
    const int64_t all = up(p.first[kRows - 1]), some = p.end[0] / kTerms<E>, last = up(p.end[kRows - 1]);
    int64_t t = p.first[0] / kTerms<E>;
    for (; t < HWY_MIN(all, last); ++t) tile.add_some(p, t);
    if (t < some) tile.add_all(p, t, some);
    for (t = HWY_MAX(t, some); t < last; ++t) tile.add_some(p, t);
    tile.template finish_rows<false>(p, last, finish);
  }

  static constexpr int kPerLine = kTileVectors == 4 ? 2 : 4;  // elements per line that is fetched ahead

  static constexpr int64_t up(int64_t terms) { return (terms + kTerms<E> - 1) / kTerms<E>; }

  HWY_INLINE void start() {
#pragma GCC unroll kUnroll
    for (auto& row : sum) {
#pragma GCC unroll kUnroll
      for (V& v : row) v = hn::Zero(tag);
    }
  }

  // Adds element t, if there is a last one to add, and finishes each row while the next one is added: stores in one
  // burst would hold up what comes next.
  template <bool kLast>
  HWY_INLINE void finish_rows(const Product<E>& p, int64_t t, const Finish& finish) {
    const E* a = p.a + t * (kAlong == Along::columns ? 1 : p.a_ld);
    V column[kVectors];
    if constexpr (kLast) load_row(p.b + t * p.b_ld, column);
#pragma GCC unroll kUnroll
    for (int i = 0; i <= kRows; ++i) {
      if (kLast && i < kRows) add_row(i, at(a, p.a_ld, i), column);
      if (i > 0) finish.template row<kRows, kVectors>(i - 1, sum);
    }
  }

  static HWY_INLINE void load_row(const E* b, V (&column)[kVectors]) {
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVectors; ++v) column[v] = load_elements(b + v * kLanes<T>);
  }

  HWY_INLINE void add_row(int i, V factor, const V (&column)[kVectors]) {
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVectors; ++v) sum[i][v] = multiply_add<E>(factor, column[v], sum[i][v]);
  }

  static HWY_INLINE V at(const E* a, int64_t a_ld, int i) {
    return spread_element(kAlong == Along::columns ? a[i * a_ld] : a[i]);
  }

  HWY_INLINE void add_all(const Product<E>& p, int64_t t, int64_t end) {
    const int64_t a_ld = p.a_ld, b_ld = p.b_ld;
    const int64_t a_step = kAlong == Along::columns ? 1 : a_ld;
    const E* a = p.a + t * a_step;
    const E* b = p.b + t * b_ld;
    Ahead ahead = *p.ahead;
    int64_t n = end - t;
    for (; n >= kPerLine; n -= kPerLine) {
      ahead.step();
#pragma GCC unroll kUnroll
      for (int term = 0; term < kPerLine; ++term, a += a_step, b += b_ld) add_element(a, a_ld, b);
    }
    for (; n > 0; --n, a += a_step, b += b_ld) add_element(a, a_ld, b);
    *p.ahead = ahead;
  }

  HWY_INLINE void add_element(const E* a, int64_t a_ld, const E* b) {
    V column[kVectors];
    load_row(b, column);
#pragma GCC unroll kUnroll
    for (int i = 0; i < kRows; ++i) add_row(i, at(a, a_ld, i), column);
  }

  HWY_INLINE void add_some(const Product<E>& p, int64_t t) {
    const E* a = p.a + t * (kAlong == Along::columns ? 1 : p.a_ld);
    const E* b = p.b + t * p.b_ld;
#pragma GCC unroll kUnroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t first = p.first[i] - t * kTerms<E>, end = p.end[i] - t * kTerms<E>;
      if (first >= kTerms<E> || end <= 0 || first >= end) continue;
      const auto inside = terms_inside<E>(first, end);
      const V factor = hn::And(inside, at(a, p.a_ld, i));
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = multiply_add<E>(factor, hn::And(inside, load_elements(b + v * kLanes<T>)), sum[i][v]);
      }
    }
  }

  static constexpr Tag<T> tag{};
  V sum[kRows][kVectors];
};

// One entry per height and width of a tile: edges run a smaller tile, not a padded one.
template <class E, Along kAlong, class Finish>
struct Micros {
  using Run = void (*)(const Product<E>&, Finish);
  Run run[kTileHeight][kTileVectors];

  template <int kRows, int kVectors>
  constexpr void fill() {
    run[kRows - 1][kVectors - 1] = &Micro<E, kAlong, Finish, kRows, kVectors>::run;
    if constexpr (kVectors > 1 && !Finish::kWholePanels) {
      fill<kRows, kVectors - 1>();
    } else if constexpr (kRows > 1) {
      fill<kRows - 1, kTileVectors>();
    }
  }
  constexpr Micros() : run{} { fill<kTileHeight, kTileVectors>(); }
};

template <class E, Along kAlong, class Finish>
inline constexpr Micros<E, kAlong, Finish> kMicros{};

// The product for any number of rows and `width` columns (in whole vectors). Rows that have nothing to add may be left
// out.
template <class E, Along kAlong, class Finish>
HWY_NOINLINE void accumulate(Packed<E> a, Packed<E> b, const int32_t* first, const int32_t* end, int64_t rows,
                             int64_t width, Ahead& ahead, const Finish& finish) {
  constexpr int64_t kVector = kLanes<Sum<E>>;
  const int64_t vectors = width / kVector, tiles = (vectors + kTileVectors - 1) / kTileVectors;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = vectors * tile / tiles, count = vectors * (tile + 1) / tiles - begin;
    const int64_t column = begin * kVector;
    for (int64_t i = 0; i < rows; i += kTileHeight) {
      const int64_t height = HWY_MIN(kTileHeight, rows - i);
      if (first[i] >= end[i + height - 1]) continue;
      kMicros<E, kAlong, Finish>.run[height - 1][count - 1](
          {a.data + (kAlong == Along::columns ? i * a.ld : i), a.ld, b.data + column, b.ld, first + i, end + i, &ahead},
          finish.at(i, column));
    }
  }
}

// <a_i, key j> for packed keys, one register tile at a time.
template <class E>
class PanelProduct {
 public:
  static constexpr int64_t kKeys = kPanel<Sum<E>>;

  HWY_INLINE PanelProduct(Packed<E> a, int64_t width, const E* panels, int64_t depth, Ahead& ahead)
      : a_(a), panels_(panels), panel_size_(depth * kKeys), ahead_(&ahead) {
    for (int i = 0; i < kTileHeight; ++i) {
      first_[i] = 0;
      end_[i] = static_cast<int32_t>((width + kTerms<E> - 1) / kTerms<E> * kTerms<E>);
    }
  }

  // Keys [begin, end) of one panel, in whole vectors.
  template <class Finish>
  HWY_INLINE void run(int64_t row, int64_t height, int64_t begin, int64_t end, const Finish& finish) const {
    const E* b = panels_ + begin / kKeys * panel_size_ + begin % kKeys;
    kMicros<E, Along::columns, Finish>.run[height - 1][(end - begin) / kLanes<Sum<E>> - 1](
        {a_.row(row), a_.ld, b, kKeys, first_, end_, ahead_}, finish.at(row, begin));
  }

 private:
  Packed<E> a_;
  const E* panels_;
  int64_t panel_size_;
  Ahead* ahead_;
  int32_t first_[kTileHeight], end_[kTileHeight];
};

// visit(row, height, begin, end) for the register tiles of rows and keys [begin, end) of one panel of which some row
// sees some, in whole vectors; for each row in ascending order of keys.
template <class E, class Visit>
HWY_INLINE void each_panel_tile(const Seen& seen, int64_t rows, int64_t keys, const Visit& visit) {
  constexpr int64_t kKeys = PanelProduct<E>::kKeys, kStep = kLanes<Sum<E>>;
  for (int64_t key = 0; key < keys; key += kKeys) {
    for (int64_t i = 0; i < rows; i += kTileHeight) {
      const int64_t height = HWY_MIN(kTileHeight, rows - i);
      const int64_t begin = HWY_MAX(seen.first_key[i], key) / kStep * kStep;
      const int64_t end = (HWY_MIN(seen.end_key[i + height - 1], key + kKeys) + kStep - 1) / kStep * kStep;
      if (begin < end) visit(i, height, begin, end);
    }
  }
}

// Finishes <a_i, key j> for the keys that rows i see, and for some beside them: whole vectors.
template <class E, class Finish>
HWY_NOINLINE void multiply_panels(Packed<E> a, int64_t width, const E* panels, int64_t depth, const Seen& seen,
                                  int64_t rows, int64_t keys, Ahead& ahead, const Finish& finish) {
  const PanelProduct<E> product(a, width, panels, depth, ahead);
  each_panel_tile<E>(seen, rows, keys, [&](int64_t row, int64_t height, int64_t begin, int64_t end) HWY_ATTR {
    product.run(row, height, begin, end, finish);
  });
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
