// Scratch memory of one call: aligned for vectors, with nothing in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "blockcp/base/huge_pages.h"

namespace blockcp {

inline constexpr int64_t kAlignment = 64;

constexpr int64_t divide_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
constexpr int64_t round_up(int64_t n, int64_t unit) { return divide_up(n, unit) * unit; }
inline int64_t aligned(int64_t bytes) { return round_up(bytes, kAlignment); }

// Begins at a multiple of kAlignment, or of a huge page where it is large. That is cut out here, not asked for: aligned
// memory malloc often does not find again where it was freed, and maps and clears fresh memory in each call.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes) {
    if (bytes <= 0) return;
    const int64_t unit = bytes < kLeastOnHugePages ? kAlignment : kHugePage;
    owned_.reset(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes + unit))));
    const auto address = reinterpret_cast<intptr_t>(owned_.get());
    data_ = owned_.get() + (unit - address % unit);
    advise_huge_pages(data_, bytes);
  }
  std::byte* data() const { return data_; }

 private:
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data); }
  };
  std::unique_ptr<std::byte, Free> owned_;
  std::byte* data_ = nullptr;
};

}  // namespace blockcp
