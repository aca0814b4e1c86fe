// Between callers' tensors (any type, any strides) and packed memory (T, whole vectors).
#if defined(BLOCKCP_CPU_PACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKCP_CPU_PACK_INL_H
#undef BLOCKCP_CPU_PACK_INL_H
#else
#define BLOCKCP_CPU_PACK_INL_H
#endif

#include <hwy/highway.h>

#include "blockcp/kernels/cpu/product-inl.h"
#include "blockcp/kernels/element.h"

HWY_BEFORE_NAMESPACE();
namespace blockcp::cpu::HWY_NAMESPACE {

HWY_INLINE float widened(float x) { return x; }
HWY_INLINE double widened(double x) { return x; }
HWY_INLINE float widened(bf16 x) { return to_float(x); }
HWY_INLINE float widened(f16 x) { return to_float(x); }

template <class S, class T>
HWY_INLINE S narrowed(T x) {
  if constexpr (sizeof(S) != 2) {
    return x;
  } else if constexpr (__is_same(S, bf16)) {
    return to_bf16(x);
  } else {
    return to_f16(x);
  }
}

// The name that Highway has for a type of two bytes.
template <class S>
struct HwyType {
  using type = S;
};
template <>
struct HwyType<bf16> {
  using type = hwy::bfloat16_t;
};
template <>
struct HwyType<f16> {
  using type = hwy::float16_t;
};

template <class T, class S>
HWY_INLINE hn::Vec<Tag<T>> load_vector(const S* from) {
  const Tag<T> tag;
  if constexpr (__is_same(S, T)) {
    return hn::LoadU(tag, from);
  } else {
    using Half = typename HwyType<S>::type;
    return hn::PromoteTo(tag, hn::LoadU(hn::Rebind<Half, Tag<T>>(), reinterpret_cast<const Half*>(from)));
  }
}

template <class T, class S>
HWY_INLINE void store_vector(hn::Vec<Tag<T>> value, S* to) {
  const Tag<T> tag;
  if constexpr (__is_same(S, T)) {
    hn::StoreU(value, tag, to);
  } else if constexpr (__is_same(S, f16)) {
    hn::StoreU(hn::DemoteTo(hn::Rebind<hwy::float16_t, Tag<T>>(), value), hn::Rebind<hwy::float16_t, Tag<T>>(),
               reinterpret_cast<hwy::float16_t*>(to));
  } else {
    // To nearest, ties to even; NaN keeps its upper half, made quiet.
    const hn::RebindToUnsigned<Tag<T>> bits;
    const auto raw = hn::BitCast(bits, value);
    const auto odd = hn::And(hn::ShiftRight<16>(raw), hn::Set(bits, 1));
    const auto rounded = hn::Add(hn::Add(raw, hn::Set(bits, 0x7fff)), odd);
    const auto quiet = hn::Or(raw, hn::Set(bits, 0x400000));
    const auto chosen = hn::IfThenElse(hn::RebindMask(bits, hn::IsNaN(value)), quiet, rounded);
    const hn::Rebind<uint16_t, Tag<T>> half;
    hn::StoreU(hn::TruncateTo(half, hn::ShiftRight<16>(chosen)), half, reinterpret_cast<uint16_t*>(to));
  }
}

template <class T, class S>
void pack_as(const S* src, int64_t row, int64_t col, int64_t count, int64_t width, T factor, Packed<T> dst) {
  const Tag<T> tag;
  const auto factors = hn::Set(tag, factor);
  for (int64_t i = 0; i < count; ++i, src += row) {
    T* to = dst.row(i);
    int64_t c = 0;
    if (col == 1 && kLanes < T >> 1) {
      for (; c + kLanes<T> <= width; c += kLanes<T>) {
        hn::Store(hn::Mul(load_vector<T>(src + c), factors), tag, to + c);
      }
    }
    for (; c < width; ++c) to[c] = static_cast<T>(widened(src[c * col])) * factor;
    for (; c % kLanes<T> != 0; ++c) to[c] = 0;
  }
}

template <class T, class S>
void unpack_as(Packed<T> src, const T* factor, int64_t count, int64_t width, S* dst, int64_t row, int64_t col) {
  const Tag<T> tag;
  for (int64_t i = 0; i < count; ++i, dst += row) {
    const T* from = src.row(i);
    int64_t c = 0;
    if (col == 1 && kLanes < T >> 1) {
      const auto factors = hn::Set(tag, factor[i]);
      for (; c + kLanes<T> <= width; c += kLanes<T>) {
        store_vector<T>(hn::Mul(hn::Load(tag, from + c), factors), dst + c);
      }
    }
    for (; c < width; ++c) dst[c * col] = narrowed<S>(from[c] * factor[i]);
  }
}

template <class T>
void pack_terms(const Strided& src, int64_t count, int64_t width, T factor, Packed<T> dst) {
  if (src.type == (sizeof(T) == 8 ? DType::f64 : DType::f32)) {
    return pack_as(static_cast<const T*>(src.data), src.row, src.col, count, width, factor, dst);
  }
  if constexpr (sizeof(T) == 4) {
    if (src.type == DType::bf16) {
      pack_as(static_cast<const bf16*>(src.data), src.row, src.col, count, width, factor, dst);
    } else {
      pack_as(static_cast<const f16*>(src.data), src.row, src.col, count, width, factor, dst);
    }
  }
}

// Pairs of what lies side by side, zero beyond the width.
HWY_INLINE void pack_pairs(const bf16* src, int64_t row, int64_t col, int64_t count, int64_t width, Packed<Pair> dst) {
  const hn::ScalableTag<uint16_t> tag;
  const int64_t step = static_cast<int64_t>(hn::Lanes(tag));
  for (int64_t i = 0; i < count; ++i, src += row) {
    auto* to = &dst.row(i)->low;
    int64_t c = 0;
    for (; col == 1 && c + step <= width; c += step) {
      hn::Store(hn::LoadU(tag, reinterpret_cast<const uint16_t*>(src + c)), tag, to + c);
    }
    for (; c < width; ++c) to[c] = src[c * col].bits;
    for (; c % step != 0; ++c) to[c] = 0;
  }
}

template <class E>
void pack(const Strided& src, int64_t count, int64_t width, Sum<E> factor, Packed<E> dst) {
  if constexpr (kTerms<E> != 1) {
    return pack_pairs(static_cast<const bf16*>(src.data), src.row, src.col, count, width, dst);
  } else {
    pack_terms(src, count, width, factor, dst);
  }
}

template <class T>
void unpack(Packed<T> src, const T* factor, int64_t count, int64_t width, const Strided& dst) {
  if (dst.type == (sizeof(T) == 8 ? DType::f64 : DType::f32)) {
    return unpack_as(src, factor, count, width, static_cast<T*>(dst.data), dst.row, dst.col);
  }
  if constexpr (sizeof(T) == 4) {
    if (dst.type == DType::bf16) {
      unpack_as(src, factor, count, width, static_cast<bf16*>(dst.data), dst.row, dst.col);
    } else {
      unpack_as(src, factor, count, width, static_cast<f16*>(dst.data), dst.row, dst.col);
    }
  }
}

template <class T>
void dot_rows(Packed<T> a, Packed<T> b, int64_t count, int64_t width, T* results) {
  const Tag<T> tag;
  for (int64_t i = 0; i < count; ++i) {
    auto sums = hn::Zero(tag);
    for (int64_t c = 0; c < width; c += kLanes<T>) {
      sums = hn::MulAdd(hn::Load(tag, a.row(i) + c), hn::Load(tag, b.row(i) + c), sums);
    }
    results[i] = hn::GetLane(hn::SumOfLanes(tag, sums));
  }
}

template <class T>
void add(Packed<T> src, int64_t count, int64_t width, const Strided& dst) {
  const Tag<T> tag;
  T* to = static_cast<T*>(dst.data);
  for (int64_t i = 0; i < count; ++i, to += dst.row) {
    const T* from = src.row(i);
    int64_t c = 0;
    if (dst.col == 1 && kLanes < T >> 1) {
      for (; c + kLanes<T> <= width; c += kLanes<T>) {
        hn::StoreU(hn::Add(hn::LoadU(tag, to + c), hn::Load(tag, from + c)), tag, to + c);
      }
    }
    for (; c < width; ++c) to[c * dst.col] += from[c];
  }
}

#if HWY_TARGET == HWY_SCALAR
template <class T>
HWY_INLINE void transpose_block(const T* rows, int64_t, T* columns, int64_t) {
  columns[0] = rows[0];
}
#else
// A vector whose 16-byte blocks come from rows `step` apart.
template <class D, class T>
HWY_INLINE hn::Vec<D> load_blocks(D tag, const T* from, int64_t step) {
  if constexpr (HWY_MAX_BYTES == 16 || sizeof(T) * hn::MaxLanes(D()) <= 16) {
    return hn::Load(tag, from);
  } else {
    const hn::Half<D> half;
    constexpr int64_t kBlocks = static_cast<int64_t>(sizeof(T) * hn::MaxLanes(D()) / 16);
    return hn::Combine(tag, load_blocks(half, from + kBlocks / 2 * step, step), load_blocks(half, from, step));
  }
}

// columns[c][i] = rows[i][c] for one vector of rows and one 16-byte block of columns.
template <class T>
HWY_INLINE void transpose_block(const T* rows, int64_t ld, T* columns, int64_t step) {
  const Tag<T> tag;
  if constexpr (sizeof(T) == 8) {
    const auto a = load_blocks(tag, rows, 2 * ld), b = load_blocks(tag, rows + ld, 2 * ld);
    hn::Store(hn::InterleaveLower(tag, a, b), tag, columns);
    hn::Store(hn::InterleaveUpper(tag, a, b), tag, columns + step);
  } else {
    const auto a = load_blocks(tag, rows, 4 * ld), b = load_blocks(tag, rows + ld, 4 * ld);
    const auto c = load_blocks(tag, rows + 2 * ld, 4 * ld), d = load_blocks(tag, rows + 3 * ld, 4 * ld);
    const auto ac = hn::InterleaveLower(tag, a, c), bd = hn::InterleaveLower(tag, b, d);
    const auto ac2 = hn::InterleaveUpper(tag, a, c), bd2 = hn::InterleaveUpper(tag, b, d);
    hn::Store(hn::InterleaveLower(tag, ac, bd), tag, columns);
    hn::Store(hn::InterleaveUpper(tag, ac, bd), tag, columns + step);
    hn::Store(hn::InterleaveLower(tag, ac2, bd2), tag, columns + 2 * step);
    hn::Store(hn::InterleaveUpper(tag, ac2, bd2), tag, columns + 3 * step);
  }
}
#endif

template <class E>
void make_panels(Packed<E> rows, int64_t count, int64_t depth, E* panels) {
  using T = Sum<E>;
  constexpr int64_t kBlock = kLanes<T> == 1 ? 1 : 16 / sizeof(T);
  const Packed<T> from{reinterpret_cast<T*>(rows.data), rows.ld};
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    T* columns = reinterpret_cast<T*>(panels) + i / kPanel<T> * kPanel<T> * depth + i % kPanel<T>;
    for (int64_t c = 0; c < depth; c += kBlock) {
      transpose_block(from.row(i) + c, from.ld, columns + c * kPanel<T>, kPanel<T>);
    }
  }
}

template <class E>
void pair_rows(Packed<E> rows, int64_t count, int64_t width, Packed<E> dst) {
  const hn::ScalableTag<uint32_t> tag;
  const hn::Rebind<uint16_t, decltype(tag)> half;
  for (int64_t i = 0; i < count; i += 2) {
    const uint16_t *low = &rows.row(i)->low, *high = &rows.row(i + 1)->low;
    for (int64_t c = 0; c < width; c += kLanes<uint32_t>) {
      const auto above = i + 1 == count ? hn::Zero(tag) : hn::PromoteTo(tag, hn::Load(half, high + c));
      hn::Store(hn::Or(hn::PromoteTo(tag, hn::Load(half, low + c)), hn::ShiftLeft<16>(above)), tag,
                reinterpret_cast<uint32_t*>(dst.row(i / 2) + c));
    }
  }
}

}  // namespace blockcp::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
