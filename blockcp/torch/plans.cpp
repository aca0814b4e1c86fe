#include "blockcp/torch/plans.h"

#include <ATen/ops/from_blob.h>

#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "blockcp/torch/check_tensor.h"

namespace blockcp {
namespace {

using Json = nlohmann::json;

struct Registered {
  std::shared_ptr<const Plan> plan;
  int64_t calls = 0;
};

struct Registry {
  std::mutex mutex;
  int64_t next = 1;
  std::unordered_map<int64_t, Registered> plans;
};

Registry& registry() {
  static auto* plans = new Registry;  // never destroyed: Python may drop its last handle after static destructors ran
  return *plans;
}

void drop(void* id) {
  std::shared_ptr<const Plan> last;  // destroyed after the lock is released
  {
    std::lock_guard lock(registry().mutex);
    auto node = registry().plans.extract(*static_cast<int64_t*>(id));
    if (!node.empty()) last = std::move(node.mapped().plan);
  }
  delete static_cast<int64_t*>(id);
}

// The sizes of ids, positions or spans: [rows] is one sequence.
struct Sizes {
  int64_t batch, rows;
};

Sizes sizes_of(const at::Tensor& tensor, std::string_view what) {
  check_argument(tensor.dim() == 1 || tensor.dim() == 2, "[plan] {} must have the shape [S] or [B, S], but it is {}.",
                 what, text(tensor.sizes()));
  return tensor.dim() == 1 ? Sizes{1, tensor.size(0)} : Sizes{tensor.size(0), tensor.size(1)};
}

class Request {
 public:
  Request(const std::vector<at::Tensor>& tensors, const Json& json) : tensors_(tensors), json_(json) {}

  Packing packing() const {
    if (json_.contains("ids")) return from_ids();
    if (json_.contains("lengths")) return from_lengths();
    if (json_.contains("cu_seqlens")) return from_cu_seqlens();
    return from_positions();
  }

  PlanOptions options(const Packing& packing) const {
    PlanOptions options{.world = json_.at("world"), .rank = json_.at("rank"), .masks = {}, .pad = json_.at("pad")};
    for (const auto& [name, mask] : json_.at("masks").items()) options.masks[name] = mask_of(name, mask, packing);
    for (const auto& [name, path] : json_.at("exchange").items())
      options.exchange[name] = parse_path(path.get<std::string>());
    return options;
  }

 private:
  const at::Tensor& tensor(const Json& at) const { return tensors_.at(at.get<size_t>()); }
  int64_t rows() const { return json_.value("rows", int64_t{-1}); }

  Packing from_ids() const {
    const at::Tensor ids = integers(tensor(json_.at("ids")), "doc_ids");
    const auto [batch, rows] = sizes_of(ids, "doc_ids");
    return Packing::from_ids(span_of(ids), batch, rows);
  }

  Packing from_lengths() const {
    const at::Tensor flat = integers(tensor(json_.at("lengths")), "lengths");
    std::vector<std::vector<int64_t>> lengths;
    const auto all = span_of(flat);
    size_t at = 0;
    for (size_t count : json_.at("counts")) {
      lengths.emplace_back(all.begin() + at, all.begin() + at + count);
      at += count;
    }
    return Packing::from_lengths(lengths, rows());
  }

  Packing from_cu_seqlens() const {
    const at::Tensor offsets = integers(tensor(json_.at("cu_seqlens")), "cu_seqlens");
    check_argument(offsets.dim() == 1, "[plan] cu_seqlens must have one dimension, but its shape is {}.",
                   text(offsets.sizes()));
    return Packing::from_cu_seqlens(span_of(offsets), rows());
  }

  Packing from_positions() const {
    const at::Tensor positions = integers(tensor(json_.at("positions")), "position_ids");
    const auto [batch, rows] = sizes_of(positions, "position_ids");
    if (!json_.contains("padding")) return Packing::from_positions(span_of(positions), {}, batch, rows);
    const at::Tensor given = tensor(json_.at("padding"));
    check_argument(given.sizes() == positions.sizes(),
                   "[plan] padding_mask must have the shape of position_ids, {}, but it is {}.",
                   text(positions.sizes()), text(given.sizes()));
    const at::Tensor padding = integers(given, "padding_mask").ne(0).to(at::kByte);
    return Packing::from_positions(
        span_of(positions), {padding.const_data_ptr<uint8_t>(), static_cast<size_t>(padding.numel())}, batch, rows);
  }

  Mask mask_of(const std::string& name, const Json& json, const Packing& packing) const {
    const bool causal = json.at("causal");
    const Json& window = json.at("window");
    const auto side = [](const Json& j) { return j.is_null() ? std::optional<int64_t>{} : j.get<int64_t>(); };
    Mask mask =
        window.is_array() ? windowed(side(window.at(0)), side(window.at(1)), causal) : windowed(side(window), causal);
    const std::string rule = json.at("span_window");
    mask.span_window = rule == "left" ? SpanWindow::left : rule == "both" ? SpanWindow::both : SpanWindow::none;
    if (json.contains("spans")) mask.spans = spans_of(name, tensor(json.at("spans")), packing);
    return mask;
  }

  // [S] and [1, S] serve every sequence of the batch.
  static std::vector<int64_t> spans_of(const std::string& name, const at::Tensor& given, const Packing& packing) {
    at::Tensor spans = integers(given, "spans");
    const auto [batch, rows] = sizes_of(spans, "spans");
    check_argument(
        (batch == packing.batch() || batch == 1) && rows == packing.rows(),
        "[plan] spans of mask \"{}\" must have the shape [S] or [B, S] with B = {} and S = {}, but it is {}.", name,
        packing.batch(), packing.rows(), text(spans.sizes()));
    spans = spans.reshape({batch, rows}).expand({packing.batch(), rows}).contiguous();
    const auto all = span_of(spans);
    return {all.begin(), all.end()};
  }

  const std::vector<at::Tensor>& tensors_;
  const Json& json_;
};

}  // namespace

at::Tensor register_plan(std::shared_ptr<const Plan> plan) {
  auto id = std::make_unique<int64_t>();
  {
    std::lock_guard lock(registry().mutex);
    *id = registry().next++;
    registry().plans.emplace(*id, Registered{std::move(plan)});
  }
  return at::from_blob(id.release(), {}, drop, at::kLong);
}

namespace {

// Calls use(the plan's entry) under the lock.
template <class Use>
auto with_registered(const at::Tensor& handle, Use&& use) {
  check_argument(handle.dim() == 0 && handle.scalar_type() == at::kLong && handle.is_cpu(),
                 "[torch] the plan must be the handle of a blockcp plan, but it is a tensor of shape {}.",
                 text(handle.sizes()));
  const int64_t id = *handle.const_data_ptr<int64_t>();
  std::lock_guard lock(registry().mutex);
  const auto found = registry().plans.find(id);
  check_argument(found != registry().plans.end(),
                 "[torch] the plan must be alive, but handle {} is not among {} plans. Was it cloned, and the plan "
                 "deleted?",
                 id, registry().plans.size());
  return use(found->second);
}

}  // namespace

std::shared_ptr<const Plan> find_plan(const at::Tensor& handle) {
  return with_registered(handle, [](const Registered& plan) { return plan.plan; });
}

void count_call(const at::Tensor& handle) {
  with_registered(handle, [](Registered& plan) { ++plan.calls; });
}

int64_t count_of_calls(const at::Tensor& handle) {
  return with_registered(handle, [](const Registered& plan) { return plan.calls; });
}

int64_t count_plans() {
  std::lock_guard lock(registry().mutex);
  return static_cast<int64_t>(registry().plans.size());
}

std::shared_ptr<const Plan> make_plan(const std::vector<at::Tensor>& tensors, std::string_view request) {
  const Json json = Json::parse(request);
  const Request parsed(tensors, json);
  Packing packing = parsed.packing();
  const PlanOptions options = parsed.options(packing);
  return std::make_shared<const Plan>(std::move(packing), options);
}

}  // namespace blockcp
