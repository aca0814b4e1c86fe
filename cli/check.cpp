#include "cli/check.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "blockcp/kernels/reference.h"

namespace blockcp {
namespace {

// A dense fp64 tensor [heads, rows, width].
struct Exact {
  Exact(int64_t head_count, int64_t row_count, int64_t col_count)
      : heads(head_count), rows(row_count), width(col_count), values(static_cast<size_t>(heads * rows * width)) {}
  Exact(const WholeTensor& whole, Range range) : Exact(whole.heads(), range.size(), whole.width()) {
    for (int64_t h = 0, i = 0; h < heads; ++h)
      for (int64_t row = range.begin; row < range.end; ++row)
        for (int64_t c = 0; c < width; ++c) values[static_cast<size_t>(i++)] = whole.at(h, row, c);
  }
  Rows from(int64_t row) { return {values.data() + row * width, width, rows * width, 1}; }
  double at(int64_t h, int64_t row, int64_t c) const {
    return values[static_cast<size_t>((h * rows + row) * width + c)];
  }

  int64_t heads, rows, width;
  std::vector<double> values;
};

// Sums of squares over what was compared of one tensor.
struct Deviation {
  double difference = 0, wanted = 0, count = 0;

  void add(const Exact& exact, int64_t row, const WholeTensor& got, int64_t got_row) {
    for (int64_t h = 0; h < exact.heads; ++h)
      for (int64_t c = 0; c < exact.width; ++c) {
        const double right = exact.at(h, row, c), is = got.at(h, got_row, c);
        difference += (is - right) * (is - right);
        wanted += right * right;
        ++count;
      }
  }
  double rms(double sum) const { return count > 0 ? std::sqrt(sum / count) : 0; }
};

class Checker {
 public:
  Checker(const Plan& plan, const AttentionShape& shape, double scale, const WholeTensors& tensors, Parallel& parallel)
      : plan_(plan), entry_(plan.entry()), shape_(shape), scale_(scale), tensors_(tensors), parallel_(parallel) {
    shape_.dtype = DType::f64;
  }

  CheckReport run(int64_t budget);

 private:
  Range rows_of(size_t index) const { return plan_.packing().documents()[index].rows; }
  bool crosses(size_t index) const {
    const Range rows = rows_of(index);
    return plan_.local_rows() > 0 && rows.begin / plan_.local_rows() != (rows.end - 1) / plan_.local_rows();
  }
  int64_t cost(size_t index, Range q) const { return entry_.bands.pairs(index, q) * shape_.q_heads; }

  // Rows `q` of a document, forward and backward; whole documents compare dk and dv too.
  void compare(size_t index, Range q);
  // The gradients of one key, which come from all rows that see it, with the run's own out and lse.
  void compare_key(size_t index, int64_t key);
  void compare_padding();
  double limit() const;
  std::vector<TensorError> errors() const;

  const Plan& plan_;
  const Plan::Entry& entry_;
  AttentionShape shape_;
  const double scale_;
  const WholeTensors& tensors_;
  Parallel& parallel_;
  CheckReport report_;
  Deviation out_, lse_, dq_, dk_, dv_;
};

void Checker::compare(size_t index, Range q) {
  const Range document = rows_of(index), keys = entry_.bands.keys(index, q);
  const auto moved = [&](Range r) { return Range{r.begin + document.begin, r.end + document.begin}; };
  Exact qs(tensors_.q, moved(q)), ks(tensors_.k, moved(keys)), vs(tensors_.v, moved(keys)),
      douts(tensors_.dout, moved(q));
  Exact out(shape_.q_heads, q.size(), shape_.value_dim), lse(shape_.q_heads, q.size(), 1), delta = lse;
  Exact dq(shape_.q_heads, q.size(), shape_.head_dim), dk(shape_.kv_heads, keys.size(), shape_.head_dim);
  Exact dv(shape_.kv_heads, keys.size(), shape_.value_dim);

  AttentionBlock block;
  block.q_count = q.size();
  block.q_pos = q.begin;
  block.k_pos = keys.begin;
  block.keys = {{keys.size(), ks.from(0), vs.from(0), dk.from(0), dv.from(0)}};
  block.band = &entry_.bands.of(index);
  block.q = qs.from(0);
  block.out = out.from(0);
  block.lse = lse.from(0);
  block.dout = douts.from(0);
  block.delta = delta.from(0);
  block.dq = dq.from(0);
  const Kernel reference = reference_kernel();
  reference.forward({shape_, scale_, {&block, 1}, false, &parallel_});
  compute_delta(shape_, {&block, 1}, parallel_);
  reference.backward({shape_, scale_, {&block, 1}, &parallel_});

  for (int64_t row = 0; row < q.size(); ++row) {
    const int64_t got = document.begin + q.begin + row;
    out_.add(out, row, tensors_.out, got);
    lse_.add(lse, row, tensors_.lse, got);
    dq_.add(dq, row, tensors_.dq, got);
    if (q.size() != document.size()) continue;
    dk_.add(dk, row, tensors_.dk, got);
    dv_.add(dv, row, tensors_.dv, got);
  }
}

void Checker::compare_key(size_t index, int64_t key) {
  constexpr int64_t kQueries = 4096;  // at a time
  const Range document = rows_of(index);
  const int64_t row = document.begin + key;
  Exact k(tensors_.k, {row, row + 1}), v(tensors_.v, {row, row + 1});
  Exact dk(shape_.kv_heads, 1, shape_.head_dim), dv(shape_.kv_heads, 1, shape_.value_dim);
  for (int64_t first = 0; first < document.size(); first += kQueries) {
    const Range q{document.begin + first, std::min(document.begin + first + kQueries, document.end)};
    Exact qs(tensors_.q, q), out(tensors_.out, q), lse(tensors_.lse, q), dout(tensors_.dout, q), delta = lse, dq = qs;
    AttentionBlock block;
    block.q_count = q.size();
    block.q_pos = first;
    block.k_pos = key;
    block.keys = {{1, k.from(0), v.from(0), dk.from(0), dv.from(0)}};
    block.band = &entry_.bands.of(index);
    block.q = qs.from(0);
    block.out = out.from(0);
    block.lse = lse.from(0);
    block.dout = dout.from(0);
    block.delta = delta.from(0);
    block.dq = dq.from(0);
    compute_delta(shape_, {&block, 1}, parallel_);
    reference_kernel().backward({shape_, scale_, {&block, 1}, &parallel_});
  }
  dk_.add(dk, 0, tensors_.dk, row);
  dv_.add(dv, 0, tensors_.dv, row);
}

void Checker::compare_padding() {
  const auto expect = [&](const WholeTensor& tensor, int64_t row, double value) {
    for (int64_t h = 0; h < tensor.heads(); ++h)
      for (int64_t c = 0; c < tensor.width(); ++c) report_.padding_ok &= tensor.at(h, row, c) == value;
  };
  std::vector<Range> real;
  for (const Document& document : plan_.packing().documents()) real.push_back(document.rows);
  for (const Range& range : subtract({{0, plan_.packing().rows()}}, normalized(real)))
    for (int64_t row = range.begin; row < range.end; ++row, ++report_.padding_rows) {
      for (const WholeTensor* zero : {&tensors_.out, &tensors_.dq, &tensors_.dk, &tensors_.dv}) expect(*zero, row, 0);
      expect(tensors_.lse, row, -std::numeric_limits<double>::infinity());
    }
}

// One rounding to the type leaves half an ulp; sums over thousands of terms in the accumulator type little more.
double Checker::limit() const {
  switch (tensors_.q.type()) {
    case DType::f32:
      return 1e-5;
    case DType::f64:
      return 1e-12;
    case DType::bf16:
      return 1.6e-2;
    case DType::f16:
      return 2e-3;
  }
  return 0;
}

std::vector<TensorError> Checker::errors() const {
  const double gradients = std::max({dq_.rms(dq_.wanted), dk_.rms(dk_.wanted), dv_.rms(dv_.wanted)});
  const auto error = [&](const char* name, const Deviation& d, double scale) {
    return TensorError{name, d.difference == 0 ? 0 : d.rms(d.difference) / scale, limit()};
  };
  return {error("out", out_, out_.rms(out_.wanted)), error("lse", lse_, std::max(1.0, lse_.rms(lse_.wanted))),
          error("dq", dq_, gradients), error("dk", dk_, gradients), error("dv", dv_, gradients)};
}

CheckReport Checker::run(int64_t budget) {
  const size_t documents = plan_.packing().documents().size();
  std::vector<std::pair<std::pair<bool, int64_t>, size_t>> order;
  for (size_t i = 0; i < documents; ++i) order.push_back({{!crosses(i), cost(i, {0, rows_of(i).size()})}, i});
  std::sort(order.begin(), order.end());

  // Half for documents that cross a border, a quarter for the others, the rest for single rows.
  int64_t left = budget / 2;
  std::vector<size_t> too_long;
  bool others = false;
  for (const auto& [rank, index] : order) {
    if (rank.first && !others) others = true, left += budget / 4;
    if (rank.second > left) {
      too_long.push_back(index);
      continue;
    }
    left -= rank.second;
    compare(index, {0, rows_of(index).size()});
    ++report_.documents;
  }
  left += budget / 4;
  for (size_t index : too_long) {
    const Range rows = rows_of(index);
    const int64_t length = plan_.local_rows(), border = (rows.begin / length + 1) * length - rows.begin;
    for (int64_t row : {rows.size() - 1, border - 1, border, int64_t{0}}) {
      const int64_t price = rows.size() * shape_.q_heads * 2;  // at most, with the queries that see the row
      if (row < 0 || row >= rows.size() || price > left) continue;
      left -= price;
      compare(index, {row, row + 1});
      compare_key(index, row);
      ++report_.single_rows;
    }
  }
  compare_padding();
  report_.all_documents = static_cast<int64_t>(documents);
  report_.tensors = errors();
  return report_;
}

}  // namespace

bool CheckReport::ok() const {
  return padding_ok && std::all_of(tensors.begin(), tensors.end(), [](const TensorError& e) { return e.ok(); });
}

CheckReport check_run(const Plan& plan, const AttentionShape& shape, double scale, const WholeTensors& tensors,
                      int64_t budget, Parallel& parallel) {
  return Checker(plan, shape, scale, tensors, parallel).run(budget);
}

}  // namespace blockcp
