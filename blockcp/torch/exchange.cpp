// Rows between ranks on their own: one op that moves them by splits and an index, and its adjoint.
//
// move_rows: row send_index[i] of x along `dim` goes to the rank that split i falls into (in_splits, by rank); what
// arrives (out_splits rows, by rank) lies in rank order. `trouble` is as for attention, see ops.h. move_rows_adjoint:
// the transposed map; rows that went to several ranks get the sum of what comes back, in fp32 (fp64 for fp64), by
// ascending rank, rounded once.
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cstring>
#include <numeric>

#include "blockcp/engine/agreement.h"
#include "blockcp/engine/alike.h"
#include "blockcp/torch/c10d_transport.h"
#include "blockcp/torch/check_tensor.h"
#include "blockcp/torch/fresh.h"

namespace blockcp {
namespace {

using Splits = std::vector<int64_t>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t sum(const Splits& splits) { return std::accumulate(splits.begin(), splits.end(), int64_t{0}); }

// What both ops carry beside their tensors.
struct RowsArgs {
  std::string group;  // empty: no group, one rank
  Splits in, out;     // rows for and from every rank, in forward
  int64_t dim = 0;
  bool needs_grad = false;  // set by the Autograd kernel: a backward will follow
};

constexpr size_t kDims = 64;  // no tensor has more

// What every rank tells the others before rows move, followed by its splits. See alike.h.
struct RowsRecord {
  int64_t call = 0, dims = 0, dim = 0, sizes[kDims] = {};  // of x, or of the gradient
  Phase phase = Phase::forward;
  at::ScalarType dtype = at::kFloat;
  bool needs_grad = false, troubled = false, argument = true;
  char trouble[800] = {};
};

struct RowsTable {
  std::vector<RowsRecord> records;
  std::vector<Splits> splits;  // of each rank: rows for every rank, then rows from every rank
};

// The splits say how many rows there are along `dim`; every other size is one for all.
std::string shape_text(const RowsRecord& record) {
  std::vector<std::string> sizes;
  for (int64_t d = 0; d < record.dims; ++d)
    sizes.push_back(d == record.dim ? "rows" : fmt::format("{}", record.sizes[d]));
  return fmt::format("[{}]", fmt::join(sizes, ", "));
}

const Field<RowsRecord> kFields[] = {
    {"move rows in the same calls in the same order",
     [](const RowsRecord& r) { return fmt::format("call {}", r.call); }, "Does a rank skip an exchange?"},
    {"run the same direction",
     [](const RowsRecord& r) { return std::string(r.phase == Phase::forward ? "forward" : "backward"); },
     "Does one rank not run its backward?"},
    {"move rows of the same dtype", [](const RowsRecord& r) { return std::string(c10::toString(r.dtype)); },
     "Check autocast and the types of the weights."},
    {"move rows of the same shape along the same dim", shape_text, "Check the shapes and dim."},
    {"need gradients alike",
     [](const RowsRecord& r) { return std::string(r.needs_grad ? "with gradients" : "without"); },
     "Set requires_grad alike on all ranks."},
};

RowsTable gather_table(Group& group, const RowsRecord& mine, const Splits& in, const Splits& out) {
  const size_t world = static_cast<size_t>(group.world()), split_bytes = 2 * world * sizeof(int64_t);
  Splits splits(2 * world);
  std::copy_n(in.begin(), std::min(in.size(), world), splits.begin());
  std::copy_n(out.begin(), std::min(out.size(), world), splits.begin() + group.world());
  std::vector<std::byte> line(sizeof mine + split_bytes);
  std::memcpy(line.data(), &mine, sizeof mine);
  std::memcpy(line.data() + sizeof mine, splits.data(), split_bytes);

  const std::vector<std::byte> all = group.gather(line);
  RowsTable table{std::vector<RowsRecord>(world), std::vector<Splits>(world, Splits(2 * world))};
  for (size_t r = 0; r < world; ++r) {
    std::memcpy(&table.records[r], &all[r * line.size()], sizeof mine);
    std::memcpy(table.splits[r].data(), &all[r * line.size() + sizeof mine], split_bytes);
  }
  return table;
}

// Collective: every rank throws the same error unless each rank sends what its peer expects.
void agree_on_rows(Group& group, const RowsRecord& mine, const Splits& in, const Splits& out) {
  const auto [records, splits] = gather_table(group, mine, in, out);
  check_untroubled<RowsRecord>(records);
  check_alike<RowsRecord>(records, kFields);
  for (size_t r = 0; r < records.size(); ++r)
    for (size_t to = 0; to < records.size(); ++to)
      check_argument(splits[r][to] == splits[to][records.size() + r],
                     "[exchange] ranks must agree on rows, but rank {} sends {} rows to rank {}, which expects {}.", r,
                     splits[r][to], to, splits[to][records.size() + r]);
}

void check_splits(const Group& group, const Splits& in, const Splits& out) {
  const auto fits = [&](const Splits& splits) {
    return static_cast<int>(splits.size()) == group.world() &&
           std::all_of(splits.begin(), splits.end(), [](int64_t rows) { return rows >= 0 && rows >> 31 == 0; });
  };
  check_argument(fits(in) && fits(out),
                 "[exchange] splits must be numbers from 0 to 2^31 - 1, one for each rank of {}, but they are in [{}] "
                 "and out [{}].",
                 group.world(), fmt::join(in, ", "), fmt::join(out, ", "));
}

// Bytes of one row: everything behind `dim`.
int64_t row_bytes(const at::Tensor& x, int64_t dim) {
  int64_t bytes = x.element_size();
  for (int64_t d = 0; d < x.dim(); ++d) bytes *= d == dim ? 1 : x.size(d);
  return bytes;
}

// What the transport carries between ranks: nothing from a rank to itself.
Splits bytes_for_others(const Group& group, Splits splits, int64_t width) {
  for (int64_t& rows : splits) rows *= width;
  splits[static_cast<size_t>(group.rank())] = 0;
  return splits;
}

// Rows by rank, [sum(out), ...] from [sum(in), ...], contiguous; a row is everything behind the first dimension.
at::Tensor all_to_all(Group& group, const at::Tensor& rows, const Splits& in, const Splits& out) {
  const auto me = group.rank();
  const int64_t own = in[me], width = row_bytes(rows, 0);
  const int64_t own_from = std::accumulate(in.begin(), in.begin() + me, int64_t{0});
  const int64_t own_to = std::accumulate(out.begin(), out.begin() + me, int64_t{0});
  const at::Tensor sent = at::cat({rows.narrow(0, 0, own_from), rows.slice(0, own_from + own)});
  Splits sizes = rows.sizes().vec();
  sizes[0] = sum(out) - own;
  at::Tensor arrived = fresh(sizes, rows.options());
  const Splits send_bytes = bytes_for_others(group, in, width), recv_bytes = bytes_for_others(group, out, width);
  group
      .exchange({.send = static_cast<const std::byte*>(sent.const_data_ptr()),
                 .send_bytes = send_bytes,
                 .recv = static_cast<std::byte*>(arrived.mutable_data_ptr()),
                 .recv_bytes = recv_bytes,
                 .what = "an exchange of rows"})
      ->wait();
  return at::cat({arrived.narrow(0, 0, own_to), rows.narrow(0, own_from, own), arrived.slice(0, own_to)});
}

void check_rows(const at::Tensor& x, int64_t dim) {
  check_argument(x.is_cpu(), "[exchange] x must be on the CPU in this build, but it is on {}.", x.device().str());
  check_argument(x.dim() <= static_cast<int64_t>(kDims), "[exchange] x must have at most {} dimensions, but it has {}.",
                 kDims, x.dim());
  check_argument(dim >= 0 && dim < x.dim(), "[exchange] dim must be a dimension of x {}, but it is {}.",
                 text(x.sizes()), dim);
}

// One call: checks locally, tells the others, then moves.
class RowsCall {
 public:
  RowsCall(const RowsArgs& args, Phase phase)
      : group_(find_group(args.group)),
        sends_(phase == Phase::forward ? args.in : args.out),
        receives_(phase == Phase::forward ? args.out : args.in) {
    record_.call = group_->next_call();
    record_.phase = phase;
    record_.needs_grad = args.needs_grad;
  }

  template <class Check>
  void agree(const at::Tensor& x, int64_t dim, const std::string& trouble, Check&& check) {
    try {
      check_argument(trouble.empty(), "{}", trouble);
      check_rows(x, dim);
      check_splits(*group_, sends_, receives_);
      check();
      describe(x, dim);
    } catch (...) {
      const Trouble found = trouble_of(std::current_exception());
      put_trouble(record_, found.text, found.is_argument);
    }
    agree_on_rows(*group_, record_, sends_, receives_);
  }

  at::Tensor move(const at::Tensor& rows) const { return all_to_all(*group_, rows, sends_, receives_); }

 private:
  void describe(const at::Tensor& x, int64_t dim) {
    record_.dtype = x.scalar_type();
    record_.dims = x.dim();
    record_.dim = dim;
    std::copy(x.sizes().begin(), x.sizes().end(), record_.sizes);
  }

  const std::shared_ptr<Group> group_;
  const Splits sends_, receives_;
  RowsRecord record_;
};

at::Tensor index_of(const at::Tensor& send_index, int64_t count, int64_t rows) {
  const at::Tensor index = integers(send_index, "send_index").flatten();
  check_argument(index.numel() == count, "[exchange] send_index must have one entry for each of {} rows, but has {}.",
                 count, index.numel());
  for (int64_t row : span_of(index))
    check_argument(
        row >= 0 && row < rows,
        "[exchange] send_index must name rows below {}, but it names {}. A plan's names rows of the whole batch: "
        "flatten batch and rows first.",
        rows, row);
  return index;
}

at::Tensor move_rows_kernel(const at::Tensor& x, const at::Tensor& send_index, const RowsArgs& args,
                            const std::string& trouble) {
  RowsCall call(args, Phase::forward);
  at::Tensor index;
  call.agree(x, args.dim, trouble, [&] { index = index_of(send_index, sum(args.in), x.size(args.dim)); });
  const at::Tensor rows = x.movedim(args.dim, 0).index_select(0, index).contiguous();
  return call.move(rows).movedim(0, args.dim).contiguous();
}

at::Tensor move_rows_adjoint_kernel(const at::Tensor& grad, const at::Tensor& send_index, const RowsArgs& args,
                                    int64_t rows) {
  RowsCall call(args, Phase::backward);
  at::Tensor index;
  call.agree(grad, args.dim, /*trouble=*/"", [&] {
    check_argument(grad.size(args.dim) == sum(args.out), "[exchange] the gradient must have {} rows, but it has {}.",
                   sum(args.out), grad.size(args.dim));
    index = index_of(send_index, sum(args.in), rows);
  });
  const at::Tensor returned = call.move(grad.movedim(args.dim, 0).contiguous());
  Splits sizes = returned.sizes().vec();
  sizes[0] = rows;
  at::Tensor total = at::zeros(sizes, returned.options().dtype(at::toOpMathType(grad.scalar_type())));
  total.index_add_(0, index, returned.to(total.scalar_type()));
  return total.to(grad.scalar_type()).movedim(0, args.dim).contiguous();
}

at::Tensor move_rows_cpu(const at::Tensor& x, const at::Tensor& send_index, std::string group, Splits in_splits,
                         Splits out_splits, int64_t dim, bool needs_grad, std::string trouble) {
  return translated([&] {
    return move_rows_kernel(x, send_index, {group, in_splits, out_splits, dim, needs_grad}, trouble);
  });
}

at::Tensor move_rows_adjoint_cpu(const at::Tensor& grad, const at::Tensor& send_index, std::string group,
                                 Splits in_splits, Splits out_splits, int64_t dim, int64_t rows) {
  return translated([&] {
    return move_rows_adjoint_kernel(grad, send_index, {group, in_splits, out_splits, dim}, rows);
  });
}

at::Tensor with_rows(const at::Tensor& x, int64_t dim, int64_t rows) {
  auto sizes = x.sym_sizes().vec();
  sizes.at(static_cast<size_t>(dim)) = rows;
  return at::empty_symint(sizes, x.options());
}

at::Tensor move_rows_meta(const at::Tensor& x, const at::Tensor& send_index, std::string group, Splits in_splits,
                          Splits out_splits, int64_t dim, bool needs_grad, std::string trouble) {
  if (!all_meta({x})) return move_rows_cpu(x, send_index, group, in_splits, out_splits, dim, needs_grad, trouble);
  return with_rows(x, dim, sum(out_splits));
}

at::Tensor move_rows_adjoint_meta(const at::Tensor& grad, const at::Tensor& send_index, std::string group,
                                  Splits in_splits, Splits out_splits, int64_t dim, int64_t rows) {
  if (!all_meta({grad})) return move_rows_adjoint_cpu(grad, send_index, group, in_splits, out_splits, dim, rows);
  return with_rows(grad, dim, rows);
}

at::Tensor call_move_rows(const at::Tensor& x, const at::Tensor& send_index, const RowsArgs& args,
                          const std::string& trouble) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("blockcp::move_rows", "").typed<decltype(move_rows_cpu)>();
  return op.call(x, send_index, args.group, args.in, args.out, args.dim, args.needs_grad, trouble);
}

at::Tensor call_adjoint(const at::Tensor& grad, const at::Tensor& send_index, const RowsArgs& args, int64_t rows) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("blockcp::move_rows_adjoint", "")
                             .typed<decltype(move_rows_adjoint_cpu)>();
  return op.call(grad, send_index, args.group, args.in, args.out, args.dim, rows);
}

struct MoveRows : torch::autograd::Function<MoveRows> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& send_index,
                            const RowsArgs& args, const std::string& trouble) {
    at::Tensor moved = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      return call_move_rows(x, send_index, args, trouble);
    }();
    ctx->save_for_backward({send_index});
    ctx->saved_data["group"] = args.group;
    ctx->saved_data["in"] = args.in;
    ctx->saved_data["out"] = args.out;
    ctx->saved_data["dim"] = args.dim;
    ctx->saved_data["rows"] = x.size(args.dim);
    return moved;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor send_index = ctx->get_saved_variables()[0];
    auto& data = ctx->saved_data;
    const RowsArgs args{data["group"].toStringRef(), data["in"].toIntVector(), data["out"].toIntVector(),
                        data["dim"].toInt()};
    return {call_adjoint(grads[0], send_index, args, data["rows"].toInt()), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor move_rows_autograd(const at::Tensor& x, const at::Tensor& send_index, std::string group, Splits in_splits,
                              Splits out_splits, int64_t dim, bool, std::string trouble) {
  if (trouble.empty()) trouble = tangent_trouble({{"x", x}});
  const RowsArgs args{group, in_splits, out_splits, dim, at::GradMode::is_enabled() && x.requires_grad()};
  if (args.needs_grad) return MoveRows::apply(x, send_index, args, trouble);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_move_rows(x, send_index, args, trouble);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(blockcp, m) {
  m.def(
      "move_rows(Tensor x, Tensor send_index, str group, int[] in_splits, int[] out_splits, int dim, "
      "bool needs_grad=False, str trouble=\"\") -> Tensor");
  m.def(
      "move_rows_adjoint(Tensor grad, Tensor send_index, str group, int[] in_splits, int[] out_splits, int dim, "
      "int rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(blockcp, CPU, m) {
  m.impl("move_rows", move_rows_cpu);
  m.impl("move_rows_adjoint", move_rows_adjoint_cpu);
}

TORCH_LIBRARY_IMPL(blockcp, Meta, m) {
  m.impl("move_rows", move_rows_meta);
  m.impl("move_rows_adjoint", move_rows_adjoint_meta);
}

TORCH_LIBRARY_IMPL(blockcp, Autograd, m) {
  m.impl("move_rows", move_rows_autograd);
  m.impl("move_rows_adjoint", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace blockcp
