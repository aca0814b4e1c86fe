// Elements of the four storage types, one at a time: slow, simple, and the same on every machine.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "blockcp/base/dtype.h"
#include "blockcp/kernels/attention.h"

namespace blockcp {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

// Nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float to_float(f16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (magnitude << 13));
  // 2^112 moves the exponent from one bias to the other; denormals come out right because the product is exact.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

// Nearest, ties to even; NaN stays NaN, what is too large becomes infinite.
inline f16 to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float size = std::fabs(x);
  if (x != x) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (size < 0x1p-14f) {  // denormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(size + 0.5f) - 0x3f000000))};
  }
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - (uint32_t{112} << 23)) >> 13))};
}

inline double load(DType type, const void* data, int64_t index) {
  switch (type) {
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::bf16:
      return to_float(static_cast<const bf16*>(data)[index]);
    case DType::f16:
      return to_float(static_cast<const f16*>(data)[index]);
  }
  return 0;
}

inline void store(DType type, void* data, int64_t index, double value) {
  switch (type) {
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      return;
    case DType::f64:
      static_cast<double*>(data)[index] = value;
      return;
    case DType::bf16:
      static_cast<bf16*>(data)[index] = to_bf16(static_cast<float>(value));
      return;
    case DType::f16:
      static_cast<f16*>(data)[index] = to_f16(static_cast<float>(value));
      return;
  }
}

inline int64_t offset(const Rows& rows, int64_t row, int64_t head, int64_t col = 0) {
  return row * rows.row + head * rows.head + col * rows.col;
}
inline double load(DType type, const Rows& rows, int64_t row, int64_t head, int64_t col = 0) {
  return load(type, rows.data, offset(rows, row, head, col));
}
inline void store(DType type, const Rows& rows, int64_t row, int64_t head, int64_t col, double value) {
  store(type, rows.data, offset(rows, row, head, col), value);
}

}  // namespace blockcp
