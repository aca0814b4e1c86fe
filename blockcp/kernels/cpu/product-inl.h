// The micro-kernel: the one loop in which nearly all time is spent, in all seven products of forward and backward.
//
//   c[i][:] = c[i][:] keep[i] + sum over t in [first[i], end[i]) of a(i, t) b[t][:]
//
// for up to kTileHeight rows i and one to four vectors of columns, which stay in registers throughout. Each row adds
// its terms in ascending t, one at a time, so its bits do not depend on the rows beside it; and what lies outside its
// range is not touched for it, so that NaN there cannot reach it.
#if defined(BLOCKCP_CPU_PRODUCT_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKCP_CPU_PRODUCT_INL_H
#undef BLOCKCP_CPU_PRODUCT_INL_H
#else
#define BLOCKCP_CPU_PRODUCT_INL_H
#endif

#include <hwy/highway.h>

#include "blockcp/kernels/cpu/isa.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The whole vector of a type, and how many of them a register tile is wide: 24 sums of 32 registers, or 12 of 16.
template <class T>
using Tag = hn::ScalableTag<T>;
template <class T>
inline constexpr int kLanes = HWY_LANES(T);
inline constexpr int kTileVectors = HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON ? 4 : 2;
template <class T>
inline constexpr int kPanel = kTileVectors* kLanes<T>;
inline constexpr int kUnroll = 8;  // more than any tile has rows or vectors

template <class T>
struct Product {
  const T* a;
  int64_t a_ld;
  const T* b;
  int64_t b_ld;
  T* c;
  int64_t c_ld;
  const T* keep;         // null: c starts at zero
  const int32_t* first;  // both ends never decrease with i
  const int32_t* end;
  Ahead* ahead;
};

// a(i, t): a[i][t], or a[t][i] where the product runs over a's rows.
enum class Along { columns, rows };

template <class T, Along kAlong, int kRows, int kVectors>
class Micro {
 public:
  static HWY_NOINLINE void run(const Product<T>& p) {
    Micro tile;
    tile.start(p);
    // Where all rows take part, and on both sides of it where only some do.
    const int64_t all = p.first[kRows - 1], some = p.end[0], last = p.end[kRows - 1];
    int64_t t = p.first[0];
    for (; t < HWY_MIN(all, last); ++t) tile.add_some(p, t);
    if (t < some) tile.add_all(p, t, some);
    for (t = HWY_MAX(t, some); t < last; ++t) tile.add_some(p, t);
    tile.finish(p);
  }

 private:
  using V = hn::Vec<Tag<T>>;
  static constexpr int kTerms = kTileVectors == 4 ? 2 : 4;  // per line that is fetched ahead

  HWY_INLINE void start(const Product<T>& p) {
#pragma GCC unroll kUnroll
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = p.keep == nullptr
                        ? hn::Zero(tag)
                        : hn::Mul(hn::Load(tag, p.c + i * p.c_ld + v * kLanes<T>), hn::Set(tag, p.keep[i]));
      }
    }
  }

  HWY_INLINE void finish(const Product<T>& p) {
#pragma GCC unroll kUnroll
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVectors; ++v) hn::Store(sum[i][v], tag, p.c + i * p.c_ld + v * kLanes<T>);
    }
  }

  static HWY_INLINE T at(const T* a, int64_t a_ld, int i) { return kAlong == Along::columns ? a[i * a_ld] : a[i]; }

  HWY_INLINE void add_all(const Product<T>& p, int64_t t, int64_t end) {
    const int64_t a_ld = p.a_ld, b_ld = p.b_ld;
    const int64_t a_step = kAlong == Along::columns ? 1 : a_ld;
    const T* a = p.a + t * a_step;
    const T* b = p.b + t * b_ld;
    Ahead ahead = *p.ahead;
    int64_t n = end - t;
    for (; n >= kTerms; n -= kTerms) {
      ahead.step();
#pragma GCC unroll kUnroll
      for (int term = 0; term < kTerms; ++term, a += a_step, b += b_ld) add_term(a, a_ld, b);
    }
    for (; n > 0; --n, a += a_step, b += b_ld) add_term(a, a_ld, b);
    *p.ahead = ahead;
  }

  HWY_INLINE void add_term(const T* a, int64_t a_ld, const T* b) {
    V column[kVectors];
#pragma GCC unroll kUnroll
    for (int v = 0; v < kVectors; ++v) column[v] = hn::Load(tag, b + v * kLanes<T>);
#pragma GCC unroll kUnroll
    for (int i = 0; i < kRows; ++i) {
      const V factor = hn::Set(tag, at(a, a_ld, i));
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(factor, column[v], sum[i][v]);
    }
  }

  HWY_INLINE void add_some(const Product<T>& p, int64_t t) {
    const T* a = p.a + t * (kAlong == Along::columns ? 1 : p.a_ld);
    const T* b = p.b + t * p.b_ld;
#pragma GCC unroll kUnroll
    for (int i = 0; i < kRows; ++i) {
      if (t < p.first[i] || t >= p.end[i]) continue;
      const V factor = hn::Set(tag, at(a, p.a_ld, i));
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(factor, hn::Load(tag, b + v * kLanes<T>), sum[i][v]);
    }
  }

  static constexpr Tag<T> tag{};
  V sum[kRows][kVectors];
};

// One entry per height and width of a tile: edges run a smaller tile, not a padded one.
template <class T, Along kAlong>
struct Micros {
  using Run = void (*)(const Product<T>&);
  Run run[kTileHeight][kTileVectors];

  template <int kRows, int kVectors>
  constexpr void fill() {
    run[kRows - 1][kVectors - 1] = &Micro<T, kAlong, kRows, kVectors>::run;
    if constexpr (kVectors > 1) {
      fill<kRows, kVectors - 1>();
    } else if constexpr (kRows > 1) {
      fill<kRows - 1, kTileVectors>();
    }
  }
  constexpr Micros() : run{} { fill<kTileHeight, kTileVectors>(); }
};

template <class T, Along kAlong>
inline constexpr Micros<T, kAlong> kMicros{};

// The product for any number of rows and `width` columns (in whole vectors). Rows that have nothing to add keep what
// they have.
template <class T, Along kAlong>
HWY_NOINLINE void accumulate(Packed<T> a, Packed<T> b, Packed<T> c, const T* keep, const int32_t* first,
                             const int32_t* end, int64_t rows, int64_t width, Ahead& ahead) {
  const int64_t vectors = width / kLanes<T>, tiles = (vectors + kTileVectors - 1) / kTileVectors;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = vectors * tile / tiles, count = vectors * (tile + 1) / tiles - begin;
    const int64_t column = begin * kLanes<T>;
    for (int64_t i = 0; i < rows; i += kTileHeight) {
      const int64_t height = HWY_MIN(kTileHeight, rows - i);
      if (first[i] >= end[i + height - 1]) continue;
      kMicros<T, kAlong>.run[height - 1][count - 1]({a.data + (kAlong == Along::columns ? i * a.ld : i), a.ld,
                                                     b.data + column, b.ld, c.row(i) + column, c.ld, keep + i,
                                                     first + i, end + i, &ahead});
    }
  }
}

// scores[i][j] = <a_i, key j> for the keys that rows i see, and for some beside them: whole vectors.
template <class T>
HWY_NOINLINE void multiply_panels(Packed<T> a, int64_t width, const T* panels, int64_t panel_width, const Seen& seen,
                                  int64_t rows, int64_t keys, Packed<T> scores, Ahead& ahead) {
  int32_t from[kTileHeight], to[kTileHeight];
  for (int i = 0; i < kTileHeight; ++i) {
    from[i] = 0;
    to[i] = static_cast<int32_t>(width);
  }
  for (int64_t key = 0; key < keys; key += kPanel<T>, panels += panel_width * kPanel<T>) {
    for (int64_t i = 0; i < rows; i += kTileHeight) {
      const int64_t height = HWY_MIN(kTileHeight, rows - i);
      const int64_t begin = HWY_MAX(seen.first_key[i] - key, 0) / kLanes<T>;
      const int64_t end = (HWY_MIN(seen.end_key[i + height - 1] - key, kPanel<T>) + kLanes<T> - 1) / kLanes<T>;
      if (end <= begin) continue;
      const int64_t column = begin * kLanes<T>;
      kMicros<T, Along::columns>.run[height - 1][end - begin - 1]({a.row(i), a.ld, panels + column, kPanel<T>,
                                                                   scores.row(i) + key + column, scores.ld, nullptr,
                                                                   from, to, &ahead});
    }
  }
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
