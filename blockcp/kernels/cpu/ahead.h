// Memory that will be needed soon, brought into the cache while the products run, one line a step, so that it never
// comes in a burst that they would wait for.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

namespace blockcp::cpu {

class Ahead {
 public:
  struct Span {
    const char* begin;
    int64_t bytes;
  };

  Ahead() = default;
  // The spans must not be empty, and must live as long as steps are taken.
  explicit Ahead(std::span<const Span> spans) : next_(spans.data()), last_(spans.data() + spans.size()) { advance(); }

  void step() {
    __builtin_prefetch(line_, 0, 2);
    line_ += step_;
    if (line_ >= end_) advance();
  }

 private:
  static constexpr int64_t kLine = 64;

  void advance() {
    if (next_ == last_) {
      line_ -= step_;
      step_ = 0;
      end_ = reinterpret_cast<const char*>(std::numeric_limits<intptr_t>::max());
    } else {
      line_ = next_->begin;
      end_ = line_ + next_->bytes;
      step_ = kLine;
      ++next_;
    }
  }

  const char* line_ = nullptr;
  const char* end_ = reinterpret_cast<const char*>(std::numeric_limits<intptr_t>::max());
  int64_t step_ = 0;
  const Span* next_ = nullptr;
  const Span* last_ = nullptr;
};

}  // namespace blockcp::cpu
