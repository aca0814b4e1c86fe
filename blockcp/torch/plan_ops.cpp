// The ops through which Python makes and reads plans.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <nlohmann/json.hpp>

#include "blockcp/torch/c10d_transport.h"
#include "blockcp/torch/check_tensor.h"
#include "blockcp/torch/plans.h"

namespace blockcp {
namespace {

using Json = nlohmann::json;

at::Tensor plan_create(at::TensorList tensors, std::string request) {
  return translated([&] { return register_plan(make_plan(tensors.vec(), request)); });
}

Json describe(const Plan& plan) {
  const Packing& packing = plan.packing();
  Json json{{"world_size", plan.world()},
            {"rank", plan.rank()},
            {"batch", packing.batch()},
            {"rows", packing.rows()},
            {"given_rows", plan.given_rows()},
            {"local_rows", plan.local_rows()},
            {"documents", packing.documents().size()},
            {"real_rows", packing.real_rows()},
            {"fingerprint", fmt::format("{:016x}", plan.fingerprint())},
            {"masks", Json::object()}};
  for (const auto& entry : plan.entries())
    json["masks"][entry->name] = {
        {"path", name(entry->choice.path)}, {"reason", entry->choice.reason}, {"causal", entry->mask.causal}};
  return json;
}

std::string plan_describe(const at::Tensor& handle) {
  return translated([&] { return describe(*find_plan(handle)).dump(); });
}

std::string plan_explain(const at::Tensor& handle, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                         int64_t value_dim, std::string dtype, bool json) {
  return translated([&] {
    const auto plan = find_plan(handle);
    const Shape shape{q_heads, kv_heads, head_dim, value_dim, parse_dtype(dtype)};
    return json ? explain_json(*plan, shape) : explain(*plan, shape);
  });
}

// What a rank holds; rank -1 is the whole, uncut batch.
std::vector<Segment> segments_of(const Plan& plan, int64_t rank) {
  if (rank >= 0) return plan.layout().of(static_cast<int>(rank));
  std::vector<Segment> all;
  const Packing& packing = plan.packing();
  for (int64_t b = 0; b < packing.batch(); ++b) all.push_back({0, b, {0, packing.rows()}, b * packing.rows()});
  return all;
}

void check_rank(const Plan& plan, int64_t rank) {
  check_argument(rank >= -1 && rank < plan.world(), "[plan] rank must be in [0, {}), but it is {}.", plan.world(),
                 rank);
}

// Per row its document, counted from 1 in its sequence (0: padding), and its position in it.
std::tuple<at::Tensor, at::Tensor> plan_rows(const at::Tensor& handle, int64_t rank) {
  return translated([&] {
    const auto plan = find_plan(handle);
    check_rank(*plan, rank);
    const Packing& packing = plan->packing();
    const int64_t rows = rank < 0 ? packing.rows() : plan->local_rows();
    at::Tensor ids = at::zeros({packing.batch(), rows}, at::kLong), positions = at::zeros_like(ids);
    auto* id = ids.mutable_data_ptr<int64_t>();
    auto* position = positions.mutable_data_ptr<int64_t>();
    for (const Segment& segment : segments_of(*plan, rank)) {
      const size_t of_sequence = packing.overlapping(segment.batch, {0, packing.rows()}).first;
      const auto [first, last] = packing.overlapping(segment.batch, segment.rows);
      for (size_t d = first; d < last; ++d) {
        const Range document = packing.documents()[d].rows;
        const Range held = intersect(document, segment.rows);
        for (int64_t row = held.begin; row < held.end; ++row) {
          const int64_t at = segment.local + row - segment.rows.begin;
          id[at] = static_cast<int64_t>(d - of_sequence) + 1;
          position[at] = row - document.begin;
        }
      }
    }
    return std::tuple{ids, positions};
  });
}

// [B, L, S]: does local row i of `rank` see row j of the whole sequence? For checks; it is as large as it looks.
at::Tensor plan_visible(const at::Tensor& handle, std::string mask, int64_t rank) {
  return translated([&] {
    const auto plan = find_plan(handle);
    check_rank(*plan, rank);
    const Packing& packing = plan->packing();
    const Plan::Entry& entry = plan->entry(mask);
    const int64_t rows = rank < 0 ? packing.rows() : plan->local_rows();
    at::Tensor seen = at::zeros({packing.batch(), rows, packing.rows()}, at::kBool);
    bool* see = seen.mutable_data_ptr<bool>();
    for (const Segment& segment : segments_of(*plan, rank)) {
      const auto [first, last] = packing.overlapping(segment.batch, segment.rows);
      for (size_t d = first; d < last; ++d) {
        const Range document = packing.documents()[d].rows;
        const Range held = intersect(document, segment.rows);
        for (int64_t row = held.begin; row < held.end; ++row) {
          const Range q{row - document.begin, row - document.begin + 1};
          const Range keys = entry.bands.keys(d, q);
          bool* line = see + (segment.local + row - segment.rows.begin) * packing.rows() + document.begin;
          std::fill(line + keys.begin, line + std::max(keys.begin, keys.end), true);
        }
      }
    }
    return seen;
  });
}

std::string plan_kv(const at::Tensor& handle, std::string mask, int64_t batch) {
  return translated([&] {
    const auto plan = find_plan(handle);
    check_argument(batch >= 0 && batch < plan->packing().batch(), "[plan] batch must be in [0, {}), but it is {}.",
                   plan->packing().batch(), batch);
    const KvPlan kv = kv_plan(*plan, plan->entry(mask), batch);
    return Json{{"recv", kv.recv},       {"send", kv.send},         {"nreal", kv.nreal},
                {"s_first", kv.s_first}, {"real_end", kv.real_end}, {"use_halo", kv.use_halo}}
        .dump();
  });
}

std::string plan_split_matrix(const at::Tensor& handle, std::string mask) {
  return translated([&] {
    const auto plan = find_plan(handle);
    return Json(split_matrix(*plan, plan->entry(mask))).dump();
  });
}

std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::Tensor> plan_needed_splits(const at::Tensor& handle,
                                                                                      std::string mask, int64_t rank) {
  return translated([&] {
    const auto plan = find_plan(handle);
    check_argument(rank >= 0 && rank < plan->world(), "[plan] rank must be in [0, {}), but it is {}.", plan->world(),
                   rank);
    const NeededSplits splits = needed_splits(*plan, plan->entry(mask), static_cast<int>(rank));
    at::Tensor index = at::empty({static_cast<int64_t>(splits.send_index.size())}, at::kLong);
    std::copy(splits.send_index.begin(), splits.send_index.end(), index.mutable_data_ptr<int64_t>());
    return std::tuple{splits.in_splits, splits.out_splits, index};
  });
}

int64_t plan_calls(const at::Tensor& handle) {
  return translated([&] { return count_of_calls(handle); });
}

// Bytes that this rank has sent and received in transfers of the group; the small agreement records not counted.
std::tuple<int64_t, int64_t> group_traffic(std::string name) {
  return translated([&] {
    const auto group = find_group(name);
    return std::tuple{group->bytes_sent(), group->bytes_received()};
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(blockcp, m) {
  m.def("plan_create(Tensor[] tensors, str request) -> Tensor", plan_create);
  m.def("plan_describe(Tensor plan) -> str", plan_describe);
  m.def(
      "plan_explain(Tensor plan, int q_heads, int kv_heads, int head_dim, int value_dim, str dtype, bool json) -> str",
      plan_explain);
  m.def("plan_rows(Tensor plan, int rank) -> (Tensor doc_ids, Tensor position_ids)", plan_rows);
  m.def("plan_visible(Tensor plan, str mask, int rank) -> Tensor", plan_visible);
  m.def("plan_kv(Tensor plan, str mask, int batch) -> str", plan_kv);
  m.def("plan_split_matrix(Tensor plan, str mask) -> str", plan_split_matrix);
  m.def("plan_needed_splits(Tensor plan, str mask, int rank) -> (int[] in_splits, int[] out_splits, Tensor send_index)",
        plan_needed_splits);
  m.def("plan_calls(Tensor plan) -> int", plan_calls);
  m.def("plan_count() -> int", count_plans);
  m.def("group_traffic(str group) -> (int sent, int received)", group_traffic);
}

}  // namespace blockcp
