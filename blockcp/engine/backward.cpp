#include <optional>

#include "blockcp/engine/courier.h"
#include "blockcp/engine/run.h"

namespace blockcp {
namespace {

class Backward {
 public:
  Backward(const Call& call, const BackwardTensors& tensors)
      : call_(call),
        tensors_(tensors),
        dq_(tensors.dq, extent(call.shape.q_heads, call.shape.head_dim), call.shape.dtype, !all_keys()),
        dk_(tensors.dk, extent(call.shape.kv_heads, call.shape.head_dim), call.shape.dtype, !all_queries()),
        dv_(tensors.dv, extent(call.shape.kv_heads, call.shape.value_dim), call.shape.dtype, !all_queries()),
        storage_(call, {tensors.k, tensors.v, &dq_, &dk_, &dv_}),
        courier_(call, storage_, call.schedule.backward),
        delta_memory_(call.batch * call.shape.q_heads * call.local_rows * size_of(sum_type())),
        delta_{delta_memory_.data(), call.shape.q_heads * call.local_rows, call.local_rows, 1, 1} {}

  std::exception_ptr run() {
    std::exception_ptr failure = all_keys() ? nullptr : delta();
    for (const Piece& idle : call_.schedule.idle) see_nothing(idle);
    std::exception_ptr later =
        run_steps(storage_, courier_, call_.schedule.backward, [&](std::span<const Block> blocks) {
          if (!failure) compute(blocks);
        });
    for (const Accumulator* sums : {&dq_, &dk_, &dv_}) sums->round(call_.parallel);
    return failure ? failure : later;
  }

 private:
  // What the blocks of a schedule know of each other, see BackwardArgs. On one rank every key has its queries here.
  bool all_keys() const { return !call_.schedule.partial; }
  bool all_queries() const { return all_keys() && call_.schedule.world == 1; }

  // Rows of no block are not written otherwise.
  void see_nothing(const Piece& rows) const {
    for (const Accumulator* sums : {&dq_, &dk_, &dv_}) {
      if (sums->added()) continue;
      fill_zero_rows(sums->tensor(), rows.row, rows.count, sums->extent(), sums->type(), call_.parallel);
    }
  }

  Extent extent(int64_t heads, int64_t width) const { return {call_.batch, heads, call_.local_rows, width}; }
  DType type() const { return call_.shape.dtype; }
  DType sum_type() const { return accumulator(call_.shape.dtype); }
  Rows at(const Tensor& tensor, const Piece& piece, DType type) const {
    return rows_at(tensor, piece.row, call_.local_rows, type);
  }

  // The query side of a block.
  void add_queries(AttentionBlock& block, const Piece& rows) const {
    block.q = at(tensors_.q, rows, type());
    block.out = at(tensors_.out, rows, type());
    block.lse = at(tensors_.lse, rows, sum_type());
    block.dout = at(tensors_.dout, rows, type());
    block.delta = at(delta_, rows, sum_type());
    block.dq = at(dq_.tensor(), rows, dq_.type());
  }

  // Once for every row, however many blocks it is in.
  std::exception_ptr delta() {
    constexpr int64_t kRows = 128;
    std::vector<AttentionBlock> runs;
    for (int64_t b = 0; b < call_.batch; ++b)
      for (int64_t row = 0; row < call_.local_rows; row += kRows) {
        runs.emplace_back().q_count = std::min(kRows, call_.local_rows - row);
        add_queries(runs.back(), {kQ, b * call_.local_rows + row, runs.back().q_count});
      }
    try {
      compute_delta(call_.shape, runs, call_.parallel);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void compute(std::span<const Block> blocks) {
    std::vector<AttentionBlock> work;
    for (const Block& block : blocks) {
      work.push_back(attention_block(call_.schedule, storage_, block, true));
      add_queries(work.back(), block.q);
    }
    call_.kernel.backward({call_.shape, call_.scale, work, &call_.parallel, all_keys(), all_queries()});
  }

  const Call& call_;
  const BackwardTensors& tensors_;
  Accumulator dq_, dk_, dv_;
  Storage storage_;
  Courier courier_;
  Memory delta_memory_;
  Tensor delta_;
};

}  // namespace

void backward(const Call& call, const BackwardTensors& tensors) {
  std::optional<Backward> run;
  begin(call, Phase::backward, [&] { run.emplace(call, tensors); });
  end(call, run->run());
}

}  // namespace blockcp
