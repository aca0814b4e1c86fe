// Rows between ranks on their own: one op that moves them by splits and an index, and its adjoint.
//
// move_rows: row send_index[i] of x along `dim` goes to the rank that split i falls into (in_splits, by rank); what
// arrives (out_splits rows, by rank) lies in rank order. move_rows_adjoint: the transposed map; rows that went to
// several ranks get the sum of what comes back, in fp32 (fp64 for fp64), by ascending rank, rounded once.
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

#include "blockcp/torch/c10d_transport.h"
#include "blockcp/torch/check_tensor.h"
#include "blockcp/torch/fresh.h"

namespace blockcp {
namespace {

using Splits = std::vector<int64_t>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t sum(const Splits& splits) { return std::accumulate(splits.begin(), splits.end(), int64_t{0}); }

// What every rank tells the others before rows move, followed by its splits.
struct RowsRecord {
  int64_t call = 0, row_bytes = 0;
  char trouble[496] = {};
};

struct RowsTable {
  std::vector<RowsRecord> records;
  std::vector<Splits> splits;  // of each rank: rows for every rank, then rows from every rank
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
  const size_t world = records.size();
  for (size_t r = 0; r < world; ++r)
    check_argument(records[r].trouble[0] == 0, "{} (rank {} of {})", records[r].trouble, r, world);
  for (size_t r = 0; r < world; ++r) {
    check_argument(records[0].call == records[r].call && records[0].row_bytes == records[r].row_bytes,
                   "[exchange] all ranks must move rows of the same size in the same call, but rank {} has {} bytes a "
                   "row in call {} and rank 0 {} bytes in call {}.",
                   r, records[r].row_bytes, records[r].call, records[0].row_bytes, records[0].call);
    for (size_t to = 0; to < world; ++to)
      check_argument(splits[r][to] == splits[to][world + r],
                     "[exchange] ranks must agree on rows, but rank {} sends {} rows to rank {}, which expects {}.", r,
                     splits[r][to], to, splits[to][world + r]);
  }
}

void check_splits(const Group& group, const Splits& in, const Splits& out) {
  const auto fits = [&](const Splits& splits) {
    return static_cast<int>(splits.size()) == group.world() &&
           std::all_of(splits.begin(), splits.end(), [](int64_t rows) { return rows >= 0; });
  };
  check_argument(fits(in) && fits(out),
                 "[exchange] splits must be {} numbers of at least 0, one a rank, but they are in [{}] and out [{}].",
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

// Checks locally, tells the others, then moves.
template <class Check>
std::shared_ptr<Group> opened(const std::string& name, const at::Tensor& x, int64_t dim, const Splits& in,
                              const Splits& out, Check&& check) {
  auto group = find_group(name);
  RowsRecord record{.call = group->next_call()};
  try {
    check_argument(x.is_cpu(), "[exchange] x must be on the CPU in this build, but it is on {}.", x.device().str());
    check_argument(dim >= 0 && dim < x.dim(), "[exchange] dim must be a dimension of x {}, but it is {}.",
                   text(x.sizes()), dim);
    check_splits(*group, in, out);
    check();
    record.row_bytes = row_bytes(x, dim);
  } catch (const Error& error) {
    std::strncpy(record.trouble, error.what(), sizeof record.trouble - 1);
  }
  agree_on_rows(*group, record, in, out);
  return group;
}

at::Tensor move_rows_kernel(const at::Tensor& x, const at::Tensor& send_index, const std::string& name,
                            const Splits& in, const Splits& out, int64_t dim) {
  at::Tensor index;
  const auto group = opened(name, x, dim, in, out, [&] {
    index = integers(send_index, "send_index").flatten();
    check_argument(index.numel() == sum(in),
                   "[exchange] send_index must have one entry for each of {} rows, but has {}.", sum(in),
                   index.numel());
    for (int64_t row : span_of(index))
      check_argument(row >= 0 && row < x.size(dim), "[exchange] send_index must name rows below {}, but it names {}.",
                     x.size(dim), row);
  });
  const at::Tensor rows = x.movedim(dim, 0).index_select(0, index).contiguous();
  return all_to_all(*group, rows, in, out).movedim(0, dim).contiguous();
}

at::Tensor move_rows_adjoint_kernel(const at::Tensor& grad, const at::Tensor& send_index, const std::string& name,
                                    const Splits& in, const Splits& out, int64_t dim, int64_t rows) {
  at::Tensor index;
  const auto group = opened(name, grad, dim, out, in, [&] {
    index = integers(send_index, "send_index").flatten();
    check_argument(grad.size(dim) == sum(out), "[exchange] the gradient must have {} rows, but it has {}.", sum(out),
                   grad.size(dim));
  });
  const at::Tensor returned = all_to_all(*group, grad.movedim(dim, 0).contiguous(), out, in);
  Splits sizes = returned.sizes().vec();
  sizes[0] = rows;
  const auto wide = accumulator(dtype_of(grad, "the gradient"));
  at::Tensor total = at::zeros(sizes, returned.options().dtype(scalar_type(wide)));
  total.index_add_(0, index, returned.to(total.scalar_type()));
  return total.to(grad.scalar_type()).movedim(0, dim).contiguous();
}

// For an error that Python found in this rank's arguments: all ranks throw it together.
void rows_trouble(std::string name, std::string trouble) {
  translated([&] {
    const auto group = find_group(name);
    RowsRecord record{.call = group->next_call()};
    std::strncpy(record.trouble, trouble.c_str(), sizeof record.trouble - 1);
    agree_on_rows(*group, record, {}, {});
  });
}

at::Tensor move_rows_cpu(const at::Tensor& x, const at::Tensor& send_index, std::string group, Splits in_splits,
                         Splits out_splits, int64_t dim) {
  return translated([&] { return move_rows_kernel(x, send_index, group, in_splits, out_splits, dim); });
}

at::Tensor move_rows_adjoint_cpu(const at::Tensor& grad, const at::Tensor& send_index, std::string group,
                                 Splits in_splits, Splits out_splits, int64_t dim, int64_t rows) {
  return translated(
      [&] { return move_rows_adjoint_kernel(grad, send_index, group, in_splits, out_splits, dim, rows); });
}

at::Tensor with_rows(const at::Tensor& x, int64_t dim, int64_t rows) {
  auto sizes = x.sym_sizes().vec();
  sizes.at(static_cast<size_t>(dim)) = rows;
  return at::empty_symint(sizes, x.options());
}

at::Tensor move_rows_meta(const at::Tensor& x, const at::Tensor&, std::string, Splits, Splits out_splits, int64_t dim) {
  return with_rows(x, dim, sum(out_splits));
}

at::Tensor move_rows_adjoint_meta(const at::Tensor& grad, const at::Tensor&, std::string, Splits, Splits, int64_t dim,
                                  int64_t rows) {
  return with_rows(grad, dim, rows);
}

at::Tensor call_move_rows(const at::Tensor& x, const at::Tensor& send_index, const std::string& group, const Splits& in,
                          const Splits& out, int64_t dim) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("blockcp::move_rows", "").typed<decltype(move_rows_cpu)>();
  return op.call(x, send_index, group, in, out, dim);
}

at::Tensor call_adjoint(const at::Tensor& grad, const at::Tensor& send_index, const std::string& group,
                        const Splits& in, const Splits& out, int64_t dim, int64_t rows) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("blockcp::move_rows_adjoint", "")
                             .typed<decltype(move_rows_adjoint_cpu)>();
  return op.call(grad, send_index, group, in, out, dim, rows);
}

struct MoveRows : torch::autograd::Function<MoveRows> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& send_index,
                            const std::string& group, const Splits& in, const Splits& out, int64_t dim) {
    ctx->save_for_backward({send_index});
    ctx->saved_data["group"] = group;
    ctx->saved_data["in"] = in;
    ctx->saved_data["out"] = out;
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["rows"] = x.size(dim);
    at::AutoDispatchBelowADInplaceOrView below;
    return call_move_rows(x, send_index, group, in, out, dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor send_index = ctx->get_saved_variables()[0];
    auto& data = ctx->saved_data;
    const at::Tensor dx = call_adjoint(grads[0], send_index, data["group"].toStringRef(), data["in"].toIntVector(),
                                       data["out"].toIntVector(), data["dim"].toInt(), data["rows"].toInt());
    return {dx, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor move_rows_autograd(const at::Tensor& x, const at::Tensor& send_index, std::string group, Splits in_splits,
                              Splits out_splits, int64_t dim) {
  if (at::GradMode::is_enabled() && x.requires_grad())
    return MoveRows::apply(x, send_index, group, in_splits, out_splits, dim);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_move_rows(x, send_index, group, in_splits, out_splits, dim);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(blockcp, m) {
  m.def("move_rows(Tensor x, Tensor send_index, str group, int[] in_splits, int[] out_splits, int dim) -> Tensor");
  m.def(
      "move_rows_adjoint(Tensor grad, Tensor send_index, str group, int[] in_splits, int[] out_splits, int dim, "
      "int rows) -> Tensor");
  m.def("rows_trouble(str group, str trouble) -> ()", rows_trouble);
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
