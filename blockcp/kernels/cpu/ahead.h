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
  // The spans must not be empty, and must live as long as lines are taken.
  explicit Ahead(std::span<const Span> spans) : next_(spans.data()), last_(spans.data() + spans.size()) { advance(); }

  struct Lines {
    const char* line;
    int64_t step, count;

    void fetch() {
      __builtin_prefetch(line, 0, 2);
      line += step;
    }
  };

  // The next lines: `most` or less, but at least one, to be fetched by as many steps.
  Lines take(int64_t most) {
    const Lines lines{line_, step_, most < left_ ? most : left_};
    line_ += lines.count * step_;
    left_ -= lines.count;
    if (left_ == 0) advance();
    return lines;
  }

 private:
  static constexpr int64_t kLine = 64;

  void advance() {
    if (next_ == last_) {
      line_ -= step_;
      step_ = 0;
      left_ = std::numeric_limits<int64_t>::max();
    } else {
      line_ = next_->begin;
      left_ = (next_->bytes + kLine - 1) / kLine;
      step_ = kLine;
      ++next_;
    }
  }

  const char* line_ = nullptr;
  int64_t step_ = 0, left_ = std::numeric_limits<int64_t>::max();
  const Span* next_ = nullptr;
  const Span* last_ = nullptr;
};

}  // namespace blockcp::cpu
