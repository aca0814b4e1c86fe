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

template <class T>
void forward(const Sizes& sizes, const Seen& seen, const T* k_panels, Packed<T> v, ForwardTile<T>& tile) {
  multiply_panels(tile.q, sizes.head_dim, k_panels, sizes.key_width, seen, tile.rows, sizes.key_block, tile.weights,
                  tile.ahead);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t first = seen.first_key[r], end = seen.end_key[r];
    tile.keep[r] = first < end ? soften(tile.weights.row(r), first, end, tile.top[r], tile.sum[r]) : T{1};
  }
  accumulate<T, Along::columns>(tile.weights, v, tile.out, tile.keep, seen.first_key, seen.end_key, tile.rows,
                                sizes.value_width, tile.ahead);
}

template <class T>
void backward(const Sizes& sizes, const Seen& seen, const BackwardKeys<T>& keys, const BackwardTile<T>& tile) {
  multiply_panels(tile.q, sizes.head_dim, keys.k_panels, sizes.key_width, seen, tile.rows, sizes.key_block, tile.p,
                  *tile.ahead);
  multiply_panels(tile.dout, sizes.value_dim, keys.v_panels, sizes.value_width, seen, tile.rows, sizes.key_block,
                  tile.ds, *tile.ahead);
  for (int64_t r = 0; r < tile.rows; ++r) {
    if (seen.first_key[r] >= seen.end_key[r]) continue;
    weigh(tile.p.row(r), tile.ds.row(r), seen.first_key[r], seen.end_key[r], tile.lse[r], tile.delta[r],
          tile.through[r]);
  }
  accumulate<T, Along::rows>(tile.p, tile.dout, keys.dv, keys.ones, seen.first_row, seen.end_row, keys.count,
                             sizes.value_width, *tile.ahead);
  accumulate<T, Along::rows>(tile.ds, tile.q, keys.dk, keys.ones, seen.first_row, seen.end_row, keys.count,
                             sizes.key_width, *tile.ahead);
}

template <class T>
void backward_dq(const Sizes& sizes, const Seen& seen, const BackwardKeys<T>& keys, const BackwardTile<T>& tile,
                 Packed<T> dq) {
  accumulate<T, Along::columns>(tile.ds, keys.k, dq, keys.ones, seen.first_key, seen.end_key, tile.rows,
                                sizes.key_width, *tile.ahead);
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
