// Forward: query tiles against the key blocks that they see, with a running softmax.
//
// The tiles of a block and KV head (a unit) share its packed keys. Each worker has a run of neighbouring units, so that
// packed keys and new results stay in the cache of one core; when it is through, it takes over units of others, and
// then tiles. Tiles that see the most keys come first, so that what is left at the end is small.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "blockcp/kernels/cpu/drivers.h"
#include "blockcp/kernels/cpu/work.h"
#include "blockcp/kernels/partial.h"

namespace blockcp::cpu {

namespace {

// All tiles of one block and KV head.
struct Unit {
  int32_t block, kv_head;
  int32_t tiles, tile_rows;
};

// A tile of a unit.
struct Tile {
  int32_t unit, index;
};

// Neighbouring units, which one worker takes from the first on, and others, when they have no more, from the last on.
class alignas(kAlignment) Queue {
 public:
  void fill(int32_t begin, int32_t end) { left_ = Run{begin, end}; }
  int32_t size() const {
    const Run left = left_.load(std::memory_order_relaxed);
    return left.end - left.begin;
  }

  std::optional<int32_t> take_first() {
    return take([](Run& left) { return left.begin++; });
  }
  std::optional<int32_t> take_last() {
    return take([](Run& left) { return --left.end; });
  }

 private:
  struct Run {
    int32_t begin, end;
  };

  template <class Cut>
  std::optional<int32_t> take(Cut cut) {
    Run left = left_.load(std::memory_order_relaxed);
    while (left.begin < left.end) {
      Run rest = left;
      const int32_t unit = cut(rest);
      if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) return unit;
    }
    return {};
  }

  std::atomic<Run> left_{Run{0, 0}};
};

// The unit that one worker has at present: its tiles, of which any worker takes the last that is left, and its packed
// key blocks.
template <class E>
class alignas(kAlignment) Slot {
 public:
  Slot(const Sizes& sizes, int64_t blocks, Arena& arena)
      : panel_size_(sizes.key_block * sizes.key_depth),
        value_rows_(sizes.key_block / kTerms<E>),
        value_ld_(PackedBuffer<E>::leading(sizes.value_width)),
        panels_(arena, blocks * panel_size_),
        values_(arena, blocks * value_rows_ * value_ld_),
        states_(static_cast<size_t>(blocks)) {}

  static int64_t bytes_of_block(const Sizes& sizes) {
    return sizes.key_block *
           (sizes.key_depth + PackedBuffer<E>::leading(sizes.value_width) / kTerms<E>)*static_cast<int64_t>(sizeof(E));
  }

  // Only if all tiles of the unit before are finished.
  void open(int32_t unit, int32_t tiles) {
    ++units_;
    tiles_ = tiles;
    finished_.store(0, std::memory_order_relaxed);
    left_.store({unit, tiles}, std::memory_order_release);
  }
  bool finished() const { return finished_.load(std::memory_order_acquire) == tiles_; }
  int32_t tiles_left() const { return left_.load(std::memory_order_relaxed).index; }

  std::optional<Tile> take() {
    Tile tile = left_.load(std::memory_order_relaxed);
    while (tile.index > 0) {
      if (left_.compare_exchange_weak(tile, {tile.unit, tile.index - 1}, std::memory_order_acquire))
        return Tile{tile.unit, tile.index - 1};
    }
    return {};
  }
  void finish_tile() { finished_.fetch_add(1, std::memory_order_release); }

  E* panels(int64_t block) const { return panels_.get() + block * panel_size_; }
  Packed<E> values(int64_t block) const { return {values_.get() + block * value_rows_ * value_ld_, value_ld_}; }

  // What the products with a block will read, but for its panels, with which they begin; and the next one's panels.
  void append_spans(int64_t block, bool next, std::vector<Ahead::Span>& spans) const {
    const auto bytes = [](int64_t count) { return count * static_cast<int64_t>(sizeof(E)); };
    spans.push_back({reinterpret_cast<const char*>(values(block).data), bytes(value_rows_ * value_ld_)});
    if (next) spans.push_back({reinterpret_cast<const char*>(panels(block + 1)), bytes(panel_size_)});
  }

  // Runs pack() if nobody has for this block of the unit, or waits for who does.
  template <class Pack>
  void ensure(int64_t block, Pack pack) {
    std::atomic<int64_t>& state = states_[static_cast<size_t>(block)].value;
    const int64_t packing = 2 * units_ - 1, packed = 2 * units_;
    int64_t seen = state.load(std::memory_order_acquire);
    if (seen < packing && state.compare_exchange_strong(seen, packing)) {
      pack();
      state.store(packed, std::memory_order_release);
    }
    wait_until([&] { return state.load(std::memory_order_acquire) == packed; });
  }

 private:
  struct alignas(kAlignment) State {
    std::atomic<int64_t> value{0};
  };

  int64_t panel_size_, value_rows_, value_ld_;
  Buffer<E> panels_, values_;
  std::vector<State> states_;  // of each block: twice the units that packed it, less 1 while the last of them does
  int64_t units_ = 0;          // so far
  int32_t tiles_ = 0;          // of the last of them
  std::atomic<int32_t> finished_{0};
  std::atomic<Tile> left_{Tile{0, 0}};  // of which unit, how many
};

// Memory of one thread.
template <class E>
struct alignas(kAlignment) Scratch {
  using T = Sum<E>;

  Scratch(const Sizes& sizes, int lanes, Arena& arena)
      : q(arena, sizes.tile_rows, sizes.key_depth),
        key_rows(arena, sizes.key_block, std::max(sizes.key_depth, sizes.value_depth)),
        weights(arena, sizes.tile_rows, sizes.key_block),
        out(arena, sizes.tile_rows, sizes.value_width),
        before(arena, 1, sizes.value_width),
        sums(arena, sizes.tile_rows, lanes),
        base(arena, sizes.tile_rows),
        sum(arena, sizes.tile_rows),
        keep(arena, sizes.tile_rows),
        factor(arena, sizes.tile_rows),
        seen(static_cast<size_t>(sizes.tile_rows)),
        first_key(static_cast<size_t>(sizes.tile_rows)),
        end_key(static_cast<size_t>(sizes.tile_rows)) {
    // Nothing may be allocated between the first tile and the last: others wait for a thread's tiles.
    spans.reserve(static_cast<size_t>(3 * sizes.tile_rows + 2 * sizes.key_block + 2));
    next_spans.reserve(spans.capacity());
  }

  ForwardTile<E> tile(int64_t rows, const Factors<E>& factors) {
    return {.rows = rows,
            .q = q,
            .weights = weights,
            .out = out,
            .sums = sums,
            .score_factor = factors.score,
            .base = base.get(),
            .sum = sum.get(),
            .keep = keep.get(),
            .ahead = &ahead};
  }

  PackedBuffer<E> q, key_rows;
  PackedBuffer<T> weights, out, before, sums;
  Buffer<T> base, sum, keep, factor;
  std::vector<Range> seen;  // of each row, in positions
  std::vector<int32_t> first_key, end_key;
  std::vector<Ahead::Span> spans, next_spans;
  Ahead ahead;
};

template <class E>
class Forward {
 public:
  Forward(const ForwardArgs& args, const Isa<E>& isa)
      : args_(args), isa_(isa), factors_(Factors<E>::of(args.scale)), sizes_(sizes_of(args.shape, isa, Pass::forward)) {
    plan_units();
    const auto threads = static_cast<size_t>(args.parallel->threads());
    for (size_t i = 0; i < threads; ++i) scratch_.push_back(std::make_unique<Scratch<E>>(sizes_, isa.lanes, arena_));
    plan_slots();
    arena_.allocate();
  }

  void run() {
    args_.parallel->run(args_.parallel->threads(), [&](int64_t worker, int thread) {
      Scratch<E>& scratch = *scratch_[static_cast<size_t>(thread)];
      if (worker < std::ssize(slots_)) run_units(static_cast<size_t>(worker), scratch);
      help_until_all_is_taken(scratch);
    });
  }

 private:
  using T = Sum<E>;

  int64_t rows_of(const AttentionBlock& block) const { return block.q_count * args_.shape.group(); }
  const AttentionBlock& block_of(const Unit& unit) const { return args_.blocks[static_cast<size_t>(unit.block)]; }
  const Unit& unit_of(const Tile& tile) const { return units_[static_cast<size_t>(tile.unit)]; }

  void plan_units() {
    for (size_t b = 0; b < args_.blocks.size(); ++b) {
      const AttentionBlock& block = args_.blocks[b];
      const int64_t rows = rows_of(block);
      if (rows == 0) continue;
      most_blocks_ = std::max(most_blocks_, KeyGrid(block, sizes_.key_block).count());
      // No last tile of a few rows.
      const int64_t size = round_up(divide_up(rows, divide_up(rows, sizes_.tile_rows)), 2 * kTileHeight);
      for (int32_t h = 0; h < args_.shape.kv_heads; ++h) {
        units_.push_back(
            {static_cast<int32_t>(b), h, static_cast<int32_t>(divide_up(rows, size)), static_cast<int32_t>(size)});
      }
    }
    unopened_ = units_.size();
  }

  // One for each worker, but few if documents are very long. Their queues have about the same work.
  void plan_slots() {
    constexpr int64_t kMostBytes = int64_t{1} << 28;
    const int64_t bytes = most_blocks_ * Slot<E>::bytes_of_block(sizes_);
    const int64_t most = std::max<int64_t>(2, kMostBytes / std::max<int64_t>(bytes, 1));
    const int64_t count = std::min({std::ssize(units_), int64_t{args_.parallel->threads()}, most});
    for (int64_t i = 0; i < count; ++i) slots_.push_back(std::make_unique<Slot<E>>(sizes_, most_blocks_, arena_));
    queues_ = std::vector<Queue>(slots_.size());

    double total = 0;
    for (const Unit& unit : units_) total += work_of(unit);
    double work = 0;
    size_t begin = 0, end = 0;
    for (size_t q = 0; q < queues_.size(); ++q, begin = end) {
      const double share = total * static_cast<double>(q + 1) / static_cast<double>(queues_.size());
      while (end < units_.size() && work + work_of(units_[end]) / 2 <= share) work += work_of(units_[end++]);
      if (q + 1 == queues_.size()) end = units_.size();
      queues_[q].fill(static_cast<int32_t>(begin), static_cast<int32_t>(end));
    }
  }

  // Query rows times keys at hand: an upper bound of the pairs, good enough here.
  double work_of(const Unit& unit) const {
    const AttentionBlock& block = block_of(unit);
    return static_cast<double>(block.q_count) * static_cast<double>(KeyView(block).size());
  }

  // With the last tile of a unit at hand the next unit is chosen, so that its memory can be fetched meanwhile; where
  // that takes as long as all of the unit, with the first.
  void run_units(size_t slot, Scratch<E>& scratch) {
    Slot<E>& own = *slots_[slot];
    std::optional<int32_t> next = take_unit(slot);
    while (next) {
      const int32_t index = *next;
      const Unit& unit = units_[static_cast<size_t>(index)];
      own.open(index, unit.tiles);
      unopened_.fetch_sub(1, std::memory_order_release);
      bool chosen = false;
      const auto choose = [&] {
        if (!std::exchange(chosen, true)) next = take_unit(slot);
      };
      const bool early = KeyGrid(block_of(unit), sizes_.key_block).count() <= 1;
      while (const std::optional<Tile> tile = own.take()) {
        const bool now = !chosen && (early || tile->index == 0);
        if (now) choose();
        run_tile(*tile, now && next ? &units_[static_cast<size_t>(*next)] : nullptr, own, scratch);
      }
      choose();
      wait_until([&] {
        if (!own.finished()) help(scratch);
        return own.finished();
      });
    }
  }

  // From the worker's own queue, or else from the longest.
  std::optional<int32_t> take_unit(size_t own) {
    if (const auto unit = queues_[own].take_first()) return unit;
    for (;;) {
      Queue& longest = *std::max_element(queues_.begin(), queues_.end(),
                                         [](const Queue& a, const Queue& b) { return a.size() < b.size(); });
      if (longest.size() == 0) return {};
      if (const auto unit = longest.take_last()) return unit;
    }
  }

  // A unit that was chosen but is not open yet is with a worker that has a tile to finish first, and no worker waits
  // with a tile in hand for more than the packing of its keys. So this ends.
  void help_until_all_is_taken(Scratch<E>& scratch) {
    wait_until([&] {
      const bool all_open = unopened_.load(std::memory_order_acquire) == 0;
      while (help(scratch)) {
      }
      return all_open;
    });
  }

  // Computes a tile of the unit with the most; false if none has any.
  bool help(Scratch<E>& scratch) {
    Slot<E>* most = nullptr;
    int32_t tiles = 0;
    for (const auto& slot : slots_) {
      if (const int32_t left = slot->tiles_left(); left > tiles) {
        tiles = left;
        most = slot.get();
      }
    }
    if (most == nullptr) return false;
    if (const std::optional<Tile> tile = most->take()) run_tile(*tile, nullptr, *most, scratch);
    return true;
  }

  // Fetches ahead what the unit's next tile needs, and what `next_unit` will begin with.
  void run_tile(const Tile& which, const Unit* next_unit, Slot<E>& slot, Scratch<E>& scratch) {
    const Unit& unit = unit_of(which);
    const AttentionBlock& block = block_of(unit);
    const KeyGrid grid(block, sizes_.key_block);
    const TileRows rows = tile_rows(unit, which.index);
    ForwardTile<E> tile = scratch.tile(rows.count, factors_);
    start(rows, block, grid, scratch, tile);

    scratch.next_spans.clear();
    if (which.index > 0) append_queries(unit, which.index - 1, scratch.next_spans);
    if (next_unit != nullptr) append_unit(*next_unit, scratch.next_spans);
    const Range seen{scratch.seen.front().begin, scratch.seen[static_cast<size_t>(rows.count - 1)].end};
    const int64_t size = sizes_.key_block;
    for (int64_t b = seen.begin / size; !seen.empty() && b * size < seen.end; ++b) {
      slot.ensure(b - grid.first(), [&] { pack_block(grid, b, unit.kv_head, slot, scratch); });
      scratch.spans.clear();
      if (grid.count() > 1) slot.append_spans(b - grid.first(), (b + 1) * size < seen.end, scratch.spans);
      if ((b + 1) * size >= seen.end) {
        append_spans(rows, args_.shape.dtype, block.out, sizes_.value_dim, scratch.spans);
        scratch.spans.insert(scratch.spans.end(), scratch.next_spans.begin(), scratch.next_spans.end());
      }
      scratch.ahead = Ahead(scratch.spans);
      isa_.forward(sizes_, seen_in(b, rows.count, scratch), slot.panels(b - grid.first()),
                   slot.values(b - grid.first()), tile);
    }
    finish(rows, block, scratch, tile);
    slot.finish_tile();
  }

  TileRows tile_rows(const Unit& unit, int64_t index) const {
    const int64_t begin = index * unit.tile_rows, group = args_.shape.group();
    return {begin, std::min<int64_t>(unit.tile_rows, rows_of(block_of(unit)) - begin), group, unit.kv_head * group};
  }

  void append_queries(const Unit& unit, int64_t tile, std::vector<Ahead::Span>& spans) const {
    const AttentionBlock& block = block_of(unit);
    append_spans(tile_rows(unit, tile), args_.shape.dtype, block.q, sizes_.head_dim, spans);
  }

  // What a unit begins with: the queries of its last tile, and the keys that will be packed first.
  void append_unit(const Unit& unit, std::vector<Ahead::Span>& spans) const {
    const KeyGrid grid(block_of(unit), sizes_.key_block);
    append_queries(unit, unit.tiles - 1, spans);
    if (grid.count() == 0) return;
    const DType type = args_.shape.dtype;
    cpu::append_spans(grid, grid.first(), type, &KeyRows::k, unit.kv_head, sizes_.head_dim, spans);
    cpu::append_spans(grid, grid.first(), type, &KeyRows::v, unit.kv_head, sizes_.value_dim, spans);
  }

  void start(const TileRows& rows, const AttentionBlock& block, const KeyGrid& grid, Scratch<E>& scratch,
             const ForwardTile<E>& tile) {
    pack_tile(isa_, rows, args_.shape.dtype, block.q, sizes_.head_dim, factors_.q, tile.q);
    Range seen;
    int64_t last_row = -1;
    rows.each([&](int64_t r, int64_t row, int64_t) {
      std::fill_n(tile.out.row(r), sizes_.value_width, T{0});
      tile.base[r] = Partial<T>::kNothing;
      tile.sum[r] = 0;
      if (row != last_row) seen = grid.seen(row);
      scratch.seen[static_cast<size_t>(r)] = seen;
      last_row = row;
    });
  }

  Seen seen_in(int64_t block, int64_t rows, Scratch<E>& scratch) const {
    const int64_t from = block * sizes_.key_block;
    for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
      scratch.first_key[r] =
          static_cast<int32_t>(std::clamp<int64_t>(scratch.seen[r].begin - from, 0, sizes_.key_block));
      scratch.end_key[r] = static_cast<int32_t>(std::clamp<int64_t>(scratch.seen[r].end - from, 0, sizes_.key_block));
    }
    return {scratch.first_key.data(), scratch.end_key.data(), nullptr, nullptr};
  }

  void pack_block(const KeyGrid& grid, int64_t block, int64_t kv_head, Slot<E>& slot, Scratch<E>& scratch) {
    const DType type = args_.shape.dtype;
    const Packed<E> rows = scratch.key_rows, values = slot.values(block - grid.first());
    const auto pack_rows = [&](Rows KeyRows::*which, int64_t width, Packed<E> dst) {
      return pack_keys(isa_, grid, block, sizes_.key_block, type, which, kv_head, width, T{1}, dst);
    };
    const Range filled = pack_rows(&KeyRows::k, sizes_.head_dim, rows);
    make_panels(isa_, rows, filled, sizes_.key_depth, slot.panels(block - grid.first()));
    pack_rows(&KeyRows::v, sizes_.value_dim, kTerms<E> == 1 ? values : rows);
    if constexpr (kTerms<E> != 1) pair_rows(isa_, rows, filled, sizes_.value_width, values);
  }

  // In double: a rounding of the large part would outweigh the small one.
  static T natural_lse(double base, double sum) { return static_cast<T>(base / kLog2E + std::log(sum)); }

  void finish(const TileRows& rows, const AttentionBlock& block, Scratch<E>& scratch, const ForwardTile<E>& tile) {
    T* factor = scratch.factor.get();
    rows.each([&](int64_t r, int64_t row, int64_t head) {
      T& lse = number<T>(block.lse, row, head);
      Partial<T> mine{{}, tile.sum[r] == 0 ? Partial<T>::kNothing : natural_lse(tile.base[r], tile.sum[r])};
      factor[r] = tile.sum[r] == 0 ? 0 : 1 / tile.sum[r];
      if (args_.merge) merge_row(rows, r, block, scratch, tile.out.row(r), mine, lse);
      lse = mine.lse;
    });
    const DType type = args_.merge ? accumulator(args_.shape.dtype) : args_.shape.dtype;
    unpack_tile(isa_, rows, tile.out, factor, sizes_.value_dim, type, block.out);
  }

  // The row's result so far is merged into the tile, which then holds both and needs no factor any more.
  void merge_row(const TileRows& rows, int64_t r, const AttentionBlock& block, Scratch<E>& scratch, T* out,
                 Partial<T>& mine, T lse_before) {
    const auto width = static_cast<size_t>(sizes_.value_width);
    T& factor = scratch.factor.get()[r];
    mine.out = {out, width};
    for (T& x : mine.out) x *= factor;
    factor = 1;
    const Packed<T> before = scratch.before;
    isa_.pack_sums(at(accumulator(args_.shape.dtype), block.out, rows.row(r), rows.head(r), 0), 1, sizes_.value_dim,
                   T{1}, before);
    merge(mine, Partial<T>{{before.data, width}, lse_before});
  }

  const ForwardArgs& args_;
  const Isa<E>& isa_;
  const Factors<E> factors_;
  const Sizes sizes_;
  std::vector<Unit> units_;
  std::vector<Queue> queues_;  // one for each slot
  std::atomic<size_t> unopened_{0};
  int64_t most_blocks_ = 0;
  Arena arena_;
  std::vector<std::unique_ptr<Scratch<E>>> scratch_;
  std::vector<std::unique_ptr<Slot<E>>> slots_;
};

struct Blocking {
  int64_t key_block, tile_rows;
};

// Key blocks that fit the second-level cache together with what is kept of a tile, its queries, weights and sums;
// taller tiles read the keys less often. Measured with AVX-512, whose processors have caches of 1 MiB and more:
// backward of narrow rows gains 1 to 2 % from blocks of 384 keys, forward nothing. Of the widest rows forward loses 2
// to 6 % with backward's blocks (fp64 1 to 2 %), and backward, which keeps sums for the keys as well, 4 % with
// forward's. Bytes are those of the sums of a key and its value, which bf16 has in fp32.
constexpr Blocking blocking(int64_t bytes_of_sums, bool wide_vectors, Pass pass) {
  if (bytes_of_sums <= 1024) return {wide_vectors ? 384 : 256, 192};
  if (bytes_of_sums <= 2048) return {256, 96};
  return pass == Pass::forward ? Blocking{128, 96} : Blocking{256, 48};
}

}  // namespace

template <class E>
Sizes sizes_of(const AttentionShape& shape, const Isa<E>& isa, Pass pass) {
  const int64_t key_width = round_up(shape.head_dim, isa.lanes), value_width = round_up(shape.value_dim, isa.lanes);
  const auto size = static_cast<int64_t>(sizeof(E));
  const auto [key_block, tile_rows] = blocking((key_width + value_width) * size, isa.lanes * size == 64, pass);
  return {.head_dim = shape.head_dim,
          .value_dim = shape.value_dim,
          .key_width = key_width,
          .value_width = value_width,
          .key_depth = elements_in(shape.head_dim, isa),
          .value_depth = elements_in(shape.value_dim, isa),
          .key_block = key_block,
          .tile_rows = tile_rows};
}

template <class E>
void run_forward(const ForwardArgs& args, const Isa<E>& isa) {
  Forward<E>(args, isa).run();
}

template Sizes sizes_of(const AttentionShape&, const Isa<float>&, Pass);
template Sizes sizes_of(const AttentionShape&, const Isa<double>&, Pass);
template Sizes sizes_of(const AttentionShape&, const Isa<Pair>&, Pass);
template void run_forward(const ForwardArgs&, const Isa<float>&);
template void run_forward(const ForwardArgs&, const Isa<double>&);
template void run_forward(const ForwardArgs&, const Isa<Pair>&);

}  // namespace blockcp::cpu
