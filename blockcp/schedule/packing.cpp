#include "blockcp/schedule/packing.h"

#include <algorithm>

#include "blockcp/base/error.h"
#include "blockcp/base/hash.h"
#include "blockcp/base/text.h"
#include "blockcp/schedule/runs.h"

namespace blockcp {
namespace {

// Bands keep positions of a document in 32 bits.
constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;

void check_size(size_t seen, int64_t batch, int64_t rows, const char* what) {
  check_argument(batch >= 0 && rows >= 0, "[plan] batch and rows must not be negative, but they are {} and {}.", batch,
                 rows);
  check_argument(rows <= kMostRows, "[plan] a sequence must have fewer than 2^31 rows, but it has {}.", rows);
  check_argument(static_cast<int64_t>(seen) == batch * rows,
                 "[plan] {} must have one entry a row, but there are {} for {} x {} rows.", what, seen, batch, rows);
}

}  // namespace

Packing Packing::from_ids(std::span<const int64_t> ids, int64_t batch, int64_t rows) {
  check_size(ids.size(), batch, rows, "document ids");
  std::vector<Document> documents;
  for (int64_t b = 0; b < batch; ++b) {
    for (const Range& run : id_runs(ids.subspan(b * rows, rows), b, "plan", "document")) documents.push_back({b, run});
  }
  return {batch, rows, std::move(documents)};
}

Packing Packing::from_lengths(const std::vector<std::vector<int64_t>>& lengths, int64_t rows) {
  check_argument(rows <= kMostRows, "[plan] a sequence must have fewer than 2^31 rows, but rows = {}.", rows);
  std::vector<Document> documents;
  int64_t longest = 0;
  for (size_t b = 0; b < lengths.size(); ++b) {
    int64_t row = 0;
    for (size_t i = 0; i < lengths[b].size(); ++i) {
      const int64_t length = lengths[b][i];
      check_argument(length >= 0,
                     "[plan] document lengths must not be negative, but lengths[{}] of sequence {} is {} ({}). Check "
                     "the collator.",
                     i, b, length, counted(std::ssize(lengths[b]), "document"));
      check_argument(length <= kMostRows - row,
                     "[plan] a sequence must have fewer than 2^31 rows, but lengths[{}] of sequence {} is {} after {}.",
                     i, b, length, counted(row, "row"));
      if (length > 0) documents.push_back({static_cast<int64_t>(b), {row, row + length}});
      row += length;
    }
    check_argument(
        rows < 0 || row <= rows,
        "[plan] document lengths must fit into the sequence, but those of sequence {} sum to {} and rows = {}.", b, row,
        rows);
    longest = std::max(longest, row);
  }
  return {static_cast<int64_t>(lengths.size()), rows < 0 ? longest : rows, std::move(documents)};
}

Packing Packing::from_cu_seqlens(std::span<const int64_t> cu_seqlens, int64_t rows) {
  check_argument(!cu_seqlens.empty() && cu_seqlens[0] == 0, "[plan] cu_seqlens must start at 0, but {}.",
                 cu_seqlens.empty() ? "it is empty" : fmt::format("cu_seqlens[0] = {}", cu_seqlens[0]));
  check_argument(rows < 0 || cu_seqlens.back() <= rows,
                 "[plan] cu_seqlens must end inside the sequence, but the last is {} and rows = {}.", cu_seqlens.back(),
                 rows);
  std::vector<int64_t> lengths;
  for (size_t i = 1; i < cu_seqlens.size(); ++i) {
    check_argument(cu_seqlens[i] <= kMostRows,
                   "[plan] a sequence must have fewer than 2^31 rows, but cu_seqlens[{}] = {}.", i, cu_seqlens[i]);
    check_argument(cu_seqlens[i] >= cu_seqlens[i - 1],
                   "[plan] cu_seqlens must not decrease, but cu_seqlens[{}] = {} follows {}.", i, cu_seqlens[i],
                   cu_seqlens[i - 1]);
    lengths.push_back(cu_seqlens[i] - cu_seqlens[i - 1]);
  }
  return from_lengths({lengths}, rows);
}

Packing Packing::from_positions(std::span<const int64_t> positions, std::span<const uint8_t> padding, int64_t batch,
                                int64_t rows) {
  check_size(positions.size(), batch, rows, "position ids");
  if (!padding.empty()) check_size(padding.size(), batch, rows, "the padding mask");
  std::vector<Document> documents;
  for (int64_t b = 0; b < batch; ++b) {
    bool open = false;  // the row above is real
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = b * rows + i;
      check_argument(positions[at] >= 0, "[plan] position ids must not be negative, but row {} of sequence {} has {}.",
                     i, b, positions[at]);
      const bool real = padding.empty() || padding[at] == 0;
      if (real && open && positions[at] - 1 == positions[at - 1]) {  // + 1 might overflow
        documents.back().rows.end = i + 1;
      } else if (real) {
        documents.push_back({b, {i, i + 1}});
      }
      open = real;
    }
  }
  return {batch, rows, std::move(documents)};
}

Packing Packing::padded(int64_t rows) const {
  check_argument(rows >= rows_, "[plan] padding can only add rows, but {} were to become {}.", counted(rows_, "row"),
                 rows);
  check_argument(rows <= kMostRows, "[plan] a sequence must have fewer than 2^31 rows, but padding makes {} of its {}.",
                 rows, rows_);
  return {batch_, rows, documents_};
}

int64_t Packing::real_rows() const {
  int64_t sum = 0;
  for (const Document& document : documents_) sum += document.rows.size();
  return sum;
}

std::pair<size_t, size_t> Packing::overlapping(int64_t batch, Range range) const {
  if (range.empty()) return {0, 0};
  const auto before = [&](const Document& d) {
    return d.batch < batch || (d.batch == batch && d.rows.end <= range.begin);
  };
  const auto upto = [&](const Document& d) {
    return d.batch < batch || (d.batch == batch && d.rows.begin < range.end);
  };
  const auto first = std::partition_point(documents_.begin(), documents_.end(), before);
  const auto last = std::partition_point(first, documents_.end(), upto);
  return {static_cast<size_t>(first - documents_.begin()), static_cast<size_t>(last - documents_.begin())};
}

uint64_t Packing::fingerprint() const {
  Hash hash;
  hash.add(batch_).add(rows_).add(documents_.size());
  for (const Document& d : documents_) hash.add(d.batch).add(d.rows.begin).add(d.rows.end);
  return hash.value();
}

}  // namespace blockcp
