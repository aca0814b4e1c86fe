// The one exception type of the library, and the helpers that throw it.
//
// A message is one line: "[place] what must hold, but what was seen (context). What to do." with values, units
// and ranks. `argument` is what the caller can mend (Python: ValueError), `system` is a fault of the machine,
// the network or a peer (Python: RuntimeError).
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace blockcp {

enum class ErrorKind { argument, system };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <class... Args>
[[noreturn]] void fail_argument(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::argument, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void fail_system(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorKind::system, fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
void check_argument(bool holds, fmt::format_string<Args...> format, Args&&... args) {
  if (!holds) fail_argument(format, std::forward<Args>(args)...);
}

}  // namespace blockcp
