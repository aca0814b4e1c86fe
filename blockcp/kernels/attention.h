// The contract of an attention kernel: rectangles of attention inside documents, by pointers and strides.
//
// For each query row i of a block and each of its heads, over the keys j that the band lets it see,
//   s_j = scale <q_i, k_j>     lse_i = log sum_j exp(s_j)     out_i = sum_j exp(s_j - lse_i) v_j
// and from dout, with the lse and delta_i = <out_i, dout_i> of the whole row (all its keys, whatever this block holds)
//   p_j = exp(s_j - lse_i)     ds_j = p_j (<dout_i, v_j> - delta_i)
//   dq_i += scale sum_j ds_j k_j      dk_j += scale sum_i ds_j q_i      dv_j += sum_i p_j dout_i
// Query head h reads KV head h / (q_heads / kv_heads); dk and dv are summed over the query heads of their KV head.
//
// A row that sees no key gets out = 0, lse = -inf and adds nothing. Rows that a query does not see are never read into
// it, not even multiplied by zero: NaN there stays there. Sums are fp32 (fp64 for fp64).
//
// Same bits: with merge off and all_keys on, out, lse and dq of a row depend on its keys, their positions in the
// document and the instruction set alone; not on threads, on how keys are cut into pieces, on k_pos, on other rows or
// on strides.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "blockcp/base/band.h"
#include "blockcp/base/dtype.h"
#include "blockcp/base/machine.h"
#include "blockcp/base/parallel.h"

namespace blockcp {

struct AttentionShape {
  DType dtype = DType::f32;
  int64_t q_heads = 1, kv_heads = 1;    // kv_heads divides q_heads
  int64_t head_dim = 1, value_dim = 1;  // widths of q and k, of v and out; any number from 1 on

  int64_t group() const { return q_heads / kv_heads; }
  friend bool operator==(const AttentionShape&, const AttentionShape&) = default;
};

// Rows of one tensor: element (row i, head h, column c) is at data + i row + h head + c col, counted in elements. Any
// strides, 0 and negative included; no alignment beyond the element's own.
struct Rows {
  void* data = nullptr;
  int64_t row = 0, head = 0, col = 1;
};

// Keys side by side, with their values and, in backward, their gradients.
struct KeyRows {
  int64_t count = 0;
  Rows k, v;    // storage type
  Rows dk, dv;  // as BackwardArgs says
};

struct AttentionBlock {
  int64_t q_count = 0;
  int64_t q_pos = 0;          // position of the first query in the document; may be negative
  std::vector<KeyRows> keys;  // ascending, contiguous in the document from k_pos on
  int64_t k_pos = 0;
  const Band* band = nullptr;  // clipped to the keys at hand

  Rows q;    // storage type
  Rows out;  // storage type; accumulator type under merge
  Rows lse;  // accumulator type, col unused

  Rows dout;   // storage type
  Rows delta;  // accumulator type, col unused
  Rows dq;     // as BackwardArgs says
};

struct ForwardArgs {
  AttentionShape shape;
  double scale = 1;
  std::span<const AttentionBlock> blocks;
  // off: out and lse are written. on: out (accumulator type) and lse hold a result over other keys, or the identity
  // (0, -inf), and this block's is merged into it.
  bool merge = false;
  Parallel* parallel = nullptr;
};

struct BackwardArgs {
  AttentionShape shape;
  double scale = 1;
  std::span<const AttentionBlock> blocks;
  Parallel* parallel = nullptr;
  // Every block has all keys that its queries see: dq is written (storage type), and delta is memory that the kernel
  // may use, for it computes it from out and dout. Otherwise dq is added to (accumulator type), and delta is given.
  bool all_keys = false;
  // Every block has all queries that see its keys, and shares no key with another: dk and dv are written (storage
  // type). Otherwise they are added to (accumulator type).
  bool all_queries = false;
};

struct Kernel {
  const char* name;  // "reference", "cpu_avx512"; appears in plans, errors and benches
  // Empty if this kernel can run the shape on this machine, otherwise one clause that says what stops it.
  std::string (*why_not)(const AttentionShape& shape, const Machine& machine);
  // Blocks of one call may share key rows, but no two of them share a query row.
  void (*forward)(const ForwardArgs& args);
  void (*backward)(const BackwardArgs& args);
};

// delta = <out, dout> per row and head of blocks[i], from their out (storage type) and dout. In kernels/partial.
void compute_delta(const AttentionShape& shape, std::span<const AttentionBlock> blocks, Parallel& parallel);

}  // namespace blockcp
