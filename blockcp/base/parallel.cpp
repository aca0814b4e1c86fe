#include "blockcp/base/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace blockcp {
namespace {

using Body = std::function<void(int64_t item, int thread)>;

// The items of one run(), pulled by any number of threads.
class Items {
 public:
  Items(int64_t count, const Body& body) : count_(count), body_(body) {}

  void pull(int thread) noexcept {
    while (!failed_.load(std::memory_order_relaxed)) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= count_) return;
      try {
        body_(item, thread);
      } catch (...) {
        if (!failed_.exchange(true)) first_ = std::current_exception();
      }
    }
  }

  // After all threads have stopped.
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  const int64_t count_;
  const Body& body_;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr first_;
};

void run_serially(int64_t items, const Body& body) {
  for (int64_t item = 0; item < items; ++item) body(item, 0);
}

class Serial final : public Parallel {
 public:
  int threads() const override { return 1; }
  void run(int64_t items, const Body& body) override { run_serially(items, body); }
};

// The threads of a pool in one process. Workers sleep until `round_` changes, pull items, and report.
class Team {
 public:
  explicit Team(int workers) {
    try {
      for (int i = 1; i <= workers; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
      // The system gives no more threads: those that started do the work.
    }
  }
  ~Team() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  // False where the team is at work already: for another thread, or further up this one's stack.
  bool try_begin() { return !busy_.test_and_set(std::memory_order_acquire); }

  void finish(Items& items) {
    {
      std::lock_guard lock(mutex_);
      items_ = &items;
      running_ = workers_.size();
      ++round_;
    }
    wake_.notify_all();
    items.pull(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    lock.unlock();
    busy_.clear(std::memory_order_release);
  }

  const pid_t process = getpid();

 private:
  void work(int thread) {
    std::unique_lock lock(mutex_);
    for (uint64_t seen = 0;;) {
      wake_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      Items* items = items_;
      lock.unlock();
      items->pull(thread);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::atomic_flag busy_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Items* items_ = nullptr;
  size_t running_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;  // last: they use all of the above
};

class Pool final : public Parallel {
 public:
  explicit Pool(int threads) : threads_(threads) {}
  ~Pool() override {
    Team* team = team_.load();
    if (team && team->process == getpid()) delete team;
  }

  int threads() const override { return threads_; }

  // A busy pool does not queue: the caller works alone. So a run() inside a body cannot wait for itself.
  void run(int64_t count, const Body& body) override {
    Team* team = threads_ > 1 && count > 1 ? &this->team() : nullptr;
    if (!team || !team->try_begin()) return run_serially(count, body);
    Items items(count, body);
    team->finish(items);
    items.rethrow();
  }

 private:
  // fork() copies only the calling thread, and locks as they happen to be, so a child leaves its parent's team alone.
  Team& team() {
    Team* team = team_.load(std::memory_order_acquire);
    if (team && team->process == getpid()) return *team;
    auto fresh = std::make_unique<Team>(threads_ - 1);
    return team_.compare_exchange_strong(team, fresh.get()) ? *fresh.release() : *team;
  }

  const int threads_;
  std::atomic<Team*> team_{nullptr};  // started by the first run()
};

class Borrowed final : public Parallel {
 public:
  Borrowed(int threads, ForkJoin fork_join) : threads_(threads), fork_join_(std::move(fork_join)) {}

  int threads() const override { return threads_; }

  void run(int64_t count, const Body& body) override {
    const int threads = static_cast<int>(std::min<int64_t>(threads_, count));
    if (threads <= 1) return run_serially(count, body);
    Items items(count, body);
    fork_join_(threads, [&](int thread) { items.pull(thread); });
    items.rethrow();
  }

 private:
  const int threads_;
  const ForkJoin fork_join_;
};

}  // namespace

std::unique_ptr<Parallel> make_serial() { return std::make_unique<Serial>(); }

std::unique_ptr<Parallel> make_pool(int threads) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  return std::make_unique<Pool>(threads);
}

std::unique_ptr<Parallel> make_borrowed(int threads, ForkJoin fork_join) {
  return std::make_unique<Borrowed>(std::max(threads, 1), std::move(fork_join));
}

}  // namespace blockcp
