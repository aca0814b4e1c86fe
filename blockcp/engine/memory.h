// Scratch memory of one call: aligned for vectors, with nothing in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "blockcp/base/huge_pages.h"

namespace blockcp {

inline constexpr int64_t kAlignment = 64;

inline int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes) {
    if (bytes <= 0) return;
    data_.reset(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kAlign)));
    advise_huge_pages(data_.get(), bytes);
  }
  std::byte* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlign{kAlignment};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlign); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace blockcp
