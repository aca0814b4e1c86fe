#include "blockcp/plan/plan.h"

#include <algorithm>

#include "blockcp/base/error.h"
#include "blockcp/base/hash.h"

namespace blockcp {
namespace {

Packing padded(Packing packing, int world, bool pad) {
  check_argument(world >= 1, "[plan] the world must have at least 1 rank, but it has {}.", world);
  const int64_t rest = packing.rows() % world;
  return pad && rest != 0 ? packing.padded(packing.rows() + world - rest) : packing;
}

// Spans were given for the rows before padding; the rows added to each sequence are in none.
Mask padded(Mask mask, int64_t given_rows, const Packing& packing) {
  const int64_t batch = packing.batch(), rows = packing.rows();
  if (mask.spans.empty() || rows == given_rows || static_cast<int64_t>(mask.spans.size()) != batch * given_rows)
    return mask;
  std::vector<int64_t> spans(batch * rows, 0);
  for (int64_t b = 0; b < batch; ++b) {
    std::copy_n(mask.spans.begin() + b * given_rows, given_rows, spans.begin() + b * rows);
  }
  mask.spans = std::move(spans);
  return mask;
}

uint64_t fingerprint_of(const std::vector<int64_t>& spans) {
  if (spans.empty()) return 0;
  Hash hash;
  for (int64_t id : spans) hash.add(id);
  return hash.value();
}

std::string names(const std::map<std::string, Mask>& masks) {
  std::string text;
  for (const auto& [name, mask] : masks) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

}  // namespace

Plan::Plan(Packing packing, const PlanOptions& options)
    : rank_(options.rank),
      given_rows_(packing.rows()),
      packing_(padded(std::move(packing), options.world, options.pad)),
      layout_(Layout::contiguous(packing_.batch(), packing_.rows(), options.world)) {
  check_argument(rank_ >= 0 && rank_ < options.world, "[plan] the rank must be in [0, {}), but it is {}.",
                 options.world, rank_);
  check_argument(!options.masks.empty(), "[plan] a plan needs at least one mask, but masks is empty.");
  for (const auto& [name, path] : options.exchange) {
    check_argument(options.masks.contains(name), "[plan] exchange must name masks of the plan ({}), but it names '{}'.",
                   names(options.masks), name);
  }
  const uint64_t documents = packing_.fingerprint();
  Hash all;
  all.add(documents).add(layout_.fingerprint());
  for (const auto& [name, given] : options.masks) {
    Mask mask = padded(given, given_rows_, packing_);
    Bands bands(packing_, mask);
    const Origin origin{documents, layout_.fingerprint(), fingerprint_of(mask.spans), text(mask)};
    const Problem problem{packing_, layout_, bands, origin};
    const auto wanted = options.exchange.find(name);
    const Choice choice = wanted == options.exchange.end() ? choose(problem) : Choice{wanted->second, "asked for"};
    Schedule schedule = build_schedule(problem, choice.path, rank_);
    all.add(std::string_view(name)).add(std::string_view(origin.mask)).add(origin.spans).add(choice.path);
    entries_.push_back(
        std::make_unique<Entry>(Entry{name, std::move(mask), std::move(bands), origin, choice, std::move(schedule)}));
  }
  fingerprint_ = all.value();
}

const Plan::Entry& Plan::entry(const std::string& name) const {
  if (name.empty() && entries_.size() == 1) return *entries_.front();
  std::string declared;
  for (const auto& entry : entries_) {
    if (entry->name == name) return *entry;
    declared += (declared.empty() ? "'" : ", '") + entry->name + "'";
  }
  check_argument(
      !name.empty(),
      "[plan] a plan with several masks needs to be told which one, but none was named (declared: {}). Pass mask=.",
      declared);
  fail_argument(
      "[plan] a mask must be declared in the plan, but '{}' is not (declared: {}). Pass masks={{'{}': "
      "blockcp.Mask(...)}} to blockcp.plan.",
      name, declared, name);
}

Problem Plan::problem(const Entry& entry) const { return {packing_, layout_, entry.bands, entry.origin}; }

}  // namespace blockcp
