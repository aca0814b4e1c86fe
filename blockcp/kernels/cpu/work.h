// What both drivers share: scratch memory, waiting for another thread, and where the rows of a tile lie.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "blockcp/base/memory.h"
#include "blockcp/base/range.h"
#include "blockcp/kernels/cpu/isa.h"
#include "blockcp/kernels/keys.h"

namespace blockcp::cpu {

// All scratch memory of a call in one piece, which lies on huge pages where it is large: products that miss
// translations of addresses lose up to a hundredth. Buffers are cut from it before it is there.
class Arena {
 public:
  int64_t reserve(int64_t bytes) { return std::exchange(bytes_, bytes_ + aligned(bytes)); }
  void allocate() { memory_ = Memory(bytes_); }
  std::byte* at(int64_t offset) const { return memory_.data() + offset; }

 private:
  int64_t bytes_ = 0;
  Memory memory_;
};

// Numbers or elements in an arena, aligned, without contents.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Arena& arena, int64_t count)
      : arena_(&arena), offset_(arena.reserve(count * static_cast<int64_t>(sizeof(T)))) {}
  T* get() const { return reinterpret_cast<T*>(arena_->at(offset_)); }

 private:
  const Arena* arena_ = nullptr;
  int64_t offset_ = 0;
};

// Elements that hold `width` terms, in whole vectors.
template <class E>
int64_t elements_in(int64_t width, const Isa<E>& isa) {
  return round_up(divide_up(width, kTerms<E>), isa.lanes);
}

// Packed rows in an arena. An odd number of cache lines from row to row keeps long strides from meeting in
// a few sets of the cache.
template <class T>
class PackedBuffer {
 public:
  PackedBuffer() = default;
  PackedBuffer(Arena& arena, int64_t rows, int64_t width) : ld_(leading(width)), buffer_(arena, rows * ld_) {}
  operator Packed<T>() const { return {buffer_.get(), ld_}; }
  T* row(int64_t i) const { return buffer_.get() + i * ld_; }

  static int64_t leading(int64_t width) {
    constexpr int64_t kLine = kAlignment / sizeof(T);
    const int64_t lines = divide_up(width, kLine);
    return (lines > 4 ? lines | 1 : lines) * kLine;
  }

 private:
  int64_t ld_ = 0;
  Buffer<T> buffer_;
};

// Waits for what another thread is at.
template <class Ready>
void wait_until(Ready ready) {
  while (!ready()) std::this_thread::yield();
}

inline Strided at(DType type, const Rows& rows, int64_t row, int64_t head, int64_t step) {
  auto* data = static_cast<char*>(rows.data) + size_of(type) * (row * rows.row + head * rows.head);
  return {type, data, step, rows.col};
}

// Rows [begin, begin + count) of a block and KV head, counted with the query heads of the group interleaved.
struct TileRows {
  int64_t begin, count;
  int64_t group, first_head;

  int64_t row(int64_t r) const { return (begin + r) / group; }
  int64_t head(int64_t r) const { return first_head + (begin + r) % group; }

  // f(r, query row, head), without a division for each.
  template <class F>
  void each(F f) const {
    int64_t query = row(0), h = begin % group;
    for (int64_t r = 0; r < count; ++r) {
      f(r, query, first_head + h);
      if (++h == group) {
        h = 0;
        ++query;
      }
    }
  }

  // f(r, count, strided) for runs of tile rows with one stride: the heads of one query row, or, with one head, all.
  template <class F>
  void each_run(DType type, const Rows& rows, F f) const {
    for (int64_t r = 0; r < count;) {
      const int64_t run = group == 1 ? count : std::min(count - r, group - (begin + r) % group);
      f(r, run, at(type, rows, row(r), head(r), group == 1 ? rows.row : rows.head));
      r += run;
    }
  }
};

template <class T>
Packed<T> below(Packed<T> rows, int64_t r) {
  return {rows.row(r), rows.ld};
}

template <class E>
void pack_tile(const Isa<E>& isa, const TileRows& tile, DType type, const Rows& rows, int64_t width, Sum<E> factor,
               Packed<E> dst) {
  tile.each_run(type, rows, [&](int64_t r, int64_t count, const Strided& src) {
    isa.pack(src, count, width, factor, below(dst, r));
  });
}

template <class E>
void unpack_tile(const Isa<E>& isa, const TileRows& tile, Packed<Sum<E>> src, const Sum<E>* factor, int64_t width,
                 DType type, const Rows& rows) {
  tile.each_run(type, rows, [&](int64_t r, int64_t count, const Strided& dst) {
    isa.unpack(below(src, r), factor + r, count, width, dst);
  });
}

// The memory of a tile's rows in a tensor, to be fetched ahead of use.
inline void append_spans(const TileRows& tile, DType type, const Rows& rows, int64_t width,
                         std::vector<Ahead::Span>& spans) {
  if (rows.col != 1) return;
  tile.each_run(type, rows, [&](int64_t, int64_t count, const Strided& run) {
    const auto* data = static_cast<const char*>(run.data);
    for (int64_t i = 0; i < count; ++i) spans.push_back({data + i * run.row * size_of(type), width * size_of(type)});
  });
}

// One number per row and head: lse, delta.
template <class T>
T& number(const Rows& rows, int64_t row, int64_t head) {
  return static_cast<T*>(rows.data)[row * rows.row + head * rows.head];
}

// The key grid of a document: blocks of `size` positions from position 0 on, here those that hold a key of this block.
class KeyGrid {
 public:
  KeyGrid(const AttentionBlock& block, int64_t size) : block_(&block), view_(block), size_(size) {}

  const KeyView& keys() const { return view_; }
  int64_t first() const { return block_->k_pos / size_; }
  int64_t count() const { return view_.size() == 0 ? 0 : (block_->k_pos + view_.size() - 1) / size_ - first() + 1; }

  // Keys that a query row sees, as positions in the document.
  Range seen(int64_t row) const {
    const Range seen = view_.seen(row);
    return {seen.begin + block_->k_pos, seen.end + block_->k_pos};
  }
  // Keys at hand in grid block `index` (from first() on), as positions in the document.
  Range held(int64_t index) const {
    return intersect(Range{index * size_, (index + 1) * size_}, {block_->k_pos, block_->k_pos + view_.size()});
  }

  // f(r, rows of k or v, row, count) for the runs of held keys; r counts from the start of the grid block.
  template <class F>
  void each_run(int64_t index, F f) const {
    const Range range = held(index);
    for (int64_t p = range.begin; p < range.end;) {
      const auto [piece, row] = view_.locate(p - block_->k_pos);
      const int64_t count = std::min(piece->count - row, range.end - p);
      f(p - index * size_, *piece, row, count);
      p += count;
    }
  }

 private:
  const AttentionBlock* block_;
  KeyView view_;
  int64_t size_;
};

// Keys or values of one grid block as packed rows; rows around them, to whole vectors, become zero. Returns the rows
// that are then filled.
template <class E>
Range pack_keys(const Isa<E>& isa, const KeyGrid& grid, int64_t index, int64_t size, DType type, Rows KeyRows::*which,
                int64_t head, int64_t width, Sum<E> factor, Packed<E> dst) {
  const Range held = grid.held(index);
  const int64_t begin = held.begin - index * size, end = held.end - index * size;
  const Range filled{begin / isa.lanes * isa.lanes, round_up(end, isa.lanes)};
  const int64_t zeros = elements_in(width, isa);
  for (int64_t i = filled.begin; i < begin; ++i) std::fill_n(dst.row(i), zeros, E{});
  for (int64_t i = end; i < filled.end; ++i) std::fill_n(dst.row(i), zeros, E{});
  grid.each_run(index, [&](int64_t r, const KeyRows& piece, int64_t row, int64_t count) {
    const Rows& rows = piece.*which;
    isa.pack(at(type, rows, row, head, rows.row), count, width, factor, below(dst, r));
  });
  return filled;
}

// Panels of the filled rows, in their place among all panels of the block.
template <class E>
void make_panels(const Isa<E>& isa, Packed<E> rows, Range filled, int64_t depth, E* panels) {
  const int64_t begin = filled.begin / isa.panel * isa.panel;
  // From a panel's start on, so that whole panels are addressed; what lies before `filled` in it is never looked at.
  isa.make_panels(below(rows, begin), filled.end - begin, depth, panels + begin * depth);
}

// Packed rows as a product over rows wants them: kTerms<E> of them in one.
template <class E>
void pair_rows(const Isa<E>& isa, Packed<E> rows, Range filled, int64_t width, Packed<E> dst) {
  isa.pair_rows(below(rows, filled.begin), filled.size(), width, below(dst, filled.begin / kTerms<E>));
}

// The memory of the keys or values of one grid block, to be fetched ahead of use.
inline void append_spans(const KeyGrid& grid, int64_t index, DType type, Rows KeyRows::*which, int64_t head,
                         int64_t width, std::vector<Ahead::Span>& spans) {
  grid.each_run(index, [&](int64_t, const KeyRows& piece, int64_t row, int64_t count) {
    const Rows& rows = piece.*which;
    const auto* data = static_cast<const char*>(at(type, rows, row, head, 0).data);
    if (rows.col != 1) return;
    for (int64_t i = 0; i < count; ++i) spans.push_back({data + i * rows.row * size_of(type), width * size_of(type)});
  });
}

}  // namespace blockcp::cpu
