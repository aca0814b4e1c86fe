// Attention over packed documents as the definition has it: dense, one row at a time, from ids, spans and a predicate.
// Shares nothing with the library but the names of a mask's fields.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "blockcp/kernels/attention.h"
#include "blockcp/schedule/mask.h"

namespace blockcp {

// A packed batch: one id per row [batch, rows], 0 = padding.
struct Pack {
  int64_t batch = 1, rows = 0;
  std::vector<int64_t> ids;
  Mask mask;

  bool visible(int64_t b, int64_t i, int64_t j) const {
    const auto at = [&](const std::vector<int64_t>& values, int64_t row) {
      return values.empty() ? 0 : values[static_cast<size_t>(b * rows + row)];
    };
    if (at(ids, i) == 0 || at(ids, i) != at(ids, j)) return false;
    const bool span = at(mask.spans, i) != 0 && at(mask.spans, i) == at(mask.spans, j);
    const bool ahead = mask.causal ? j <= i : !mask.right || j - i <= *mask.right;
    const bool left = !mask.left || i - j <= *mask.left;
    const bool both = left && (!mask.left || j - i <= *mask.left);
    switch (mask.span_window) {
      case SpanWindow::left:
        return (ahead || span) && left;
      case SpanWindow::both:
        return (ahead && left) || (span && both);
      case SpanWindow::none:
        return (ahead && left) || span;
    }
    return false;
  }
};

// All of [batch, heads, rows, width], as doubles.
struct Globals {
  std::vector<double> q, k, v, dout;
};
struct Results {
  std::vector<double> out, lse, dq, dk, dv;
};

// T is the type in which everything is computed. `sizes` holds for every element the sum of the sizes of the terms that
// it is summed from: a relative error of e in all weights or products changes the element by about e times that. For
// lse, whose error is that of the weights, it is 1. `size_of_scores` is the largest such sum of a score.
template <class T>
class Dense {
 public:
  Dense(const Pack& pack, const AttentionShape& shape, double scale, const Globals& in)
      : pack_(pack), shape_(shape), scale_(static_cast<T>(scale)), in_(in) {
    const auto size = [&](int64_t heads, int64_t width) {
      return static_cast<size_t>(pack.batch * heads * pack.rows * width);
    };
    results.out.assign(size(shape.q_heads, shape.value_dim), 0);
    results.lse.assign(size(shape.q_heads, 1), -std::numeric_limits<double>::infinity());
    results.dq.assign(size(shape.q_heads, shape.head_dim), 0);
    results.dk.assign(size(shape.kv_heads, shape.head_dim), 0);
    results.dv.assign(size(shape.kv_heads, shape.value_dim), 0);
    sizes = results;
    for (int64_t b = 0; b < pack.batch; ++b)
      for (int64_t h = 0; h < shape.q_heads; ++h)
        for (int64_t i = 0; i < pack.rows; ++i) row(b, h, i);
  }

  Results results, sizes;
  double size_of_scores = 0;

 private:
  // Element (b, h, row, 0) of a tensor with `heads` heads.
  size_t at(int64_t b, int64_t h, int64_t row, int64_t heads, int64_t width) const {
    return static_cast<size_t>(((b * heads + h) * pack_.rows + row) * width);
  }
  static T dot(const double* a, const double* b, int64_t n) {
    T sum = 0;
    for (int64_t c = 0; c < n; ++c) sum += static_cast<T>(a[c]) * static_cast<T>(b[c]);
    return sum;
  }
  static T dot_of_sizes(const double* a, const double* b, int64_t n) {
    T sum = 0;
    for (int64_t c = 0; c < n; ++c) sum += std::abs(static_cast<T>(a[c]) * static_cast<T>(b[c]));
    return sum;
  }
  static void add(double* to, T factor, const double* x, int64_t n) {
    for (int64_t c = 0; c < n; ++c) to[c] = static_cast<T>(static_cast<T>(to[c]) + factor * static_cast<T>(x[c]));
  }
  static void add_sizes(double* to, T factor, const double* x, int64_t n) {
    for (int64_t c = 0; c < n; ++c) to[c] += factor * std::abs(x[c]);
  }

  void row(int64_t b, int64_t h, int64_t i) {
    const int64_t d = shape_.head_dim, dv = shape_.value_dim, kv_heads = shape_.kv_heads;
    const int64_t g = h / (shape_.q_heads / kv_heads);
    std::vector<int64_t> seen;
    std::vector<T> scores;
    T top = -std::numeric_limits<T>::infinity(), sum = 0;
    const size_t q = at(b, h, i, shape_.q_heads, d), o = at(b, h, i, shape_.q_heads, dv);
    for (int64_t j = 0; j < pack_.rows; ++j) {
      if (!pack_.visible(b, i, j)) continue;
      seen.push_back(j);
      const double* key = &in_.k[at(b, g, j, kv_heads, d)];
      scores.push_back(scale_ * dot(&in_.q[q], key, d));
      size_of_scores = std::max<double>(size_of_scores, std::abs(scale_) * dot_of_sizes(&in_.q[q], key, d));
      top = std::max(top, scores.back());
    }
    if (seen.empty()) return;
    for (T s : scores) sum += std::exp(s - top);
    const T lse = top + std::log(sum);
    results.lse[at(b, h, i, shape_.q_heads, 1)] = lse;
    sizes.lse[at(b, h, i, shape_.q_heads, 1)] = 1;
    for (size_t n = 0; n < seen.size(); ++n) {
      const size_t v = at(b, g, seen[n], kv_heads, dv);
      add(&results.out[o], std::exp(scores[n] - lse), &in_.v[v], dv);
      add_sizes(&sizes.out[o], std::exp(scores[n] - lse), &in_.v[v], dv);
    }
    const T delta = dot(&results.out[o], &in_.dout[o], dv);
    const T size_of_delta = dot_of_sizes(&sizes.out[o], &in_.dout[o], dv);
    for (size_t n = 0; n < seen.size(); ++n) {
      const size_t k = at(b, g, seen[n], kv_heads, d), v = at(b, g, seen[n], kv_heads, dv);
      const T p = std::exp(scores[n] - lse);
      const T ds = scale_ * p * (dot(&in_.dout[o], &in_.v[v], dv) - delta);
      add(&results.dq[q], ds, &in_.k[k], d);
      add(&results.dk[k], ds, &in_.q[q], d);
      add(&results.dv[v], p, &in_.dout[o], dv);
      const T size_of_ds = std::abs(scale_) * p * (dot_of_sizes(&in_.dout[o], &in_.v[v], dv) + size_of_delta);
      add_sizes(&sizes.dq[q], size_of_ds, &in_.k[k], d);
      add_sizes(&sizes.dk[k], size_of_ds, &in_.q[q], d);
      add_sizes(&sizes.dv[v], p, &in_.dout[o], dv);
    }
  }

  const Pack& pack_;
  const AttentionShape& shape_;
  const T scale_;
  const Globals& in_;
};

template <class T>
Results dense(const Pack& pack, const AttentionShape& shape, double scale, const Globals& in) {
  return Dense<T>(pack, shape, scale, in).results;
}

}  // namespace blockcp
