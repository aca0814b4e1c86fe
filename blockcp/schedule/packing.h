// Many documents lie end to end in one sequence: which rows belong together, and which are padding.
//
//   ids  1 1 1 2 2 0 0 7      documents [0,3) [3,5) [7,8), rows 5 and 6 are padding
//
// A batch has `batch` such sequences of equal length `rows`; documents never cross from one to the next.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "blockcp/base/range.h"

namespace blockcp {

struct Document {
  int64_t batch;  // which sequence of the batch
  Range rows;     // within that sequence
  friend bool operator==(const Document&, const Document&) = default;
};

class Packing {
 public:
  Packing() = default;

  // One id per row, [batch, rows], 0 = padding. Ids are labels: equal neighbours are one document, order and size
  // mean nothing. Throws Error(argument) for a negative id and for an id that comes back after another id or after
  // padding, naming the row and the values.
  static Packing from_ids(std::span<const int64_t> ids, int64_t batch, int64_t rows);

  // Lengths of the documents of each sequence, in order from row 0; what is left up to `rows` is padding. A length of
  // 0 is dropped. rows < 0: the longest sequence's sum. Throws for negative lengths and for sums beyond `rows`.
  static Packing from_lengths(const std::vector<std::vector<int64_t>>& lengths, int64_t rows = -1);

  // Cumulative lengths 0 <= ... of one sequence; equal neighbours are a document of no rows, which is dropped.
  // Throws unless they start at 0 and never decrease.
  static Packing from_cu_seqlens(std::span<const int64_t> cu_seqlens, int64_t rows = -1);

  // One position per row, [batch, rows]: a document starts wherever a position is not its left neighbour's plus one.
  // `padding` (empty, or one byte a row, non-zero = padding) is needed where there is padding. Throws for negative
  // positions.
  static Packing from_positions(std::span<const int64_t> positions, std::span<const uint8_t> padding, int64_t batch,
                                int64_t rows);

  // The same documents in sequences of `rows` rows, padding at the end. Throws if `rows` is less than today's.
  Packing padded(int64_t rows) const;

  int64_t batch() const { return batch_; }
  int64_t rows() const { return rows_; }
  // Ascending by (batch, row), none empty.
  const std::vector<Document>& documents() const { return documents_; }
  int64_t real_rows() const;  // rows that are not padding, over the whole batch

  // Indices [first, last) into documents() of those that share a row with `range` of sequence `batch`.
  std::pair<size_t, size_t> overlapping(int64_t batch, Range range) const;

  uint64_t fingerprint() const;
  friend bool operator==(const Packing&, const Packing&) = default;

 private:
  Packing(int64_t batch, int64_t rows, std::vector<Document> documents)
      : batch_(batch), rows_(rows), documents_(std::move(documents)) {}

  int64_t batch_ = 0, rows_ = 0;
  std::vector<Document> documents_;
};

}  // namespace blockcp
