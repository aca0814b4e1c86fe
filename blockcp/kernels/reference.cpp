#include "blockcp/kernels/reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "blockcp/kernels/element.h"
#include "blockcp/kernels/keys.h"
#include "blockcp/kernels/partial.h"

namespace blockcp {

namespace {

using Vector = std::vector<double>;

// Row i of every piece, in document order, as doubles.
struct Keys {
  Keys(const AttentionShape& shape, const AttentionBlock& block, int64_t head)
      : view(block), k(view.size()), v(view.size()) {
    for (int64_t j = 0; j < view.size(); ++j) {
      const auto [piece, row] = view.locate(j);
      auto& key = k[static_cast<size_t>(j)];
      auto& value = v[static_cast<size_t>(j)];
      for (int64_t c = 0; c < shape.head_dim; ++c) key.push_back(load(shape.dtype, piece->k, row, head, c));
      for (int64_t c = 0; c < shape.value_dim; ++c) value.push_back(load(shape.dtype, piece->v, row, head, c));
    }
  }
  KeyView view;
  std::vector<Vector> k, v;
};

Vector load_row(DType type, const Rows& rows, int64_t row, int64_t head, int64_t width) {
  Vector values;
  for (int64_t c = 0; c < width; ++c) values.push_back(load(type, rows, row, head, c));
  return values;
}

void store_row(DType type, const Rows& rows, int64_t row, int64_t head, std::span<const double> values) {
  for (size_t c = 0; c < values.size(); ++c) store(type, rows, row, head, static_cast<int64_t>(c), values[c]);
}

void add_row(DType type, const Rows& rows, int64_t row, int64_t head, const Vector& values) {
  Vector sum = load_row(type, rows, row, head, static_cast<int64_t>(values.size()));
  for (size_t c = 0; c < values.size(); ++c) sum[c] += values[c];
  store_row(type, rows, row, head, sum);
}

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

void add_scaled(Vector& sum, double factor, const Vector& x) {
  for (size_t c = 0; c < x.size(); ++c) sum[c] += factor * x[c];
}

// Weights relative to the largest score, so that no size of score costs precision.
struct Softmax {
  explicit Softmax(Vector scores) : weights(std::move(scores)) {
    if (weights.empty()) return;
    const double top = *std::max_element(weights.begin(), weights.end());
    if (top == Partial<double>::kNothing) {
      std::fill(weights.begin(), weights.end(), 0);
      return;
    }
    double sum = 0;
    for (double& x : weights) sum += x = std::exp(x - top);
    for (double& x : weights) x /= sum;
    lse = top + std::log(sum);
  }
  Vector weights;
  double lse = Partial<double>::kNothing;
};

// Scores of one query against the keys it sees.
Vector scores_of(const Vector& q, const Keys& keys, Range seen, double scale) {
  Vector scores;
  for (int64_t j = seen.begin; j < seen.end; ++j) scores.push_back(scale * dot(q, keys.k[static_cast<size_t>(j)]));
  return scores;
}

void forward_row(const ForwardArgs& args, const AttentionBlock& block, const Keys& keys, int64_t row, int64_t head) {
  const AttentionShape& shape = args.shape;
  const DType sums = accumulator(shape.dtype);
  const Range seen = keys.view.seen(row);
  const Softmax softmax(scores_of(load_row(shape.dtype, block.q, row, head, shape.head_dim), keys, seen, args.scale));

  Vector out(static_cast<size_t>(shape.value_dim), 0.0);
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    add_scaled(out, softmax.weights[static_cast<size_t>(j - seen.begin)], keys.v[static_cast<size_t>(j)]);
  }
  Partial<double> result{out, softmax.lse};
  if (args.merge) {
    Vector before = load_row(sums, block.out, row, head, shape.value_dim);
    merge(result, Partial<double>{before, load(sums, block.lse, row, head)});
  }
  store_row(args.merge ? sums : shape.dtype, block.out, row, head, out);
  store(sums, block.lse, row, head, 0, result.lse);
}

void forward(const ForwardArgs& args) {
  const int64_t heads = args.shape.q_heads;
  args.parallel->run(static_cast<int64_t>(args.blocks.size()) * heads, [&](int64_t item, int) {
    const AttentionBlock& block = args.blocks[static_cast<size_t>(item / heads)];
    const int64_t head = item % heads;
    const Keys keys(args.shape, block, head / args.shape.group());
    for (int64_t row = 0; row < block.q_count; ++row) forward_row(args, block, keys, row, head);
  });
}

struct KeyGradients {
  std::vector<Vector> dk, dv;
};

void backward_row(const BackwardArgs& args, const AttentionBlock& block, const Keys& keys, KeyGradients& gradients,
                  int64_t row, int64_t head) {
  const AttentionShape& shape = args.shape;
  const DType sums = accumulator(shape.dtype);
  const double lse = load(sums, block.lse, row, head);
  const Range seen = keys.view.seen(row);
  const Vector q = load_row(shape.dtype, block.q, row, head, shape.head_dim);
  Vector dq(q.size(), 0.0);
  if (seen.empty() || lse == Partial<double>::kNothing) {
    if (args.all_keys) store_row(shape.dtype, block.dq, row, head, dq);
    return;
  }
  const Vector dout = load_row(shape.dtype, block.dout, row, head, shape.value_dim);
  const double delta = args.all_keys ? dot(load_row(shape.dtype, block.out, row, head, shape.value_dim), dout)
                                     : load(sums, block.delta, row, head);
  const Vector scores = scores_of(q, keys, seen, args.scale);
  const double through = sees_one_key(block, row, args.all_keys) ? 0 : 1;  // a factor, so that NaN stays NaN
  for (int64_t i = seen.begin; i < seen.end; ++i) {
    const auto j = static_cast<size_t>(i);
    const double p = std::exp(scores[static_cast<size_t>(i - seen.begin)] - lse);
    const double ds = args.scale * p * through * (dot(dout, keys.v[j]) - delta);
    add_scaled(dq, ds, keys.k[j]);
    add_scaled(gradients.dk[j], ds, q);
    add_scaled(gradients.dv[j], p, dout);
  }
  if (args.all_keys) return store_row(shape.dtype, block.dq, row, head, dq);
  add_row(sums, block.dq, row, head, dq);
}

void backward_block(const BackwardArgs& args, const AttentionBlock& block, int64_t kv_head) {
  const AttentionShape& shape = args.shape;
  const Keys keys(shape, block, kv_head);
  KeyGradients gradients{std::vector<Vector>(keys.k.size(), Vector(static_cast<size_t>(shape.head_dim), 0.0)),
                         std::vector<Vector>(keys.k.size(), Vector(static_cast<size_t>(shape.value_dim), 0.0))};
  for (int64_t row = 0; row < block.q_count; ++row) {
    for (int64_t h = 0; h < shape.group(); ++h) {
      backward_row(args, block, keys, gradients, row, kv_head * shape.group() + h);
    }
  }
  for (int64_t j = 0; j < keys.view.size(); ++j) {
    const auto [piece, row] = keys.view.locate(j);
    const auto put = [&](const Rows& to, const Vector& gradient) {
      if (args.all_queries) return store_row(shape.dtype, to, row, kv_head, gradient);
      add_row(accumulator(shape.dtype), to, row, kv_head, gradient);
    };
    put(piece->dk, gradients.dk[static_cast<size_t>(j)]);
    put(piece->dv, gradients.dv[static_cast<size_t>(j)]);
  }
}

// Blocks may share keys, so that only the KV heads run side by side.
void backward(const BackwardArgs& args) {
  args.parallel->run(args.shape.kv_heads, [&](int64_t kv_head, int) {
    for (const AttentionBlock& block : args.blocks) backward_block(args, block, kv_head);
  });
}

std::string why_not(const AttentionShape&, const Machine&) { return ""; }

}  // namespace

Kernel reference_kernel() { return {"reference", why_not, forward, backward}; }

}  // namespace blockcp
