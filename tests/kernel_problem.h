// One attention problem that any kernel can be given, in any memory layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "blockcp/base/parallel.h"
#include "blockcp/kernels/attention.h"
#include "blockcp/kernels/element.h"

namespace blockcp::test {

// How a tensor lies in memory.
struct Placement {
  int64_t col = 1;    // stride of the last axis
  int64_t gap = 0;    // unused elements between rows
  int64_t shift = 0;  // elements before the first
  bool heads_first = false;
};

// A tensor [rows, heads, width] of its own memory; NaN wherever nothing was written.
class Array {
 public:
  Array(DType type, int64_t rows, int64_t heads, int64_t width, Placement place = {}) : type_(type) {
    const int64_t line = width * place.col + place.gap;
    view_ =
        place.heads_first ? Rows{nullptr, line, rows * line, place.col} : Rows{nullptr, heads * line, line, place.col};
    const int64_t elements = rows * heads * line + place.shift + 1;
    bytes_.resize(static_cast<size_t>(elements * size_of(type)));
    for (int64_t i = 0; i < elements; ++i) store(type, bytes_.data(), i, std::numeric_limits<double>::quiet_NaN());
    view_.data = bytes_.data() + place.shift * size_of(type);
  }
  DType type() const { return type_; }
  Rows rows(int64_t first = 0) const {
    Rows rows = view_;
    rows.data = static_cast<char*>(rows.data) + first * rows.row * size_of(type_);
    return rows;
  }

 private:
  DType type_;
  Rows view_;
  std::vector<char> bytes_;
};

// [rows, heads, width] in doubles.
struct Values {
  int64_t rows = 0, heads = 1, width = 1;
  std::vector<double> data;

  Values() = default;
  Values(int64_t r, int64_t h, int64_t w, double x = 0)
      : rows(r), heads(h), width(w), data(static_cast<size_t>(r * h * w), x) {}
  double& at(int64_t row, int64_t head, int64_t col = 0) {
    return data[static_cast<size_t>((row * heads + head) * width + col)];
  }
  double at(int64_t row, int64_t head, int64_t col = 0) const { return const_cast<Values*>(this)->at(row, head, col); }
};

inline void store_values(DType type, const Rows& rows, const Values& values) {
  for (int64_t i = 0; i < values.rows; ++i) {
    for (int64_t h = 0; h < values.heads; ++h) {
      for (int64_t c = 0; c < values.width; ++c) store(type, rows, i, h, c, values.at(i, h, c));
    }
  }
}

inline Values load_values(DType type, const Rows& from, int64_t rows, int64_t heads, int64_t width) {
  Values values(rows, heads, width);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < width; ++c) values.at(i, h, c) = load(type, from, i, h, c);
    }
  }
  return values;
}

inline Array array_of(DType type, const Values& values, Placement place = {}) {
  Array array(type, values.rows, values.heads, values.width, place);
  store_values(type, array.rows(), values);
  return array;
}

inline Values values_of(const Array& array, int64_t rows, int64_t heads, int64_t width) {
  return load_values(array.type(), array.rows(), rows, heads, width);
}

// Numbers that the storage type can hold.
inline Values random_values(std::mt19937_64& random, DType type, int64_t rows, int64_t heads, int64_t width) {
  Values values(rows, heads, width);
  std::normal_distribution<double> normal;
  double rounded = 0;
  for (double& x : values.data) {
    store(type, &rounded, 0, normal(random));
    x = load(type, &rounded, 0);
  }
  return values;
}

// Some documents' worth of blocks over common tensors; a run of rows of q and of k each.
struct Document {
  int64_t q_row = 0, q_count = 0, q_pos = 0;
  int64_t k_row = 0, k_pos = 0;
  std::vector<int64_t> pieces;  // rows of each
  Band band;

  int64_t k_count() const {
    int64_t count = 0;
    for (int64_t n : pieces) count += n;
    return count;
  }
};

struct Problem {
  AttentionShape shape;
  double scale = 1;
  std::vector<Document> documents;
  Values q, k, v, dout;

  Problem() = default;
  Problem(std::mt19937_64& random, const AttentionShape& s, std::vector<Document> docs)
      : shape(s), scale(1 / std::sqrt(static_cast<double>(s.head_dim))), documents(std::move(docs)) {
    int64_t q_rows = 0, k_rows = 0;
    for (const Document& d : documents) {
      q_rows = std::max(q_rows, d.q_row + d.q_count);
      k_rows = std::max(k_rows, d.k_row + d.k_count());
    }
    q = random_values(random, shape.dtype, q_rows, shape.q_heads, shape.head_dim);
    k = random_values(random, shape.dtype, k_rows, shape.kv_heads, shape.head_dim);
    v = random_values(random, shape.dtype, k_rows, shape.kv_heads, shape.value_dim);
    dout = random_values(random, shape.dtype, q_rows, shape.q_heads, shape.value_dim);
  }
};

// Causal documents one after the other, whole.
inline std::vector<Document> causal(const std::vector<int64_t>& lengths, int64_t window = Band::kUnbounded) {
  std::vector<Document> documents;
  int64_t row = 0;
  for (int64_t n : lengths) {
    documents.push_back({row, n, 0, row, 0, {n}, Band{window == Band::kUnbounded ? window : window - 1, 0, {}, {}}});
    row += n;
  }
  return documents;
}

struct Result {
  Values out, lse, delta, dq, dk, dv;
};

struct Run {
  Placement place;
  int threads = 1;
  bool merge = false;
  bool whole = false;                  // backward with all_keys and all_queries, which shared keys do not allow
  const Result* start = nullptr;       // under merge: what out and lse hold before
  const Result* forward_of = nullptr;  // take lse and delta for backward from here
};

inline Result run(const Kernel& kernel, const Problem& problem, const Run& how = {}) {
  const AttentionShape& s = problem.shape;
  const DType sums = accumulator(s.dtype), out_type = how.merge ? sums : s.dtype;
  const int64_t q_rows = problem.q.rows, k_rows = problem.k.rows;
  const Array q = array_of(s.dtype, problem.q, how.place), k = array_of(s.dtype, problem.k, how.place);
  const Array v = array_of(s.dtype, problem.v, how.place), dout = array_of(s.dtype, problem.dout, how.place);
  Array out(out_type, q_rows, s.q_heads, s.value_dim, how.place), lse(sums, q_rows, s.q_heads, 1);
  if (how.start) {
    out = array_of(out_type, how.start->out, how.place);
    lse = array_of(sums, how.start->lse);
  }
  // What is written holds NaN before; but rows of no document stay as they are.
  const auto gradient = [&](int64_t rows, int64_t heads, int64_t width, auto covered) {
    Values before(rows, heads, width);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t h = 0; h < heads && how.whole && covered(i); ++h) {
        for (int64_t c = 0; c < width; ++c) before.at(i, h, c) = std::nan("");
      }
    }
    return array_of(how.whole ? s.dtype : sums, before, how.place);
  };
  const auto has_query = [&](int64_t row) {
    return std::any_of(problem.documents.begin(), problem.documents.end(),
                       [&](const Document& d) { return row >= d.q_row && row < d.q_row + d.q_count; });
  };
  const auto has_key = [&](int64_t row) {
    return std::any_of(problem.documents.begin(), problem.documents.end(),
                       [&](const Document& d) { return row >= d.k_row && row < d.k_row + d.k_count(); });
  };
  const Array dq = gradient(q_rows, s.q_heads, s.head_dim, has_query);
  const Array dk = gradient(k_rows, s.kv_heads, s.head_dim, has_key);
  const Array dv = gradient(k_rows, s.kv_heads, s.value_dim, has_key);
  Array delta(sums, q_rows, s.q_heads, 1);

  std::vector<AttentionBlock> blocks;
  for (const Document& d : problem.documents) {
    AttentionBlock b;
    b.q_count = d.q_count;
    b.q_pos = d.q_pos;
    b.k_pos = d.k_pos;
    b.band = &d.band;
    int64_t row = d.k_row;
    for (int64_t n : d.pieces) {
      b.keys.push_back({n, k.rows(row), v.rows(row), dk.rows(row), dv.rows(row)});
      row += n;
    }
    b.q = q.rows(d.q_row);
    b.out = out.rows(d.q_row);
    b.lse = lse.rows(d.q_row);
    b.dout = dout.rows(d.q_row);
    b.delta = delta.rows(d.q_row);
    b.dq = dq.rows(d.q_row);
    blocks.push_back(b);
  }

  const std::unique_ptr<Parallel> parallel = how.threads == 1 ? make_serial() : make_pool(how.threads);
  kernel.forward({s, problem.scale, blocks, how.merge, parallel.get()});
  Result result;
  result.out = values_of(out, q_rows, s.q_heads, s.value_dim);
  result.lse = values_of(lse, q_rows, s.q_heads, 1);
  if (how.merge) return result;

  if (how.forward_of) {
    lse = array_of(sums, how.forward_of->lse);
    delta = array_of(sums, how.forward_of->delta);
    for (size_t i = 0; i < blocks.size(); ++i) {
      blocks[i].lse = lse.rows(problem.documents[i].q_row);
      blocks[i].delta = delta.rows(problem.documents[i].q_row);
    }
  } else if (!how.whole) {
    compute_delta(s, blocks, *parallel);
  }
  kernel.backward({s, problem.scale, blocks, parallel.get(), how.whole, how.whole});
  result.delta = values_of(delta, q_rows, s.q_heads, 1);
  result.dq = values_of(dq, q_rows, s.q_heads, s.head_dim);
  result.dk = values_of(dk, k_rows, s.kv_heads, s.head_dim);
  result.dv = values_of(dv, k_rows, s.kv_heads, s.value_dim);
  return result;
}

}  // namespace blockcp::test
