// What the schedules of all paths share: the rank's queries, where rows lie in buffers, and the blocks that follow.
#pragma once

#include <vector>

#include "blockcp/schedule/fill.h"

namespace blockcp {

// Rows of one document that a rank holds as queries; `rows` in positions of the document.
struct Query {
  size_t document;
  Range rows;
  Piece q;
};

// Queries of `rank`, in local order.
std::vector<Query> queries_of(const Problem& problem, int rank);

// Where rows of the sequences lie in buffers.
class Places {
 public:
  void add(int64_t batch, Range rows, BufferId buffer, int64_t row);
  // All that was added, ascending by (batch, row); call once before pieces().
  void sort();
  // The pieces that hold rows `range` of a sequence, in row order. Every row must be there.
  std::vector<Piece> pieces(int64_t batch, Range range) const;

 private:
  struct Place {
    int64_t batch;
    Range rows;
    BufferId buffer;
    int64_t row;
  };
  std::vector<Place> places_;
};

class Frame {
 public:
  Frame(const Problem& problem, Path path, int rank);

  const Problem& problem;
  int rank;
  std::vector<Query> queries;
  Places own;  // the rank's own rows, in kKv
  Schedule schedule;

  BufferId add_buffer(Role role, int64_t rows);

  // A block of `query` rows over keys `keys` (positions of the document), which lie at `places`; queries that see none
  // of them are cut off. `gradients` maps a kv buffer to its dkv buffer.
  Block block(const Query& query, Range keys, const Places& places, const std::vector<BufferId>& gradients) const;

 private:
  void append_idle(int64_t begin, int64_t end);
  std::vector<std::pair<size_t, int32_t>> band_of_;  // documents with a band of their own, ascending
};

// Appends a piece; joins it to the last one where they touch in a scratch buffer.
void append(std::vector<Piece>& pieces, Piece piece);
// The move of `peer`, added in ascending order of peers where it is not there yet.
Move& move_of(std::vector<Move>& moves, int peer);

}  // namespace blockcp
