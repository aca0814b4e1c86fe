// Moves bytes between the ranks of a group. One verb, and a small gather for control.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace blockcp {

// Bytes for and from every rank, back to back by ascending rank; none for the rank itself.
struct Exchange {
  const std::byte* send = nullptr;
  std::span<const int64_t> send_bytes;  // [world]
  std::byte* recv = nullptr;
  std::span<const int64_t> recv_bytes;  // [world]
  std::string what;                     // for errors: "step 3 of 7"
};

class Pending {
 public:
  // Waits and forgets the result where nobody called wait().
  virtual ~Pending() = default;
  // Returns when the received bytes are there and the sent ones may be overwritten. Throws Error(system) that names
  // the peer, the bytes and `what` on a fault.
  virtual void wait() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  // Every rank of the group calls it, in the same order, perhaps with nothing to move. Both buffers stay alive and the
  // received bytes unread until wait(). Several may be under way.
  virtual std::unique_ptr<Pending> exchange(const Exchange& exchange) = 0;

  // The same small record from every rank, [world * mine.size()].
  virtual std::vector<std::byte> gather(std::span<const std::byte> mine) = 0;

  // Bytes this rank has sent and received through exchange() since it was made.
  int64_t bytes_sent() const { return bytes_sent_; }
  int64_t bytes_received() const { return bytes_received_; }

 protected:
  void count(const Exchange& exchange);

 private:
  int64_t bytes_sent_ = 0, bytes_received_ = 0;
};

// "640 B", "12.5 MiB".
std::string bytes_text(int64_t bytes);

// "[transport] rank 2 of 8 waited 30.0 s for 12.5 MiB from rank 1 in step 3 of 7. Is rank 1 alive?"
std::string waited_text(const Transport& transport, double seconds, int64_t bytes, int peer, std::string_view what);

}  // namespace blockcp
