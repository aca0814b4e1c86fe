#include "blockcp/engine/varlen.h"

#include "blockcp/base/error.h"
#include "blockcp/engine/accumulator.h"

namespace blockcp {
namespace {

void check_one(const Offsets& offsets) {
  const auto& [name, values, rows] = offsets;
  check_argument(!values.empty(), "[varlen] {} must have one number more than there are documents, but it is empty.",
                 name);
  check_argument(values[0] == 0, "[varlen] {} must begin with 0, but {}[0] = {}.", name, name, values[0]);
  for (size_t i = 1; i < values.size(); ++i)
    check_argument(values[i] >= values[i - 1],
                   "[varlen] {} must not decrease, but {}[{}] = {} and {}[{}] = {}. Are these lengths? Give their "
                   "cumulative sums.",
                   name, name, i - 1, values[i - 1], name, i, values[i]);
  check_argument(values.back() <= rows,
                 "[varlen] {} must end inside the tensor, but it ends at {} and there are {} rows.", name,
                 values.back(), rows);
}

class Run {
 public:
  explicit Run(const Varlen& call) : call_(call) {}

 protected:
  DType type() const { return call_.shape.dtype; }
  DType sum_type() const { return accumulator(type()); }
  Rows queries(const Tensor& tensor, int64_t row, DType type) const { return rows_at(tensor, row, call_.q.rows, type); }
  Rows keys(const Tensor& tensor, int64_t row, DType type) const { return rows_at(tensor, row, call_.k.rows, type); }

  // A block for every document: where its queries stand, and its keys as `keys_of` gives them.
  template <class Queries, class Keys>
  std::vector<AttentionBlock> blocks(const Queries& add_queries, const Keys& keys_of) const {
    std::vector<AttentionBlock> all;
    for (int64_t i = 0; i < call_.q.documents(); ++i) {
      const Range q = call_.q.document(i), k = call_.k.document(i);
      if (q.empty() && k.empty()) continue;
      AttentionBlock& block = all.emplace_back();
      block.q_count = q.size();
      block.q_pos = k.size() - q.size();
      block.band = &call_.band;
      if (!k.empty()) block.keys = {keys_of(k)};
      add_queries(block, q.begin);
    }
    return all;
  }

  const Varlen& call_;
};

class Forward : Run {
 public:
  Forward(const Varlen& call, const ForwardTensors& tensors) : Run(call), tensors_(tensors) {}

  void run() const {
    const auto add = [this](AttentionBlock& block, int64_t row) { add_queries(block, row); };
    std::vector<AttentionBlock> work = blocks(add, [this](Range k) {
      return KeyRows{k.size(), keys(tensors_.k, k.begin, type()), keys(tensors_.v, k.begin, type()), {}, {}};
    });
    const int64_t end = call_.q.values.back();
    if (end < call_.q.rows) {  // rows of no document: a block without keys
      AttentionBlock& rest = work.emplace_back();
      rest.q_count = call_.q.rows - end;
      rest.band = &call_.band;
      add_queries(rest, end);
    }
    call_.kernel.forward({call_.shape, call_.scale, work, false, &call_.parallel});
  }

 private:
  void add_queries(AttentionBlock& block, int64_t row) const {
    block.q = queries(tensors_.q, row, type());
    block.out = queries(tensors_.out, row, type());
    block.lse = queries(tensors_.lse, row, sum_type());
  }

  const ForwardTensors& tensors_;
};

class Backward : Run {
 public:
  Backward(const Varlen& call, const BackwardTensors& tensors)
      : Run(call),
        tensors_(tensors),
        delta_memory_(call.shape.q_heads * call.q.rows * size_of(sum_type())),
        delta_{delta_memory_.data(), 0, call.q.rows, 1, 1} {}

  void run() const {
    const auto add = [this](AttentionBlock& block, int64_t row) { add_queries(block, row); };
    const std::vector<AttentionBlock> work = blocks(add, [this](Range k) {
      return KeyRows{k.size(), keys(tensors_.k, k.begin, type()), keys(tensors_.v, k.begin, type()),
                     keys(tensors_.dk, k.begin, type()), keys(tensors_.dv, k.begin, type())};
    });
    call_.kernel.backward({call_.shape, call_.scale, work, &call_.parallel, true, true});
    const AttentionShape& shape = call_.shape;
    fill_rest(tensors_.dq, call_.q, shape.q_heads, shape.head_dim);
    fill_rest(tensors_.dk, call_.k, shape.kv_heads, shape.head_dim);
    fill_rest(tensors_.dv, call_.k, shape.kv_heads, shape.value_dim);
  }

 private:
  void add_queries(AttentionBlock& block, int64_t row) const {
    block.q = queries(tensors_.q, row, type());
    block.out = queries(tensors_.out, row, type());
    block.lse = queries(tensors_.lse, row, sum_type());
    block.dout = queries(tensors_.dout, row, type());
    block.delta = queries(delta_, row, sum_type());
    block.dq = queries(tensors_.dq, row, type());
  }

  // Rows of no document.
  void fill_rest(const Tensor& tensor, const Offsets& offsets, int64_t heads, int64_t width) const {
    const int64_t end = offsets.values.back(), rows = offsets.rows;
    if (end < rows) fill_zero_rows(tensor, end, rows - end, {1, heads, rows, width}, type(), call_.parallel);
  }

  const BackwardTensors& tensors_;
  Memory delta_memory_;
  Tensor delta_;
};

}  // namespace

void check_offsets(const Offsets& q, const Offsets& k) {
  check_one(q);
  check_one(k);
  check_argument(q.documents() == k.documents(),
                 "[varlen] {} and {} must have as many documents, but they have {} and {} offsets.", q.name, k.name,
                 q.values.size(), k.values.size());
}

void check_longest(const Offsets& offsets, std::string_view named, int64_t longest) {
  for (int64_t i = 0; i < offsets.documents(); ++i)
    check_argument(offsets.document(i).size() <= longest,
                   "[varlen] {} must be at least the longest document of {}, but it is {} and document {} has {} rows. "
                   "Leave it out: it is not needed.",
                   named, offsets.name, longest, i, offsets.document(i).size());
}

void forward(const Varlen& call, const ForwardTensors& tensors) { Forward(call, tensors).run(); }

void backward(const Varlen& call, const BackwardTensors& tensors) { Backward(call, tensors).run(); }

}  // namespace blockcp
