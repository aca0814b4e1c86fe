// Forward: query tiles in ascending order, each against the key blocks that it sees, with a running softmax.
//
// The packed keys of a block and KV head (a unit) are shared by its tiles: whichever thread first needs a key block
// packs it. They live in a few slots that units use in turn.
#include <cmath>

#include "blockcp/kernels/cpu/drivers.h"
#include "blockcp/kernels/cpu/work.h"
#include "blockcp/kernels/partial.h"

namespace blockcp::cpu {

namespace {

// All tiles of one block and KV head.
struct Unit {
  int32_t block, kv_head;
  int64_t tiles;
};

struct Item {
  int64_t unit, tile_begin, tile_end;
};

// Packed key blocks of one unit at a time.
template <class E>
class Slot {
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

  Turns& turns() { return turns_; }

  E* panels(int64_t block) const { return panels_.get() + block * panel_size_; }
  Packed<E> values(int64_t block) const { return {values_.get() + block * value_rows_ * value_ld_, value_ld_}; }

  // What the products with a block will read, but for its panels, with which they begin; and the next one's panels.
  void append_spans(int64_t block, bool next, std::vector<Ahead::Span>& spans) const {
    const auto bytes = [](int64_t count) { return count * static_cast<int64_t>(sizeof(E)); };
    spans.push_back({reinterpret_cast<const char*>(values(block).data), bytes(value_rows_ * value_ld_)});
    if (next) spans.push_back({reinterpret_cast<const char*>(panels(block + 1)), bytes(panel_size_)});
  }

  // Runs pack() if nobody has for this block in this generation of the slot, or waits for who does.
  template <class Pack>
  void ensure(int64_t block, int64_t generation, Pack pack) {
    std::atomic<int64_t>& state = states_[static_cast<size_t>(block)];
    const int64_t packing = 2 * generation + 1, packed = packing + 1;
    int64_t seen = state.load(std::memory_order_acquire);
    if (seen < packing && state.compare_exchange_strong(seen, packing)) {
      pack();
      state.store(packed, std::memory_order_release);
    }
    wait_until([&] { return state.load(std::memory_order_acquire) == packed; });
  }

 private:
  int64_t panel_size_, value_rows_, value_ld_;
  Buffer<E> panels_, values_;
  std::vector<std::atomic<int64_t>> states_;
  Turns turns_;
};

// Memory of one thread.
template <class E>
struct Scratch {
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
    // Nothing may be allocated between the first item and the last: others wait for a thread's items.
    spans.reserve(static_cast<size_t>(2 * sizes.tile_rows + 2 * sizes.key_block + 2));
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
      : args_(args), isa_(isa), factors_(Factors<E>::of(args.scale)), sizes_(sizes_of(args.shape, isa)) {
    plan_items();
    const auto threads = static_cast<size_t>(args.parallel->threads());
    for (size_t i = 0; i < threads; ++i) scratch_.push_back(std::make_unique<Scratch<E>>(sizes_, isa.lanes, arena_));
    for (size_t i = 0; i < slot_count(); ++i) slots_.push_back(std::make_unique<Slot<E>>(sizes_, most_blocks_, arena_));
    arena_.allocate();
  }

  void run() {
    args_.parallel->run(static_cast<int64_t>(items_.size()), [&](int64_t item, int thread) {
      run_item(static_cast<size_t>(item), *scratch_[static_cast<size_t>(thread)]);
    });
  }

 private:
  using T = Sum<E>;

  // One more than threads, so that none waits for another's last tile, but few if documents are very long.
  size_t slot_count() const {
    constexpr int64_t kMostBytes = int64_t{1} << 28;
    const int64_t bytes = most_blocks_ * Slot<E>::bytes_of_block(sizes_);
    const int64_t most = std::max<int64_t>(2, kMostBytes / std::max<int64_t>(bytes, 1));
    return static_cast<size_t>(
        std::min({static_cast<int64_t>(units_.size()), int64_t{args_.parallel->threads()} + 1, most}));
  }

  int64_t rows_of(const AttentionBlock& block) const { return block.q_count * args_.shape.group(); }

  // Query rows times keys at hand: an upper bound of the pairs, good enough to size items.
  double work_of(const AttentionBlock& block) const {
    return static_cast<double>(rows_of(block)) * static_cast<double>(KeyView(block).size()) *
           static_cast<double>(sizes_.key_width + sizes_.value_width);
  }

  // Units with little work are one item, others one item a tile, so that threads end together.
  void plan_items() {
    double total = 0;
    for (const AttentionBlock& block : args_.blocks)
      total += work_of(block) * static_cast<double>(args_.shape.kv_heads);
    const double small = std::min(0x1p24, total / (16.0 * args_.parallel->threads()));

    for (size_t b = 0; b < args_.blocks.size(); ++b) {
      const AttentionBlock& block = args_.blocks[b];
      const int64_t tiles = (rows_of(block) + sizes_.tile_rows - 1) / sizes_.tile_rows;
      if (tiles == 0) continue;
      most_blocks_ = std::max(most_blocks_, KeyGrid(block, sizes_.key_block).count());
      const bool whole = work_of(block) <= small;
      for (int64_t h = 0; h < args_.shape.kv_heads; ++h) {
        add_unit({static_cast<int32_t>(b), static_cast<int32_t>(h), tiles}, whole ? tiles : 1);
      }
    }
    items_before_ = items_before(items_of_unit_, slot_count());
  }

  void add_unit(const Unit& unit, int64_t tiles_per_item) {
    const auto index = static_cast<int64_t>(units_.size());
    units_.push_back(unit);
    items_of_unit_.push_back((unit.tiles + tiles_per_item - 1) / tiles_per_item);
    for (int64_t t = 0; t < unit.tiles; t += tiles_per_item) {
      items_.push_back({index, t, std::min(t + tiles_per_item, unit.tiles)});
    }
  }

  void run_item(size_t index, Scratch<E>& scratch) {
    const Item& item = items_[index];
    const Unit& unit = units_[static_cast<size_t>(item.unit)];
    const AttentionBlock& block = args_.blocks[static_cast<size_t>(unit.block)];
    const KeyGrid grid(block, sizes_.key_block);
    Slot<E>& slot = *slots_[static_cast<size_t>(item.unit) % slots_.size()];
    slot.turns().enter(items_before_[static_cast<size_t>(item.unit)]);
    // Threads take turns, so that this one's next item is probably as many further on as there are threads.
    const size_t next = index + scratch_.size();
    for (int64_t t = item.tile_begin; t < item.tile_end; ++t) {
      scratch.next_spans.clear();
      if (t + 1 < item.tile_end) {
        append_queries(unit, t + 1, scratch.next_spans);
      } else if (next < items_.size()) {
        append_item(items_[next], item.unit, scratch.next_spans);
      }
      run_tile(item.unit, t, block, grid, slot, scratch);
    }
    slot.turns().leave();
  }

  void run_tile(int64_t unit, int64_t index, const AttentionBlock& block, const KeyGrid& grid, Slot<E>& slot,
                Scratch<E>& scratch) {
    const int64_t kv_head = units_[static_cast<size_t>(unit)].kv_head;
    const TileRows rows = tile_rows(block, kv_head, index);
    ForwardTile<E> tile = scratch.tile(rows.count, factors_);
    start(rows, block, grid, scratch, tile);

    const Range seen{scratch.seen.front().begin, scratch.seen[static_cast<size_t>(rows.count - 1)].end};
    const int64_t size = sizes_.key_block;
    for (int64_t b = seen.begin / size; !seen.empty() && b * size < seen.end; ++b) {
      slot.ensure(b - grid.first(), unit / static_cast<int64_t>(slots_.size()),
                  [&] { pack_block(grid, b, kv_head, slot, scratch); });
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
  }

  TileRows tile_rows(const AttentionBlock& block, int64_t kv_head, int64_t index) const {
    const int64_t begin = index * sizes_.tile_rows, group = args_.shape.group();
    return {begin, std::min(sizes_.tile_rows, rows_of(block) - begin), group, kv_head * group};
  }

  void append_queries(const Unit& unit, int64_t tile, std::vector<Ahead::Span>& spans) const {
    const AttentionBlock& block = args_.blocks[static_cast<size_t>(unit.block)];
    append_spans(tile_rows(block, unit.kv_head, tile), args_.shape.dtype, block.q, sizes_.head_dim, spans);
  }

  // What an item begins with: its queries, and, if it will have to pack them, its keys.
  void append_item(const Item& item, int64_t unit_before, std::vector<Ahead::Span>& spans) const {
    const Unit& unit = units_[static_cast<size_t>(item.unit)];
    const KeyGrid grid(args_.blocks[static_cast<size_t>(unit.block)], sizes_.key_block);
    append_queries(unit, item.tile_begin, spans);
    if (item.unit == unit_before || grid.count() == 0) return;
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
  std::vector<int64_t> items_of_unit_, items_before_;  // before: of earlier units in the same slot
  std::vector<Item> items_;
  int64_t most_blocks_ = 0;
  Arena arena_;
  std::vector<std::unique_ptr<Scratch<E>>> scratch_;
  std::vector<std::unique_ptr<Slot<E>>> slots_;
};

}  // namespace

// Blocks that fit the second-level cache together with a tile's weights, queries and sums. Measured: forward is flat in
// the key block from 256 on, backward gains 1 to 2 % from 384, with AVX-512, whose processors have caches of 1 MiB and
// more; taller tiles read the keys less often.
template <class E>
Sizes sizes_of(const AttentionShape& shape, const Isa<E>& isa) {
  const int64_t key_width = round_up(shape.head_dim, isa.lanes), value_width = round_up(shape.value_dim, isa.lanes);
  const int64_t bytes = (key_width + value_width) * static_cast<int64_t>(sizeof(E));
  const bool wide_vectors = isa.lanes * sizeof(E) == 64;
  return {.head_dim = shape.head_dim,
          .value_dim = shape.value_dim,
          .key_width = key_width,
          .value_width = value_width,
          .key_depth = elements_in(shape.head_dim, isa),
          .value_depth = elements_in(shape.value_dim, isa),
          .key_block = wide_vectors && bytes <= 1024 ? 384 : 256,
          .tile_rows = bytes <= 1024   ? 192
                       : bytes <= 2048 ? 96
                                       : 48};
}

template <class E>
void run_forward(const ForwardArgs& args, const Isa<E>& isa) {
  Forward<E>(args, isa).run();
}

template Sizes sizes_of(const AttentionShape&, const Isa<float>&);
template Sizes sizes_of(const AttentionShape&, const Isa<double>&);
template Sizes sizes_of(const AttentionShape&, const Isa<Pair>&);
template void run_forward(const ForwardArgs&, const Isa<float>&);
template void run_forward(const ForwardArgs&, const Isa<double>&);
template void run_forward(const ForwardArgs&, const Isa<Pair>&);

}  // namespace blockcp::cpu
