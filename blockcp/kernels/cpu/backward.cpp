// Backward: one pass over key blocks, each against the query tiles that see it, all five products at once.
//
// A key block's dk and dv are summed by one thread and added once. A tile's dq gets the key blocks' shares in ascending
// order: key block j + 1 adds to a tile only after block j has passed it. Items start in ascending order, so the wait
// ends, and with one long document and KV head the threads follow each other down its tiles. That costs them the tiles
// that only the first of them sees, so where there are several documents or heads each thread has its own.
//
// Where a block has all keys of its queries, the first key block that a tile meets starts its dq at zero, and the last
// one writes it. In between it lies in dq itself, or, where that is of a 16-bit type, in a slot: memory for the tiles
// of one block and KV head, which such use in turn.
#include <algorithm>
#include <limits>

#include "blockcp/kernels/cpu/drivers.h"
#include "blockcp/kernels/cpu/work.h"
#include "blockcp/kernels/partial.h"

namespace blockcp::cpu {

namespace {

// One key block of a block and KV head.
struct Item {
  int32_t block, kv_head;
  int64_t key_block;
  int64_t previous;  // the item of the key block before, or -1
  int64_t chain;     // of those with a slot, or -1
};

// All key blocks of a block and KV head.
struct Chain {
  int32_t block, kv_head;
  int64_t first, count;
  int64_t index;           // of those with a slot, or -1
  int64_t last_item = -1;  // so far
};

// A tile as a key block meets it: whether its dq starts here, and whether it ends here.
struct Meeting {
  TileRows rows;
  bool starts, ends;
};

// Whose turn it is with memory that units of work share: one enters when all items of those before have left. Units
// start in ascending order, so the wait ends.
class Turns {
 public:
  void enter(int64_t items_before) const {
    wait_until([&] { return left_.load(std::memory_order_acquire) >= items_before; });
  }
  void leave() { left_.fetch_add(1, std::memory_order_release); }

 private:
  alignas(kAlignment) std::atomic<int64_t> left_{0};
};

// For each unit, the items of earlier units in the same slot, of slots that units take in turn.
std::vector<int64_t> items_before(const std::vector<int64_t>& items_of_unit, size_t slots) {
  std::vector<int64_t> before(items_of_unit.size());
  for (size_t u = slots; u < before.size(); ++u) before[u] = before[u - slots] + items_of_unit[u - slots];
  return before;
}

// The dq of all tiles of a chain, between key blocks.
template <class T>
struct Slot {
  Slot(int64_t rows, int64_t width, Arena& arena) : dq(arena, rows, width) {}
  PackedBuffer<T> dq;
  Turns turns;
};

constexpr int64_t kSomeRows = 16;  // of which delta is computed at a time

// Memory of one thread.
template <class E>
struct Scratch {
  using T = Sum<E>;

  Scratch(const Sizes& sizes, Arena& arena)
      : k(arena, sizes.key_block, sizes.key_depth),
        v(arena, sizes.key_block, sizes.value_depth),
        q(arena, sizes.tile_rows, sizes.key_depth),
        dout(arena, sizes.tile_rows, sizes.value_depth),
        dk(arena, sizes.key_block, sizes.key_width),
        dv(arena, sizes.key_block, sizes.value_width),
        dq(arena, sizes.tile_rows, sizes.key_width),
        p(arena, sizes.tile_rows, sizes.key_block),
        ds(arena, sizes.tile_rows, sizes.key_block),
        some_out(arena, kSomeRows, sizes.value_width),
        some_dout(arena, kSomeRows, sizes.value_width),
        k_panels(arena, sizes.key_block * sizes.key_depth),
        v_panels(arena, sizes.key_block * sizes.value_depth),
        numbers(arena, 3 * sizes.tile_rows),
        tile_rows(sizes.tile_rows),
        ones(static_cast<size_t>(std::max(sizes.tile_rows, sizes.key_block)), T{1}),
        first_key(static_cast<size_t>(sizes.tile_rows)),
        end_key(static_cast<size_t>(sizes.tile_rows)),
        first_row(static_cast<size_t>(sizes.key_block)),
        end_row(static_cast<size_t>(sizes.key_block)) {
    // Nothing may be allocated between the first item and the last: others wait for a thread's items.
    spans.reserve(static_cast<size_t>(4 * sizes.tile_rows + 4 * sizes.key_block));
    if constexpr (kTerms<E> != 1) {
      k_pairs = PackedBuffer<E>(arena, sizes.key_block / kTerms<E>, sizes.key_width);
      q_pairs = PackedBuffer<E>(arena, sizes.tile_rows / kTerms<E>, sizes.key_width);
      dout_pairs = PackedBuffer<E>(arena, sizes.tile_rows / kTerms<E>, sizes.value_width);
      ds_rows = PackedBuffer<E>(arena, sizes.tile_rows, sizes.key_block / kTerms<E>);
    }
  }

  BackwardKeys<E> keys(int64_t count) const {
    return {count, of_terms(k, k_pairs), k_panels.get(), v_panels.get(), dk, dv};
  }
  BackwardTile<E> tile(int64_t rows, const Factors<E>& factors) {
    return {.rows = rows,
            .q = q,
            .dout = dout,
            .q_terms = of_terms(q, q_pairs),
            .dout_terms = of_terms(dout, dout_pairs),
            .p = p,
            .ds = ds,
            .ds_rows = ds_of_rows(),
            .score_factor = factors.score,
            .lse = lse(),
            .ds_factor = ds_factor(),
            .delta = delta(),
            .ahead = &ahead};
  }
  static const PackedBuffer<E>& of_terms(const PackedBuffer<E>& rows, const PackedBuffer<E>& pairs) {
    return kTerms<E> == 1 ? rows : pairs;
  }
  Packed<E> ds_of_rows() const {
    if constexpr (kTerms<E> == 1) return ds;
    return ds_rows;
  }
  T* lse() const { return numbers.get(); }
  T* delta() const { return numbers.get() + tile_rows; }
  T* ds_factor() const { return numbers.get() + 2 * tile_rows; }

  PackedBuffer<E> k, v, q, dout, k_pairs, q_pairs, dout_pairs, ds_rows;
  PackedBuffer<T> dk, dv, dq, p, ds, some_out, some_dout;
  Buffer<E> k_panels, v_panels;
  Buffer<T> numbers;
  int64_t tile_rows;
  std::vector<T> ones;
  std::vector<int32_t> first_key, end_key, first_row, end_row;
  std::vector<Ahead::Span> spans;
  Ahead ahead;
};

// Which earlier blocks must have added their dk and dv before a block adds its own, because they share key rows.
class SharedKeys {
 public:
  SharedKeys(std::span<const AttentionBlock> blocks, size_t all, int64_t bytes) : before_(all) {
    std::vector<Entry> entries;
    for (size_t b = 0; b < blocks.size(); ++b) {
      for (const KeyRows& piece : blocks[b].keys) {
        if (piece.count > 0 && blocks[b].q_count > 0) entries.push_back(entry(piece, b, bytes));
      }
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
    for (size_t i = 0; i < entries.size();) i = link_overlapping(entries, i);
  }

  const std::vector<int32_t>& before(size_t block) const { return before_[block]; }

 private:
  struct Entry {
    intptr_t begin, end;
    int32_t block;
  };

  // The rows of head 0 stand for all: rows of other heads overlap where these do.
  static Entry entry(const KeyRows& piece, size_t block, int64_t bytes) {
    const auto first = reinterpret_cast<intptr_t>(piece.dk.data);
    const intptr_t last = first + (piece.count - 1) * piece.dk.row * bytes;
    return {std::min(first, last), std::max(first, last) + bytes, static_cast<int32_t>(block)};
  }

  // Blocks of one run of overlapping entries come one after the other.
  size_t link_overlapping(const std::vector<Entry>& entries, size_t i) {
    std::vector<int32_t> blocks;
    for (intptr_t end = entries[i].end; i < entries.size() && entries[i].begin < end; ++i) {
      end = std::max(end, entries[i].end);
      blocks.push_back(entries[i].block);
    }
    std::sort(blocks.begin(), blocks.end());
    for (size_t n = 1; n < blocks.size(); ++n) {
      if (blocks[n] != blocks[n - 1]) before_[static_cast<size_t>(blocks[n])].push_back(blocks[n - 1]);
    }
    return i;
  }

  std::vector<std::vector<int32_t>> before_;
};

template <class E>
class Backward {
 public:
  Backward(const BackwardArgs& args, const Isa<E>& isa)
      : args_(args),
        isa_(isa),
        factors_(Factors<E>::of(args.scale)),
        sizes_(sizes_of(args.shape, isa, Pass::backward)),
        shared_(args.all_queries ? std::span<const AttentionBlock>() : args.blocks, args.blocks.size(), sizeof(T)),
        finished_(args.blocks.size() * static_cast<size_t>(args.shape.kv_heads)) {
    plan_items();
    const auto threads = static_cast<size_t>(args.parallel->threads());
    for (size_t i = 0; i < threads; ++i) scratch_.push_back(std::make_unique<Scratch<E>>(sizes_, arena_));
    plan_slots();
    arena_.allocate();
  }

  void run() {
    if (args_.all_keys) compute_deltas();
    args_.parallel->run(static_cast<int64_t>(items_.size()), [&](int64_t item, int thread) {
      run_item(static_cast<size_t>(item), *scratch_[static_cast<size_t>(thread)]);
    });
  }

 private:
  using T = Sum<E>;

  // Chains in the order of blocks; but those that may share keys only beside others of their block.
  void plan_items() {
    std::vector<Chain> chains;
    int64_t with_slot = 0;
    for (size_t b = 0; b < args_.blocks.size(); ++b) {
      const KeyGrid grid(args_.blocks[b], sizes_.key_block);
      if ((args_.blocks[b].q_count == 0 && !args_.all_queries) || items_of(grid) == 0) continue;
      const bool apart = sums_apart(args_.blocks[b]);
      for (int64_t h = 0; h < args_.shape.kv_heads; ++h) {
        chains.push_back(
            {static_cast<int32_t>(b), static_cast<int32_t>(h), grid.first(), items_of(grid), apart ? with_slot++ : -1});
      }
      if (!args_.all_queries) append_items(chains);
    }
    append_items(chains);
    passed_ = std::vector<std::atomic<int64_t>>(items_.size());
  }

  // As many side by side as there are threads; the last of all up to twice as many, so that none is left with few.
  void append_items(std::vector<Chain>& chains) {
    const auto threads = static_cast<size_t>(args_.parallel->threads());
    for (auto begin = chains.begin(); begin != chains.end();) {
      const auto left = static_cast<size_t>(chains.end() - begin);
      const auto count = static_cast<std::ptrdiff_t>(left < 2 * threads ? left : threads);
      append_side_by_side({begin, begin + count});
      begin += count;
    }
    chains.clear();
  }

  void append_side_by_side(std::vector<Chain> chains) {
    most_beside_ = std::max(most_beside_, chains.size());
    for (int64_t i = 0; !chains.empty(); ++i) {
      for (Chain& chain : chains) {
        items_.push_back({chain.block, chain.kv_head, chain.first + i, chain.last_item, chain.index});
        chain.last_item = static_cast<int64_t>(items_.size()) - 1;
      }
      std::erase_if(chains, [i](const Chain& chain) { return i + 1 == chain.count; });
    }
  }

  const AttentionBlock& block_of(const Item& item) const { return args_.blocks[static_cast<size_t>(item.block)]; }

  // Of dk and dv.
  DType key_gradients() const { return args_.all_queries ? args_.shape.dtype : accumulator(args_.shape.dtype); }

  // With the tiles; for longer blocks, whose tiles come again and again, before.
  bool computes_deltas(const KeyGrid& grid) const { return args_.all_keys && grid.count() <= 1; }

  // Without keys there is still dq to write.
  int64_t items_of(const KeyGrid& grid) const { return std::max<int64_t>(grid.count(), args_.all_keys ? 1 : 0); }

  // Whether dq lies in a buffer between key blocks, because its own type is no accumulator.
  bool sums_apart(const AttentionBlock& block) const {
    const DType type = args_.shape.dtype;
    return args_.all_keys && type != accumulator(type) && KeyGrid(block, sizes_.key_block).count() > 1;
  }

  void plan_slots() {
    int64_t rows = 0;
    std::vector<int64_t> items;  // of each chain with a slot
    for (const Item& item : items_) {
      if (item.chain < 0) continue;
      rows = std::max(rows, block_of(item).q_count * args_.shape.group());
      items.resize(std::max(items.size(), static_cast<size_t>(item.chain) + 1));
      ++items[static_cast<size_t>(item.chain)];
    }
    const size_t count = std::min(most_beside_, items.size());
    for (size_t i = 0; i < count; ++i) slots_.push_back(std::make_unique<Slot<T>>(rows, sizes_.key_width, arena_));
    items_before_ = items_before(items, count);
  }

  Slot<T>* slot_of(const Item& item) const {
    return item.chain < 0 ? nullptr : slots_[static_cast<size_t>(item.chain) % slots_.size()].get();
  }

  void compute_deltas() {
    struct Part {
      const AttentionBlock* block;
      TileRows rows;
    };
    std::vector<Part> parts;
    for (const AttentionBlock& block : args_.blocks) {
      if (computes_deltas(KeyGrid(block, sizes_.key_block))) continue;
      const int64_t rows = block.q_count * args_.shape.group();
      for (int64_t h = 0; h < args_.shape.kv_heads; ++h) {
        for (int64_t r = 0; r < rows; r += sizes_.tile_rows) parts.push_back({&block, tile_rows(block, h, r)});
      }
    }
    args_.parallel->run(static_cast<int64_t>(parts.size()), [&](int64_t item, int thread) {
      const auto& [block, rows] = parts[static_cast<size_t>(item)];
      Scratch<E>& scratch = *scratch_[static_cast<size_t>(thread)];
      compute_delta(rows, *block, scratch);
      rows.each([&](int64_t r, int64_t row, int64_t head) { number<T>(block->delta, row, head) = scratch.delta()[r]; });
    });
  }

  void compute_delta(const TileRows& rows, const AttentionBlock& block, Scratch<E>& scratch) const {
    const int64_t width = sizes_.value_dim;
    const Packed<T> some_out = scratch.some_out, some_dout = scratch.some_dout;
    for (int64_t begin = 0; begin < rows.count; begin += kSomeRows) {
      const TileRows some{rows.begin + begin, std::min(kSomeRows, rows.count - begin), rows.group, rows.first_head};
      pack_sums(some, args_.shape.dtype, block.out, width, some_out);
      pack_sums(some, args_.shape.dtype, block.dout, width, some_dout);
      isa_.dot_rows(some_out, some_dout, some.count, width, scratch.delta() + begin);
    }
  }

  void pack_sums(const TileRows& rows, DType type, const Rows& from, int64_t width, Packed<T> dst) const {
    rows.each_run(type, from, [&](int64_t r, int64_t count, const Strided& src) {
      isa_.pack_sums(src, count, width, T{1}, below(dst, r));
    });
  }

  std::atomic<int64_t>& finished(int64_t block, int64_t kv_head) {
    return finished_[static_cast<size_t>(block * args_.shape.kv_heads + kv_head)];
  }

  void run_item(size_t index, Scratch<E>& scratch) {
    const Item& item = items_[index];
    const AttentionBlock& block = block_of(item);
    const KeyGrid grid(block, sizes_.key_block);
    const int64_t keys = pack_block(grid, item, scratch);
    Slot<T>* slot = slot_of(item);
    if (slot != nullptr) slot->turns.enter(items_before_[static_cast<size_t>(item.chain)]);

    const int64_t rows = block.q_count * args_.shape.group();
    for (int64_t begin = 0; begin < rows; begin += sizes_.tile_rows) {
      const TileRows tile = tile_rows(block, item.kv_head, begin);
      const Range met = key_blocks(tile, grid);
      if (item.key_block < met.begin || item.key_block >= met.end) continue;
      const bool starts = args_.all_keys && item.key_block == met.begin;
      const bool ends = args_.all_keys && item.key_block + 1 == met.end;
      run_tile(index, {tile, starts, ends}, grid, keys, scratch);
    }
    passed_[index].store(std::numeric_limits<int64_t>::max(), std::memory_order_release);
    if (slot != nullptr) slot->turns.leave();
    add_key_gradients(grid, item, scratch);
  }

  // Returns how many keys of the block are filled, from its start on.
  int64_t pack_block(const KeyGrid& grid, const Item& item, Scratch<E>& scratch) {
    const DType type = args_.shape.dtype;
    const Packed<E> k = scratch.k, v = scratch.v;
    const auto pack_rows = [&](Rows KeyRows::*which, int64_t width, Packed<E> dst) {
      return pack_keys(isa_, grid, item.key_block, sizes_.key_block, type, which, item.kv_head, width, T{1}, dst);
    };
    const Range filled = pack_rows(&KeyRows::k, sizes_.head_dim, k);
    pack_rows(&KeyRows::v, sizes_.value_dim, v);
    make_panels(isa_, k, filled, sizes_.key_depth, scratch.k_panels.get());
    make_panels(isa_, v, filled, sizes_.value_depth, scratch.v_panels.get());
    if constexpr (kTerms<E> == 1) {
      multiply(below(k, filled.begin), filled.size(), factors_.k);
    } else {
      pair_rows(isa_, k, filled, sizes_.key_width, Packed<E>(scratch.k_pairs));
    }
    for (int64_t i = 0; i < filled.end; ++i) {
      std::fill_n(scratch.dk.row(i), sizes_.key_width, T{0});
      std::fill_n(scratch.dv.row(i), sizes_.value_width, T{0});
    }
    return filled.end;
  }

  // Rows of keys, or of their gradients, times a factor, in place.
  void multiply(Packed<T> rows, int64_t count, T factor) const {
    if (factor == 1) return;
    isa_.pack_sums({sizeof(T) == 8 ? DType::f64 : DType::f32, rows.data, rows.ld, 1}, count, sizes_.head_dim, factor,
                   rows);
  }

  TileRows tile_rows(const AttentionBlock& block, int64_t kv_head, int64_t begin) const {
    const int64_t group = args_.shape.group();
    return {begin, std::min(sizes_.tile_rows, block.q_count * group - begin), group, kv_head * group};
  }

  // While a tile is worked on, its dq is fetched, and the next tile's rows; or, after the last, where dk and dv go, and
  // what this thread will probably work on next: as many items further on as there are threads.
  void look_ahead(size_t index, const Meeting& tile, const KeyGrid& grid, Scratch<E>& scratch) const {
    const Item& item = items_[index];
    const AttentionBlock& block = block_of(item);
    auto& spans = scratch.spans;
    spans.clear();
    if (const Slot<T>* slot = slot_of(item)) {
      const Packed<T> dq = below(Packed<T>(slot->dq), tile.rows.begin);
      spans.push_back({reinterpret_cast<const char*>(dq.data), tile.rows.count * dq.ld * int64_t{sizeof(T)}});
    }
    if (writes_dq(item, tile)) append_spans(tile.rows, type_of_dq(tile), block.dq, sizes_.head_dim, spans);
    const int64_t next = tile.rows.begin + tile.rows.count;
    const auto next_item = static_cast<int64_t>(index + scratch_.size());
    if (next < block.q_count * args_.shape.group()) {
      append_rows(item, grid, next, spans);
    } else {
      append_spans(grid, item.key_block, key_gradients(), &KeyRows::dk, item.kv_head, sizes_.head_dim, spans);
      append_spans(grid, item.key_block, key_gradients(), &KeyRows::dv, item.kv_head, sizes_.value_dim, spans);
      if (next_item < static_cast<int64_t>(items_.size())) append_item(items_[static_cast<size_t>(next_item)], spans);
    }
    scratch.ahead = Ahead(spans);
  }

  void append_rows(const Item& item, const KeyGrid& grid, int64_t begin, std::vector<Ahead::Span>& spans) const {
    const AttentionBlock& block = block_of(item);
    const TileRows rows = tile_rows(block, item.kv_head, begin);
    if (computes_deltas(grid)) append_spans(rows, args_.shape.dtype, block.out, sizes_.value_dim, spans);
    append_spans(rows, args_.shape.dtype, block.q, sizes_.head_dim, spans);
    append_spans(rows, args_.shape.dtype, block.dout, sizes_.value_dim, spans);
  }

  void append_item(const Item& item, std::vector<Ahead::Span>& spans) const {
    const KeyGrid grid(block_of(item), sizes_.key_block);
    append_spans(grid, item.key_block, args_.shape.dtype, &KeyRows::k, item.kv_head, sizes_.head_dim, spans);
    append_spans(grid, item.key_block, args_.shape.dtype, &KeyRows::v, item.kv_head, sizes_.value_dim, spans);
    if (item.previous < 0) append_rows(item, grid, 0, spans);
  }

  // Key blocks from the first that a row of the tile sees to the last; one in any case.
  Range key_blocks(const TileRows& tile, const KeyGrid& grid) const {
    const Range seen{grid.seen(tile.row(0)).begin, grid.seen(tile.row(tile.count - 1)).end};
    const int64_t last = grid.first() + std::max<int64_t>(grid.count() - 1, 0);
    const int64_t begin = std::clamp(seen.begin / sizes_.key_block, grid.first(), last);
    return {begin, std::clamp((seen.end - 1) / sizes_.key_block, begin, last) + 1};
  }

  // Which keys of the block each row of the tile sees; false if none does.
  bool find_keys(const TileRows& tile, const KeyGrid& grid, int64_t key_block, Scratch<E>& scratch) const {
    const int64_t from = key_block * sizes_.key_block;
    Range seen;
    int64_t last_row = -1;
    bool any = false;
    tile.each([&](int64_t r, int64_t row, int64_t) {
      if (row != last_row) seen = grid.seen(row);
      last_row = row;
      const auto i = static_cast<size_t>(r);
      scratch.first_key[i] = static_cast<int32_t>(std::clamp<int64_t>(seen.begin - from, 0, sizes_.key_block));
      scratch.end_key[i] = static_cast<int32_t>(std::clamp<int64_t>(seen.end - from, 0, sizes_.key_block));
      any |= scratch.first_key[i] < scratch.end_key[i];
    });
    return any;
  }

  // Which rows see each key: from the first whose range ends behind the key to the last whose range begins before.
  static void find_rows(int64_t rows, int64_t keys, Scratch<E>& scratch) {
    int32_t first = 0, end = 0;
    for (int32_t key = 0; key < keys; ++key) {
      while (first < rows && scratch.end_key[static_cast<size_t>(first)] <= key) ++first;
      while (end < rows && scratch.first_key[static_cast<size_t>(end)] <= key) ++end;
      scratch.first_row[static_cast<size_t>(key)] = first;
      scratch.end_row[static_cast<size_t>(key)] = std::max(first, end);
    }
  }

  void run_tile(size_t index, const Meeting& tile, const KeyGrid& grid, int64_t key_count, Scratch<E>& scratch) {
    const Item& item = items_[index];
    const TileRows& rows = tile.rows;
    const bool any = find_keys(rows, grid, item.key_block, scratch);
    const Seen seen{scratch.first_key.data(), scratch.end_key.data(), scratch.first_row.data(), scratch.end_row.data()};
    const BackwardTile<E> queries = scratch.tile(rows.count, factors_);
    const BackwardKeys<E> keys = scratch.keys(key_count);
    if (any) {
      find_rows(rows.count, key_count, scratch);
      pack_rows(rows, block_of(item), computes_deltas(grid), scratch);
      look_ahead(index, tile, grid, scratch);
      isa_.backward(sizes_, seen, keys, queries);
    }
    if (item.previous >= 0) {
      const auto& passed = passed_[static_cast<size_t>(item.previous)];
      wait_until([&] { return passed.load(std::memory_order_acquire) > rows.begin; });
    }
    if (any || tile.starts || tile.ends) {
      const Slot<T>* slot = slot_of(item);
      const Packed<T> dq = slot == nullptr ? Packed<T>(scratch.dq) : below(Packed<T>(slot->dq), rows.begin);
      start_dq(item, tile, dq);
      if (any) isa_.backward_dq(sizes_, seen, keys, queries, dq);
      if (writes_dq(item, tile)) {
        unpack_tile(isa_, rows, dq, scratch.ones.data(), sizes_.head_dim, type_of_dq(tile), block_of(item).dq);
      }
    }
    passed_[index].store(rows.begin + 1, std::memory_order_release);
  }

  void pack_rows(const TileRows& rows, const AttentionBlock& block, bool needs_delta, Scratch<E>& scratch) {
    const DType type = args_.shape.dtype;
    const Packed<E> q = scratch.q, dout = scratch.dout;
    pack_tile(isa_, rows, type, block.q, sizes_.head_dim, factors_.q, q);
    pack_tile(isa_, rows, type, block.dout, sizes_.value_dim, T{1}, dout);
    if constexpr (kTerms<E> != 1) {
      pair_rows(isa_, q, {0, rows.count}, sizes_.key_width, Packed<E>(scratch.q_pairs));
      pair_rows(isa_, dout, {0, rows.count}, sizes_.value_width, Packed<E>(scratch.dout_pairs));
    }
    if (needs_delta) compute_delta(rows, block, scratch);
    rows.each([&](int64_t r, int64_t row, int64_t head) {
      const T factor = sees_one_key(block, row, args_.all_keys) ? T{0} : factors_.ds;
      scratch.ds_factor()[r] = factor;
      scratch.delta()[r] = factor * (needs_delta ? scratch.delta()[r] : number<T>(block.delta, row, head));
      const T lse = number<T>(block.lse, row, head);
      // A row without weights: relative to infinity all of them are 0.
      scratch.lse()[r] = lse == Partial<T>::kNothing ? -lse : static_cast<T>(lse * kLog2E);
    });
  }

  void start_dq(const Item& item, const Meeting& tile, Packed<T> dq) const {
    if (tile.starts) {
      for (int64_t r = 0; r < tile.rows.count; ++r) std::fill_n(dq.row(r), sizes_.key_width, T{0});
    } else if (slot_of(item) == nullptr) {
      pack_sums(tile.rows, accumulator(args_.shape.dtype), block_of(item).dq, sizes_.head_dim, dq);
    }
  }

  // After a key block; what lies in a slot is written by the last.
  bool writes_dq(const Item& item, const Meeting& tile) const { return tile.ends || slot_of(item) == nullptr; }
  DType type_of_dq(const Meeting& tile) const { return tile.ends ? args_.shape.dtype : accumulator(args_.shape.dtype); }

  void add_key_gradients(const KeyGrid& grid, const Item& item, Scratch<E>& scratch) {
    for (const int32_t before : shared_.before(static_cast<size_t>(item.block))) {
      const int64_t items = items_of(KeyGrid(args_.blocks[static_cast<size_t>(before)], sizes_.key_block));
      wait_until([&] { return finished(before, item.kv_head).load(std::memory_order_acquire) == items; });
    }
    const int64_t from = item.key_block * sizes_.key_block;
    const Range held = grid.held(item.key_block);
    multiply(below(Packed<T>(scratch.dk), held.begin - from), held.size(), factors_.dk);
    const auto put = [&](Packed<T> rows, int64_t count, int64_t width, const Rows& to, int64_t row) {
      const Strided dst = at(key_gradients(), to, row, item.kv_head, to.row);
      if (args_.all_queries) return isa_.unpack(rows, scratch.ones.data(), count, width, dst);
      isa_.add(rows, count, width, dst);
    };
    grid.each_run(item.key_block, [&](int64_t r, const KeyRows& piece, int64_t row, int64_t count) {
      put(below(Packed<T>(scratch.dk), r), count, sizes_.head_dim, piece.dk, row);
      put(below(Packed<T>(scratch.dv), r), count, sizes_.value_dim, piece.dv, row);
    });
    finished(item.block, item.kv_head).fetch_add(1, std::memory_order_release);
  }

  const BackwardArgs& args_;
  const Isa<E>& isa_;
  const Factors<E> factors_;
  const Sizes sizes_;
  const SharedKeys shared_;
  std::vector<Item> items_;
  std::vector<std::atomic<int64_t>> passed_;    // per item: one more than the first row of the last tile it has passed
  std::vector<std::atomic<int64_t>> finished_;  // per block and KV head: key blocks whose dk and dv are added
  size_t most_beside_ = 0;
  std::vector<int64_t> items_before_;  // per chain with a slot: items of earlier chains in the same slot
  Arena arena_;
  std::vector<std::unique_ptr<Slot<T>>> slots_;
  std::vector<std::unique_ptr<Scratch<E>>> scratch_;
};

}  // namespace

template <class E>
void run_backward(const BackwardArgs& args, const Isa<E>& isa) {
  Backward<E>(args, isa).run();
}

template void run_backward(const BackwardArgs&, const Isa<float>&);
template void run_backward(const BackwardArgs&, const Isa<double>&);
template void run_backward(const BackwardArgs&, const Isa<Pair>&);

}  // namespace blockcp::cpu
