// What one instruction set brings: the inner parts of the CPU kernel, on packed memory of one thread.
//
// The drivers (forward.cpp, backward.cpp) know blocks, threads and order, and are compiled once for any machine. The
// functions behind this table (the -inl.h files) know tiles and vectors, and are compiled once per instruction set.
//
// Query heads that share a KV head are interleaved: tile row r stands for query row r / group and head r % group of
// that KV head. So grouped heads are no case of their own, and a tile follows the diagonal closely.
#pragma once

#include <cstdint>

#include "blockcp/kernels/attention.h"
#include "blockcp/kernels/cpu/ahead.h"

namespace blockcp::cpu {

inline constexpr int kTileHeight = 6;  // rows of the register tile

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

// Sizes that stay the same through a call. All are counted in elements.
struct Sizes {
  int64_t head_dim, value_dim;     // as in the shape
  int64_t key_width, value_width;  // the same, in whole vectors
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

// One query tile on its way through the key blocks, forward.
template <class T>
struct ForwardTile {
  int64_t rows = 0;
  Packed<T> q;        // times scale log2(e)
  Packed<T> weights;  // [rows, key block]: scores, then exp2(score - top)
  Packed<T> out;      // sum of weights times v
  T* top = nullptr;   // largest score so far, base 2
  T* sum = nullptr;   // of the weights
  T* keep = nullptr;  // what the last key block left of out
  Ahead ahead;
};

// One query tile against one key block, backward.
template <class T>
struct BackwardTile {
  int64_t rows = 0;
  Packed<T> q;  // times scale log2(e), so that scores have forward's very bits
  Packed<T> dout;
  Packed<T> p, ds;  // [rows, key block]
  const T* lse;     // base 2
  const T* delta;
  const T* through;  // 1, or 0 for a row that sees a single key
  Ahead* ahead;
};

template <class T>
struct BackwardKeys {
  int64_t count = 0;  // from the start of the block on; the first of them may be none of the block's
  Packed<T> k;        // [key block, head_dim], times scale
  const T *k_panels, *v_panels;
  Packed<T> dk;   // sum over the tiles of the block, times log2(e)
  Packed<T> dv;   // sum over the tiles of the block
  const T* ones;  // as many as rows or keys
};

template <class T>
struct Isa {
  int lanes;  // of a vector
  int panel;  // keys of a panel

  // dst row i = src row i times factor, as T.
  void (*pack)(const Strided& src, int64_t count, int64_t width, T factor, Packed<T> dst);
  // dst row i = src row i times factor[i], rounded to the type of dst.
  void (*unpack)(Packed<T> src, const T* factor, int64_t count, int64_t width, const Strided& dst);
  // dst += src
  void (*add)(Packed<T> src, int64_t count, int64_t width, const Strided& dst);
  // Panel j holds the keys [j panel, (j + 1) panel) as [width][panel]. Both counts are in whole vectors.
  void (*make_panels)(Packed<T> rows, int64_t count, int64_t width, T* panels);

  void (*forward)(const Sizes& sizes, const Seen& seen, const T* k_panels, Packed<T> v, ForwardTile<T>& tile);
  // p, ds, then dk and dv, all but dq.
  void (*backward)(const Sizes& sizes, const Seen& seen, const BackwardKeys<T>& keys, const BackwardTile<T>& tile);
  // dq += ds k
  void (*backward_dq)(const Sizes& sizes, const Seen& seen, const BackwardKeys<T>& keys, const BackwardTile<T>& tile,
                      Packed<T> dq);
};

// Null where this build has no code for the instruction set.
template <class T>
struct IsaTable {
  const Isa<T>* baseline;
  const Isa<T>* avx2;
  const Isa<T>* avx512;
};

const IsaTable<float>& isas(float);
const IsaTable<double>& isas(double);

}  // namespace blockcp::cpu
