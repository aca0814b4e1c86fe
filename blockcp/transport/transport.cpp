#include "blockcp/transport/transport.h"

#include <numeric>

#include "blockcp/base/error.h"

namespace blockcp {

void Transport::count(const Exchange& exchange) {
  const auto sum = [](std::span<const int64_t> bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
  };
  bytes_sent_ += sum(exchange.send_bytes);
  bytes_received_ += sum(exchange.recv_bytes);
}

std::string bytes_text(int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double amount = static_cast<double>(bytes) / 1024;
  const char* unit = "KiB";
  for (const char* larger : {"MiB", "GiB", "TiB"}) {
    if (amount < 1024) break;
    amount /= 1024;
    unit = larger;
  }
  return fmt::format("{:.1f} {}", amount, unit);
}

std::string waited_text(const Transport& transport, double seconds, int64_t bytes, int peer, std::string_view what) {
  return fmt::format("[transport] rank {} of {} waited {:.1f} s for {} from rank {} in {}. Is rank {} alive?",
                     transport.rank(), transport.world(), seconds, bytes_text(bytes), peer, what, peer);
}

}  // namespace blockcp
