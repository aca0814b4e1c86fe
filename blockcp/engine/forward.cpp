#include <limits>
#include <optional>

#include "blockcp/engine/courier.h"
#include "blockcp/engine/run.h"

namespace blockcp {
namespace {

class Forward {
 public:
  Forward(const Call& call, const ForwardTensors& tensors)
      : call_(call),
        tensors_(tensors),
        storage_(call, {tensors.k, tensors.v}),
        courier_(call, storage_, call.schedule.forward) {
    if (partial()) sums_ = Accumulator(tensors.out, out_extent(), call.shape.dtype);
  }

  std::exception_ptr run() {
    if (partial())
      begin_with_nothing();
    else
      for (const Piece& idle : call_.schedule.idle) see_nothing(idle);
    std::exception_ptr failure = run_steps(storage_, courier_, call_.schedule.forward,
                                           [this](std::span<const Block> blocks) { compute(blocks); });
    if (partial()) sums_.round(call_.parallel);
    return failure;
  }

 private:
  bool partial() const { return call_.schedule.partial; }
  Extent out_extent() const { return {call_.batch, call_.shape.q_heads, call_.local_rows, call_.shape.value_dim}; }
  DType sum_type() const { return accumulator(call_.shape.dtype); }

  // Where the kernel writes: results over some of a row's keys are merged in the accumulator type.
  const Tensor& out() const { return partial() ? sums_.tensor() : tensors_.out; }
  DType out_type() const { return partial() ? sum_type() : call_.shape.dtype; }

  void compute(std::span<const Block> blocks) {
    const auto at = [&](const Tensor& tensor, const Piece& piece, DType type) {
      return rows_at(tensor, piece.row, call_.local_rows, type);
    };
    std::vector<AttentionBlock> work;
    for (const Block& block : blocks) {
      work.push_back(attention_block(call_.schedule, storage_, block, false));
      work.back().q = at(tensors_.q, block.q, call_.shape.dtype);
      work.back().out = at(out(), block.out, out_type());
      work.back().lse = at(tensors_.lse, block.out, sum_type());
    }
    call_.kernel.forward({call_.shape, call_.scale, work, partial(), &call_.parallel});
  }

  void begin_with_nothing() {
    sums_.clear(call_.parallel);
    for (int64_t b = 0; b < call_.batch; ++b) fill_lse({kQ, b * call_.local_rows, call_.local_rows});
  }

  void see_nothing(const Piece& rows) {
    fill_zero_rows(tensors_.out, rows.row, rows.count, out_extent(), call_.shape.dtype, call_.parallel);
    fill_lse(rows);
  }

  void fill_lse(const Piece& rows) {
    const Rows lse = rows_at(tensors_.lse, rows.row, call_.local_rows, sum_type());
    if (sum_type() == DType::f64)
      fill_lse<double>(lse, rows.count);
    else
      fill_lse<float>(lse, rows.count);
  }

  template <class T>
  void fill_lse(const Rows& lse, int64_t count) {
    for (int64_t h = 0; h < call_.shape.q_heads; ++h)
      for (int64_t r = 0; r < count; ++r)
        static_cast<T*>(lse.data)[h * lse.head + r * lse.row] = -std::numeric_limits<T>::infinity();
  }

  const Call& call_;
  const ForwardTensors& tensors_;
  Storage storage_;
  Courier courier_;
  Accumulator sums_;  // of partial results
};

}  // namespace

void forward(const Call& call, const ForwardTensors& tensors) {
  std::optional<Forward> run;
  begin(call, Phase::forward, [&] { run.emplace(call, tensors); });
  end(call, run->run());
}

}  // namespace blockcp
