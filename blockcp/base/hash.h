// The fingerprint of plans and schedules: FNV-1a over the values, equal on every machine of one byte order.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace blockcp {

class Hash {
 public:
  template <class T>
  requires std::is_integral_v<T> || std::is_enum_v<T> Hash& add(T value) { return bytes(static_cast<uint64_t>(value)); }
  Hash& add(std::string_view text) {
    add(text.size());
    for (char c : text) add(static_cast<unsigned char>(c));
    return *this;
  }
  uint64_t value() const { return state_; }

 private:
  Hash& bytes(uint64_t value) {
    for (int i = 0; i < 8; ++i, value >>= 8) state_ = (state_ ^ (value & 0xff)) * 0x100000001b3ull;
    return *this;
  }
  uint64_t state_ = 0xcbf29ce484222325ull;
};

}  // namespace blockcp
