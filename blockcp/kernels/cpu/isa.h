// What one instruction set brings: the inner parts of the CPU kernel, on packed memory of one thread.
//
// The drivers (forward.cpp, backward.cpp) know blocks, threads and order, and are compiled once for any machine. The
// functions behind this table (the -inl.h files) know tiles and vectors, and are compiled once per instruction set.
//
// Packed memory holds elements of type E, one per lane of a vector: float, double, or Pair, where the processor has dot
// products of bf16. Terms of a sum lie along an element, so a matrix of Pairs has half the rows or half the columns,
// whichever the product runs over; but for that, all three are one code. Sums, scores and weights are of type Sum<E>.
//
// Query heads that share a KV head are interleaved: tile row r stands for query row r / group and head r % group of
// that KV head. So grouped heads are no case of their own, and a tile follows the diagonal closely.
#pragma once

#include <cstdint>
#include <limits>

#include "blockcp/kernels/attention.h"
#include "blockcp/kernels/cpu/ahead.h"

namespace blockcp::cpu {

inline constexpr int kTileHeight = 6;  // rows of the register tile

// Two bf16 that are neighbours in a sum: c += a.low b.low + a.high b.high, in fp32. So a matrix m has two forms:
//
//   for sums along rows  row r:      m(r, 0) m(r, 1)     | m(r, 2) m(r, 3)     | ...   q, dout, weights, ds_rows
//   for sums over rows   row r / 2:  m(r, 0) m(r + 1, 0) | m(r, 1) m(r + 1, 1) | ...   *_terms, p, ds
//
// Panels are the first form turned: [pair of columns][key].
struct Pair {
  uint16_t low, high;
};

template <class E>
struct SumOf {
  using type = E;
};
template <>
struct SumOf<Pair> {
  using type = float;
};
template <class E>
using Sum = typename SumOf<E>::type;

// Terms of a sum in one element.
template <class E>
inline constexpr int kTerms = 1;
template <>
inline constexpr int kTerms<Pair> = 2;

// Rows of `width` elements in packed memory: `ld` elements apart, 64-byte aligned, zero between width and the next
// whole vector.
template <class T>
struct Packed {
  T* data = nullptr;
  int64_t ld = 0;

  T* row(int64_t i) const { return data + i * ld; }
};

// Elements somewhere in a caller's tensor: (i, c) at data + i row + c col.
struct Strided {
  DType type;
  void* data;
  int64_t row, col;
};

// Sizes that stay the same through a call.
struct Sizes {
  int64_t head_dim, value_dim;     // as in the shape
  int64_t key_width, value_width;  // the same in whole vectors: columns of sums
  int64_t key_depth, value_depth;  // the same in whole vectors of elements: rows that a product runs along
  int64_t key_block;  // keys that are worked on together, counted from position 0 of the document; whole panels
  int64_t tile_rows;  // of a query tile, at most
};

// Which keys of one key block each row of a tile sees, and which rows see each key. All four never decrease.
struct Seen {
  const int32_t* first_key;  // [tile rows]
  const int32_t* end_key;
  const int32_t* first_row;  // [key block]; backward
  const int32_t* end_row;
};

inline constexpr double kLog2E = 1.4426950408889634;

// Where the scale goes, and log2(e), for scores are base 2. Floating-point operands take them as they are packed, which
// costs nothing in the products; bf16 operands stay as they are, so that nothing is rounded twice.
template <class E>
struct Factors {
  Sum<E> q, k;           // operands, k only that of dq += ds k
  Sum<E> score, ds, dk;  // results

  static Factors of(double scale) {
    const auto sum = [](double x) { return static_cast<Sum<E>>(x); };
    if constexpr (kTerms<E> == 1) return {sum(scale * kLog2E), sum(scale), 1, 1, sum(1 / kLog2E)};
    // Hidden scores are infinite before the factor as after it, so it must not be 0.
    const Sum<E> score = sum(scale * kLog2E), least = std::numeric_limits<Sum<E>>::min();
    return {1, 1, score == 0 ? least : score, sum(scale), 1};
  }
};

// One query tile on its way through the key blocks, forward.
template <class E>
struct ForwardTile {
  int64_t rows;
  Packed<E> q;
  Packed<Sum<E>> weights;  // [rows, key block]: <q, k>, then, as E, exp2(score - base)
  Packed<Sum<E>> out;      // sum of weights times v
  Packed<Sum<E>> sums;     // of the weights of a key block, lane by lane
  Sum<E> score_factor;
  Sum<E>* base;  // the score that weights are relative to, base 2; -inf before the first
  Sum<E>* sum;   // of the weights
  Sum<E>* keep;  // what the last key block left of out
  Ahead* ahead;
};

// One query tile against one key block, backward. Products run along rows of q, dout and ds_rows, and over the rows of
// q_terms, dout_terms, p and ds, which hold kTerms<E> rows each; with one they are the same memory.
template <class E>
struct BackwardTile {
  int64_t rows;
  Packed<E> q, dout;
  Packed<E> q_terms, dout_terms;
  Packed<Sum<E>> p, ds;  // [rows, key block]: in the end as E, in the first of kTerms<E> rows
  Packed<E> ds_rows;
  Sum<E> score_factor;
  const Sum<E>* lse;        // base 2
  const Sum<E>* ds_factor;  // 0 for a row that sees a single key
  const Sum<E>* delta;      // times that factor
  Ahead* ahead;
};

template <class E>
struct BackwardKeys {
  int64_t count = 0;  // from the start of the block on; the first of them may be none of the block's
  Packed<E> k_terms;  // [key block / kTerms<E>, head_dim]
  const E *k_panels, *v_panels;
  Packed<Sum<E>> dk, dv;  // sums over the tiles of the block
};

template <class E>
struct Isa {
  using T = Sum<E>;

  int lanes;  // of a vector
  int panel;  // keys of a panel

  // dst row i = src row i times factor. Pairs take bf16 alone, as it is.
  void (*pack)(const Strided& src, int64_t count, int64_t width, T factor, Packed<E> dst);
  // The same for sums.
  void (*pack_sums)(const Strided& src, int64_t count, int64_t width, T factor, Packed<T> dst);
  // dst row i = src row i times factor[i], rounded to the type of dst.
  void (*unpack)(Packed<T> src, const T* factor, int64_t count, int64_t width, const Strided& dst);
  // results[i] = <a row i, b row i>
  void (*dot_rows)(Packed<T> a, Packed<T> b, int64_t count, int64_t width, T* results);
  // dst += src
  void (*add)(Packed<T> src, int64_t count, int64_t width, const Strided& dst);
  // Panel j holds the keys [j panel, (j + 1) panel) as [depth][panel]. Both counts are in whole vectors.
  void (*make_panels)(Packed<E> rows, int64_t count, int64_t depth, E* panels);
  // Pairs along rows become pairs of rows: dst row i holds src rows 2 i and 2 i + 1. Null where an element is one term.
  void (*pair_rows)(Packed<E> rows, int64_t count, int64_t width, Packed<E> dst);

  void (*forward)(const Sizes& sizes, const Seen& seen, const E* k_panels, Packed<E> v_terms,
                  const ForwardTile<E>& tile);
  // p, ds, then dk and dv, all but dq.
  void (*backward)(const Sizes& sizes, const Seen& seen, const BackwardKeys<E>& keys, const BackwardTile<E>& tile);
  // dq += ds k
  void (*backward_dq)(const Sizes& sizes, const Seen& seen, const BackwardKeys<E>& keys, const BackwardTile<E>& tile,
                      Packed<T> dq);
};

// Null where this build has no code for the instruction set.
template <class E>
struct IsaTable {
  const Isa<E>* baseline;
  const Isa<E>* avx2;
  const Isa<E>* avx512;
};

const IsaTable<float>& isas(float);
const IsaTable<double>& isas(double);
const Isa<Pair>* avx512_bf16();

}  // namespace blockcp::cpu
