// The algorithm as data: what one rank sends, receives and computes for one mask on one path, forward and backward.
//
// A schedule counts rows. It knows no heads, widths or element types, so one serves layers of different shapes; bytes
// come from rows and a shape. It is a pure function of packing, layout and mask, so every rank can build every rank's
// schedule, and ranks never exchange any.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "blockcp/base/band.h"

namespace blockcp {

// How K and V are delivered.
//   allgather   every row to every rank
//   halo        the needed suffix of each rank to its right neighbour
//   a2a         exactly the rows each rank needs, from wherever they are
//   ring        neighbour to neighbour, hop by hop, in memory that does not grow with the world
enum class Path : uint8_t { allgather, halo, a2a, ring };
inline constexpr std::array<Path, 4> kPaths = {Path::allgather, Path::halo, Path::a2a, Path::ring};
std::string_view name(Path path);
Path parse_path(std::string_view text);  // throws Error(argument) listing the names

// What rows of a buffer are. out stands for (out, lse), dout for (dout, lse, delta).
enum class Role : uint8_t { q, kv, out, dout, dq, dkv };

// The caller's tensors come first and have fixed numbers; scratch buffers follow, kv (storage type) or dkv (accumulator
// type), each with the whole row of all KV heads: K then V.
using BufferId = int32_t;
inline constexpr BufferId kQ = 0, kKv = 1, kOut = 2, kDout = 3, kDq = 4, kDkv = 5, kFirstScratch = 6;

struct Buffer {
  Role role;
  int64_t rows;  // flattened over (batch, local row) for the caller's
  bool callers;
  friend bool operator==(const Buffer&, const Buffer&) = default;
};

// Rows side by side in a buffer. In the caller's buffers a piece lies inside one sequence of the batch.
struct Piece {
  BufferId buffer;
  int64_t row, count;
  friend bool operator==(const Piece&, const Piece&) = default;
};

struct Move {
  int peer;  // never the rank itself
  std::vector<Piece> rows;
};

// copy: rows arrive as they were sent. add: they are summed onto what is there, in the accumulator type, by ascending
// peer, after the step's blocks.
enum class Combine : uint8_t { copy, add };

// One exchange among all ranks: every rank has it in the same place of its schedule, perhaps with nothing to move.
// Moves are ascending by peer. The received rows of a copy lie back to back in one scratch buffer from row 0 on, in the
// order of the moves, so that they can be received in place.
struct Transfer {
  Role role;  // kv or dkv
  Combine combine;
  std::vector<Move> send, recv;
};

// A rectangle of attention inside one document. Keys are pieces in ascending order, contiguous in the document.
struct Block {
  Piece q;        // rows of kQ; the rows of out, dout, lse and delta are the same ones
  int64_t q_pos;  // position of the first query in the document; may be negative (such rows see nothing)
  std::vector<Piece> k;
  int64_t k_pos;
  int32_t band;            // index into Schedule::bands
  Piece out, dq;           // forward; backward
  std::vector<Piece> dkv;  // backward: where the gradients of `k` are summed, piece by piece beside it
};

// Clear, post the starts, run the blocks, wait, sum what was to be added.
struct Step {
  std::vector<BufferId> clear;  // accumulators that begin at zero here
  std::vector<Transfer> starts;
  std::vector<Block> blocks;
};

// What a plan is made from, part by part: equal on all ranks that mean the same, and short enough to be compared in
// each call.
struct Origin {
  uint64_t documents = 0, layout = 0, spans = 0;  // fingerprints; 0 where there are no spans
  std::string mask;                               // in words, as text() has it
  friend bool operator==(const Origin&, const Origin&) = default;
};

struct Schedule {
  int rank = 0, world = 1;
  Path path = Path::allgather;
  Origin origin;
  std::vector<Buffer> buffers;
  std::vector<Band> bands;
  std::vector<Piece> idle;  // rows of kQ that see no key: padding
  bool partial = false;     // some row's keys come in several blocks, so that results are merged
  std::vector<Step> forward, backward;
};

// The transposed movement: K/V that came from a peer go back to it as gradients, which are added where the rows came
// from. `to` maps a kv buffer to the dkv buffer beside it.
Transfer adjoint(const Transfer& transfer, const std::vector<BufferId>& to);

int64_t rows(const Move& move);
// Rows that a list of steps sends and receives on this rank, one role at a time.
int64_t rows_sent(const std::vector<Step>& steps, Role role);
int64_t rows_received(const std::vector<Step>& steps, Role role);

}  // namespace blockcp
