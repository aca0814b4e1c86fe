#include "blockcp/base/text.h"

#include <fmt/format.h>

namespace blockcp {

std::string counted(int64_t count, std::string_view thing) {
  return fmt::format("{} {}{}", count, thing, count == 1 ? "" : "s");
}

std::string shown(std::string_view text) {
  constexpr size_t kShown = 80;
  std::string line = "\"";
  for (const char c : text.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f)
      line += fmt::format("\\x{:02x}", byte);
    else
      line += c;
  }
  return line + (text.size() > kShown ? "...\"" : "\"");
}

}  // namespace blockcp
