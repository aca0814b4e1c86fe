// Element types of tensors, and the type in which sums over them are kept.
#pragma once

#include <cstdint>
#include <string_view>

namespace blockcp {

enum class DType : uint8_t { f32, f64, bf16, f16 };

constexpr int64_t size_of(DType type) { return type == DType::f64 ? 8 : type == DType::f32 ? 4 : 2; }

// Scores, softmax, merges and every sum over keys or ranks: fp64 for fp64, else fp32.
constexpr DType accumulator(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

constexpr std::string_view name(DType type) {
  constexpr std::string_view names[] = {"fp32", "fp64", "bf16", "fp16"};
  return names[static_cast<int>(type)];
}

// "fp32", "fp64", "bf16" or "fp16"; throws Error(argument) for anything else.
DType parse_dtype(std::string_view text);

}  // namespace blockcp
