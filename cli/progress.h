// Tells on stderr what a long run is doing.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

namespace blockcp {

// One stage of the work: silent if it ends within two seconds, else a line every few seconds until it does.
class Progress {
 public:
  explicit Progress(std::string stage) : stage_(std::move(stage)), teller_([this] { tell(); }) {}
  ~Progress() {
    {
      std::lock_guard lock(mutex_);
      done_ = true;
    }
    ended_.notify_all();
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;

  void tell() {
    std::unique_lock lock(mutex_);
    auto pause = std::chrono::seconds(2);
    while (!ended_.wait_for(lock, pause, [this] { return done_; })) {
      fmt::print(stderr, "{} ... {:.0f} s\n", stage_, seconds());
      pause = std::chrono::seconds(5);
    }
  }

  const std::string stage_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::jthread teller_;  // last: it uses all of the above
};

}  // namespace blockcp
