// Words for messages.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace blockcp {

// "1 row", "3 rows".
std::string counted(int64_t count, std::string_view thing);

// What a user wrote, between quotation marks: unprintable bytes as \x00, and no more than the first 80.
std::string shown(std::string_view text);

}  // namespace blockcp
