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

// a(i, t): a[i][t], or a[t][i] where the product runs over a's rows.
enum class Along { columns, rows };

// From a(i, t) to a(i + 1, t), and to a(i, t + 1).
template <Along kAlong>
constexpr int64_t row_step(int64_t a_ld) {
  return kAlong == Along::columns ? a_ld : 1;
}
template <Along kAlong>
constexpr int64_t element_step(int64_t a_ld) {
  return kAlong == Along::columns ? 1 : a_ld;
}

// One register tile whose rows add different elements.
template <class E, class Finish>
struct Product {
  const E* a;
  int64_t a_ld;
  const E* b;
  int64_t b_ld;
  const int32_t* first;  // both ends never decrease with i; counted in terms
  const int32_t* end;
  Ahead* ahead;
  Finish finish;

  // Elements in which all of so many rows take part.
  HWY_INLINE int64_t all_begin(int rows) const { return elements_up(first[rows - 1]); }
  HWY_INLINE int64_t all_end() const { return end[0] / kTerms<E>; }

  static HWY_INLINE int64_t elements_up(int64_t terms) { return (terms + kTerms<E> - 1) / kTerms<E>; }
};

// Finishes. `at` is the same one for rows from `row` and columns from `column` on; `row` is called once for each row i
// of a register tile, in ascending order, when the sums of rows 0 to i are complete.
template <class E, bool kAdd>
struct PutOrAdd {
  static constexpr bool kOfPanels = !kAdd;     // whether b is a panel of packed keys
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
  static constexpr bool kOfPanels = false;
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

// The vector units are behind by a hundred multiplications, and go on with them while the next tile begins, if only its
// addresses do not wait for them: what a compiler copies or spills through vector registers stands at the end of that
// line. So arguments come in registers or by reference, and few numbers are kept while sums are.
template <class E, Along kAlong, class Finish, int kRows, int kVectors>
class Micro {
 public:
  // All rows add the same elements: n of them, one at least, from a and b on.
  static HWY_NOINLINE void run_same(const E* a, int64_t a_ld, const E* b, int64_t b_ld, int64_t n, Ahead* ahead,
                                    const Finish* finish) {
    Micro tile;
    tile.start();
    Elements from(a, a_ld, b, b_ld);
    tile.add_all(from, n - 1, *ahead);
    tile.finish_rows(*finish, [&](int i) HWY_ATTR { tile.add_row(i, from); });
  }

  // On both sides of where all rows take part, if anywhere, only some do.
  static HWY_NOINLINE void run_some(const Product<E, Finish>& p) {
    Micro tile;
    tile.start();
    const int64_t begin = p.all_begin(kRows), end = p.all_end();
    if (begin < end) {
      if (p.first[0] / kTerms<E> < begin) tile.add_before(p);
      Elements from(p.a + begin * element_step<kAlong>(p.a_ld), p.a_ld, p.b + begin * p.b_ld, p.b_ld);
      tile.add_all(from, end - begin, *p.ahead);
    }
    tile.finish_rows(p.finish, [&](int i) HWY_ATTR { tile.add_after(i, p); });
  }

 private:
  using T = Sum<E>;
  using V = hn::Vec<Tag<T>>;
  HWY_INLINE Micro() {}  // an implicit one would not be compiled for the instruction set

  static constexpr int kPerLine = kTileVectors == 4 ? 2 : 4;  // elements per line that is fetched ahead

  HWY_INLINE void start() {
#pragma GCC unroll kUnroll
    for (auto& row : sum) {
#pragma GCC unroll kUnroll
      for (V& v : row) v = hn::Zero(tag);
    }
  }

  // The elements of one t. Addressing reaches three rows from one pointer; the compiler must not see how the two are
  // related, or it takes a register for each row.
  class Elements {
   public:
    HWY_INLINE Elements(const E* a, int64_t a_ld, const E* b, int64_t b_ld)
        : low_(a), high_(a + kReach * a_ld), b_(b), a_ld_(a_ld), b_ld_(b_ld) {
      if constexpr (kAlong == Along::columns && kRows > kReach) asm("" : "+r"(high_));
    }

    HWY_INLINE V a(int i) const {
      if (kAlong == Along::rows) return spread_element(low_[i]);
      return spread_element(i < kReach ? low_[i * a_ld_] : high_[(i - kReach) * a_ld_]);
    }

    HWY_INLINE void load_b(V (&column)[kVectors]) const {
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVectors; ++v) column[v] = load_elements(b_ + v * kLanes<T>);
    }

    HWY_INLINE void next() {
      low_ += element_step<kAlong>(a_ld_);
      high_ += element_step<kAlong>(a_ld_);
      b_ += Finish::kOfPanels ? kPanel<T> : b_ld_;
    }

   private:
    static constexpr int kReach = 3;
    const E *low_, *high_, *b_;
    int64_t a_ld_, b_ld_;
  };

  // Adds what is left to a row, and finishes it while that is added to the next one: stores in one burst would hold up
  // what comes next.
  template <class AddRest>
  HWY_INLINE void finish_rows(const Finish& finish, const AddRest& add_rest) {
#pragma GCC unroll kUnroll
    for (int i = 0; i <= kRows; ++i) {
      if (i < kRows) add_rest(i);
      if (i > 0) finish.template row<kRows, kVectors>(i - 1, sum);
    }
  }

  HWY_INLINE void add_row(int i, V factor, const V (&column)[kVectors]) {
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVectors; ++v) sum[i][v] = multiply_add<E>(factor, column[v], sum[i][v]);
  }

  HWY_INLINE void add_row(int i, const Elements& from) {
    V column[kVectors];
    from.load_b(column);
    add_row(i, from.a(i), column);
  }

  HWY_INLINE void add_all(Elements& from, int64_t n, Ahead& ahead) {
    for (; n % kPerLine != 0; --n, from.next()) add_element(from);
    while (n > 0) {
      Ahead::Lines lines = ahead.take(n / kPerLine);
      n -= lines.count * kPerLine;
      do {
        lines.fetch();
#pragma GCC unroll kUnroll
        for (int term = 0; term < kPerLine; ++term, from.next()) add_element(from);
      } while (--lines.count > 0);
    }
  }

  HWY_INLINE void add_element(const Elements& from) {
    V column[kVectors];
    from.load_b(column);
#pragma GCC unroll kUnroll
    for (int i = 0; i < kRows; ++i) add_row(i, from.a(i), column);
  }

  HWY_INLINE void add_before(const Product<E, Finish>& p) {
#pragma GCC unroll kUnroll
    for (int i = 0; i < kRows; ++i) add_some(i, p, p.first[i] / kTerms<E>, p.all_begin(kRows));
  }

  HWY_INLINE void add_after(int i, const Product<E, Finish>& product) {
    const Product<E, Finish>* p = &product;
    asm("" : "+r"(p));  // or what all rows need is computed ahead, and finds no registers
    const int64_t end = p->all_end();
    add_some(i, *p, p->all_begin(kRows) < end ? end : p->first[i] / kTerms<E>, p->elements_up(p->end[i]));
  }

  // Adds elements [begin, end) to row i, but of each only the terms in the row's range.
  HWY_INLINE void add_some(int i, const Product<E, Finish>& p, int64_t begin, int64_t end) {
    const E* a = p.a + i * row_step<kAlong>(p.a_ld);
    for (int64_t t = begin; t < end; ++t) {
      const auto inside = terms_inside<E>(p.first[i] - t * kTerms<E>, p.end[i] - t * kTerms<E>);
      const V factor = hn::And(inside, spread_element(a[t * element_step<kAlong>(p.a_ld)]));
      const E* b = p.b + t * p.b_ld;
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
  decltype(&Micro<E, kAlong, Finish, 1, 1>::run_same) same[kTileHeight][kTileVectors];
  decltype(&Micro<E, kAlong, Finish, 1, 1>::run_some) some[kTileHeight][kTileVectors];  // not of panels

  template <int kRows, int kVectors>
  constexpr void fill() {
    using Tile = Micro<E, kAlong, Finish, kRows, kVectors>;
    same[kRows - 1][kVectors - 1] = &Tile::run_same;
    if constexpr (!Finish::kOfPanels) some[kRows - 1][kVectors - 1] = &Tile::run_some;
    if constexpr (kVectors > 1 && !Finish::kWholePanels) {
      fill<kRows, kVectors - 1>();
    } else if constexpr (kRows > 1) {
      fill<kRows - 1, kTileVectors>();
    }
  }
  constexpr Micros() : same{}, some{} { fill<kTileHeight, kTileVectors>(); }
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
    const int64_t left = vectors * tile / tiles, count = vectors * (tile + 1) / tiles - left;
    const int64_t column = left * kVector;
    for (int64_t i = 0; i < rows; i += kTileHeight) {
      const int64_t height = HWY_MIN(kTileHeight, rows - i);
      const int64_t begin = first[i], stop = end[i + height - 1];
      if (begin >= stop) continue;
      const E *a_rows = a.data + i * row_step<kAlong>(a.ld), *b_column = b.data + column;
      const Product<E, Finish> product{a_rows, a.ld, b_column, b.ld, first + i, end + i, &ahead, finish.at(i, column)};
      const auto& micros = kMicros<E, kAlong, Finish>;
      if (begin == first[i + height - 1] && stop == end[i] && (begin | stop) % kTerms<E> == 0) {
        const int64_t t = begin / kTerms<E>, n = (stop - begin) / kTerms<E>;
        micros.same[height - 1][count - 1](a_rows + t * element_step<kAlong>(a.ld), a.ld, b_column + t * b.ld, b.ld, n,
                                           &ahead, &product.finish);
      } else {
        micros.some[height - 1][count - 1](product);
      }
    }
  }
}

// <a_i, key j> for packed keys, one register tile at a time.
template <class E>
class PanelProduct {
 public:
  static constexpr int64_t kKeys = kPanel<Sum<E>>;

  HWY_INLINE PanelProduct(Packed<E> a, int64_t width, const E* panels, int64_t depth, Ahead& ahead)
      : a_(a),
        elements_((width + kTerms<E> - 1) / kTerms<E>),
        panels_(panels),
        panel_size_(depth * kKeys),
        ahead_(&ahead) {}

  // Keys [begin, end) of one panel, in whole vectors.
  template <class Finish>
  HWY_INLINE void run(int64_t row, int64_t height, int64_t begin, int64_t end, const Finish& finish) const {
    const E* b = panels_ + begin / kKeys * panel_size_ + begin % kKeys;
    const Finish mine = finish.at(row, begin);
    kMicros<E, Along::columns, Finish>.same[height - 1][(end - begin) / kLanes<Sum<E>> - 1](
        a_.row(row), a_.ld, b, kKeys, elements_, ahead_, &mine);
  }

 private:
  Packed<E> a_;
  int64_t elements_;
  const E* panels_;
  int64_t panel_size_;
  Ahead* ahead_;
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
