// Fork-join over independent work items, handed in by whoever calls a kernel.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace blockcp {

class Parallel {
 public:
  virtual ~Parallel() = default;

  // How many threads take part, the calling one included; `thread` below is less than this.
  virtual int threads() const = 0;

  // Runs body(item, thread) for every item in [0, items) and returns when all are done. Threads pull items in
  // ascending order from one counter, so an item may wait for a lower one. The first exception is rethrown here
  // after all threads have stopped; items not yet started are then skipped.
  virtual void run(int64_t items, const std::function<void(int64_t item, int thread)>& body) = 0;
};

// Everything on the calling thread.
std::unique_ptr<Parallel> make_serial();

// A pool of `threads` (the caller counts as one; 0 means one per processor), started by the first run(). After fork()
// the child starts threads of its own. A pool that is at work, for another thread or further up this one's stack, does
// not queue: that caller runs its items alone.
std::unique_ptr<Parallel> make_pool(int threads);

// Runs `participate(thread)` on `threads` threads of another runtime and returns when all are done; a runtime that
// gives fewer threads is fine.
using ForkJoin = std::function<void(int threads, const std::function<void(int thread)>& participate)>;

// Borrows another runtime's threads (torch's, OpenMP's) through its fork-join.
std::unique_ptr<Parallel> make_borrowed(int threads, ForkJoin fork_join);

}  // namespace blockcp
