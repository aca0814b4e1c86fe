// One query tile against one key block, forward and backward.
#if defined(BLOCKCP_CPU_TILES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKCP_CPU_TILES_INL_H
#undef BLOCKCP_CPU_TILES_INL_H
#else
#define BLOCKCP_CPU_TILES_INL_H
#endif

#include <hwy/highway.h>

#include "blockcp/kernels/cpu/product-inl.h"
#include "blockcp/kernels/cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {

// Packed sums that have become elements in place.
template <class E>
HWY_INLINE Packed<E> as_elements(Packed<Sum<E>> rows) {
  return {reinterpret_cast<E*>(rows.data), rows.ld};
}

template <class E>
void forward(const Sizes& sizes, const Seen& seen, const E* k_panels, Packed<E> v_terms, const ForwardTile<E>& tile) {
  const Put<E> put{tile.weights};
  const auto put_scores = [&]() HWY_ATTR {
    multiply_panels(tile.q, sizes.head_dim, k_panels, sizes.key_depth, seen, tile.rows, sizes.key_block, *tile.ahead,
                    put);
  };
  const auto add_values = [&](const auto& finish) HWY_ATTR {
    accumulate<E, Along::columns>(as_elements<E>(tile.weights), v_terms, seen.first_key, seen.end_key, tile.rows,
                                  sizes.value_width, *tile.ahead, finish);
  };

  Softmax<E> softmax(seen, tile);
  softmax.start();
  if constexpr (Softmax<E>::kInRegisters) {
    const PanelProduct<E> product(tile.q, sizes.head_dim, k_panels, sizes.key_depth, *tile.ahead);
    const auto put_weights = [&](int64_t row, int64_t height, int64_t begin, int64_t end) HWY_ATTR {
      if (softmax.all_see(row, height, begin, end)) return product.run(row, height, begin, end, softmax.put_weights());
      product.run(row, height, begin, end, put);
      softmax.weigh_rows(row, height, begin, end);
    };
    each_panel_tile<E>(seen, tile.rows, sizes.key_block, put_weights);
  } else {
    put_scores();
    softmax.weigh_rows(0, tile.rows, 0, sizes.key_block);
  }
  if (softmax.finish()) return add_values(AddTo<E>{tile.out});
  put_scores();
  softmax.run();
  add_values(KeepAndAdd<E>{tile.out, tile.keep});
}

template <class E>
void backward(const Sizes& sizes, const Seen& seen, const BackwardKeys<E>& keys, const BackwardTile<E>& tile) {
  multiply_panels(tile.q, sizes.head_dim, keys.k_panels, sizes.key_depth, seen, tile.rows, sizes.key_block, *tile.ahead,
                  PutP<E>{tile.p, tile.lse, tile.score_factor});
  multiply_panels(tile.dout, sizes.value_dim, keys.v_panels, sizes.value_depth, seen, tile.rows, sizes.key_block,
                  *tile.ahead, PutDs<E>{tile.p, tile.ds, tile.ds_rows, tile.ds_factor, tile.delta});
  // Rows that hold kTerms<E> rows of the tile each.
  const auto over_rows = [](Packed<Sum<E>> rows) { return Packed<E>{as_elements<E>(rows).data, kTerms<E> * rows.ld}; };
  accumulate<E, Along::rows>(over_rows(tile.p), tile.dout_terms, seen.first_row, seen.end_row, keys.count,
                             sizes.value_width, *tile.ahead, AddTo<E>{keys.dv});
  accumulate<E, Along::rows>(over_rows(tile.ds), tile.q_terms, seen.first_row, seen.end_row, keys.count,
                             sizes.key_width, *tile.ahead, AddTo<E>{keys.dk});
}

template <class E>
void backward_dq(const Sizes& sizes, const Seen& seen, const BackwardKeys<E>& keys, const BackwardTile<E>& tile,
                 Packed<Sum<E>> dq) {
  accumulate<E, Along::columns>(tile.ds_rows, keys.k_terms, seen.first_key, seen.end_key, tile.rows, sizes.key_width,
                                *tile.ahead, AddTo<E>{dq});
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
