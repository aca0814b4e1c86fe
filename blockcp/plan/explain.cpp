#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "blockcp/base/text.h"
#include "blockcp/plan/plan.h"

namespace blockcp {
namespace {

using Json = nlohmann::ordered_json;

// One path of one mask, over all ranks.
struct PathReport {
  Path path;
  std::string refusal;  // empty: the path can run
  std::vector<RankCost> ranks;

  template <class Field>
  std::vector<int64_t> each(Field field) const {
    std::vector<int64_t> values;
    for (const RankCost& rank : ranks) values.push_back(field(rank));
    return values;
  }
};

int64_t most(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}
int64_t sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

PathReport report(const Problem& problem, Path path) {
  PathReport report{path, why_not(path, problem), {}};
  if (!report.refusal.empty()) return report;
  for (int rank = 0; rank < problem.layout.world(); ++rank) {
    report.ranks.push_back(cost(problem, build_schedule(problem, path, rank)));
  }
  return report;
}

std::string bytes_text(int64_t bytes) {
  const double kib = static_cast<double>(bytes) / 1024;
  if (bytes < 1024) return fmt::format("{} B", bytes);
  if (kib < 1024) return fmt::format("{:.1f} KiB", kib);
  if (kib < 1024 * 1024) return fmt::format("{:.1f} MiB", kib / 1024);
  return fmt::format("{:.2f} GiB", kib / 1024 / 1024);
}

std::string path_row(const PathReport& report, const Shape& shape, bool chosen) {
  const char* mark = chosen ? "*" : " ";
  if (!report.refusal.empty())
    return fmt::format("  {} {:<10} cannot run: {}\n", mark, name(report.path), report.refusal);
  const auto received = report.each([](const RankCost& c) { return c.forward_received; });
  const auto backward = report.each([](const RankCost& c) { return c.backward_received + c.gradient_received; });
  const auto forward_bytes = report.each([&](const RankCost& c) { return forward_bytes_received(c, shape); });
  const auto backward_bytes = report.each([&](const RankCost& c) { return backward_bytes_received(c, shape); });
  const auto scratch = report.each([&](const RankCost& c) { return c.scratch_rows * shape.kv_row_bytes(); });
  return fmt::format("  {} {:<10} {:>5} {:>12} {:>12} {:>12} {:>11} {:>11} {:>11}\n", mark, name(report.path),
                     report.ranks[0].steps, sum(received), most(received), sum(backward),
                     bytes_text(most(forward_bytes)), bytes_text(most(backward_bytes)), bytes_text(most(scratch)));
}

std::string rank_rows(const PathReport& report, const std::vector<int64_t>& work) {
  constexpr size_t kShown = 16;
  const double mean = static_cast<double>(sum(work)) / static_cast<double>(work.size());
  std::string text =
      fmt::format("    {:>6} {:>14} {:>14} {:>10}\n", "rank", "rows received", "visible pairs", "of mean");
  for (size_t rank = 0; rank < std::min(work.size(), kShown); ++rank) {
    text += fmt::format("    {:>6} {:>14} {:>14} {:>10.2f}\n", rank, report.ranks[rank].forward_received, work[rank],
                        mean > 0 ? static_cast<double>(work[rank]) / mean : 1.0);
  }
  if (work.size() > kShown)
    text += fmt::format("    ... {}\n", counted(std::ssize(work) - static_cast<int64_t>(kShown), "more rank"));
  return text;
}

Json path_json(const PathReport& report, const Shape& shape) {
  Json json = {{"path", name(report.path)}, {"admitted", report.refusal.empty()}};
  if (!report.refusal.empty()) {
    json["why_not"] = report.refusal;
    return json;
  }
  json["steps"] = report.ranks[0].steps;
  json["rows_received"] = report.each([](const RankCost& c) { return c.forward_received; });
  json["rows_sent"] = report.each([](const RankCost& c) { return c.forward_sent; });
  json["backward_rows_received"] = report.each([](const RankCost& c) { return c.backward_received; });
  json["gradient_rows_received"] = report.each([](const RankCost& c) { return c.gradient_received; });
  json["forward_bytes_received"] = report.each([&](const RankCost& c) { return forward_bytes_received(c, shape); });
  json["backward_bytes_received"] = report.each([&](const RankCost& c) { return backward_bytes_received(c, shape); });
  json["scratch_bytes"] = report.each([&](const RankCost& c) { return c.scratch_rows * shape.kv_row_bytes(); });
  return json;
}

Json kv_json(const KvPlan& kv) {
  return {{"recv", kv.recv},       {"send", kv.send},         {"nreal", kv.nreal},
          {"s_first", kv.s_first}, {"real_end", kv.real_end}, {"use_halo", kv.use_halo}};
}

}  // namespace

std::string explain(const Plan& plan, const Shape& shape) {
  const Packing& packing = plan.packing();
  check_countable(shape, packing.batch() * packing.rows());
  std::string text =
      fmt::format("{} in {} x {} ({} real, {} padding), {} of {}, contiguous layout\n",
                  counted(std::ssize(packing.documents()), "document"), packing.batch(), counted(packing.rows(), "row"),
                  packing.real_rows(), packing.batch() * packing.rows() - packing.real_rows(),
                  counted(plan.world(), "rank"), counted(plan.local_rows(), "row"));
  text += fmt::format("bytes for {}, width {} + {}, {}\n", counted(shape.kv_heads, "KV head"), shape.head_dim,
                      shape.value_dim, name(shape.dtype));
  for (const auto& entry : plan.entries()) {
    const Problem problem = plan.problem(*entry);
    const std::vector<int64_t> pairs = work(problem);
    text += fmt::format("\nmask '{}' ({}): {}, {}\n", entry->name, entry->origin.mask, name(entry->choice.path),
                        entry->choice.reason);
    text += fmt::format("  {}, work max/mean {:.3f}\n", counted(sum(pairs), "visible pair"), balance(pairs));
    text += fmt::format("    {:<10} {:>5} {:>12} {:>12} {:>12} {:>11} {:>11} {:>11}\n", "path", "steps", "rows fwd",
                        "most on one", "rows bwd", "fwd bytes", "bwd bytes", "scratch");
    for (Path path : kPaths) {
      const PathReport one = report(problem, path);
      text += path_row(one, shape, path == entry->choice.path);
    }
    text += rank_rows(report(problem, entry->choice.path), pairs);
  }
  text +=
      "\n* chosen. rows fwd, rows bwd: received by all ranks together, K and V as one row, gradients counted as rows "
      "too;\n"
      "  bytes and scratch: on the rank that has most.\n";
  return text;
}

std::string explain_json(const Plan& plan, const Shape& shape) {
  const Packing& packing = plan.packing();
  check_countable(shape, packing.batch() * packing.rows());
  Json json = {{"batch", packing.batch()},
               {"rows", packing.rows()},
               {"given_rows", plan.given_rows()},
               {"real_rows", packing.real_rows()},
               {"documents", packing.documents().size()},
               {"world", plan.world()},
               {"rank", plan.rank()},
               {"local_rows", plan.local_rows()},
               {"layout", "contiguous"},
               {"fingerprint", fmt::format("{:016x}", plan.fingerprint())},
               {"shape",
                {{"q_heads", shape.q_heads},
                 {"kv_heads", shape.kv_heads},
                 {"head_dim", shape.head_dim},
                 {"value_dim", shape.value_dim},
                 {"dtype", name(shape.dtype)}}}};
  for (const auto& entry : plan.entries()) {
    const Problem problem = plan.problem(*entry);
    const std::vector<int64_t> pairs = work(problem);
    Json mask = {{"path", name(entry->choice.path)},
                 {"reason", entry->choice.reason},
                 {"mask", entry->origin.mask},
                 {"visible_pairs", sum(pairs)},
                 {"work", pairs},
                 {"balance", balance(pairs)}};
    for (Path path : kPaths) mask["paths"].push_back(path_json(report(problem, path), shape));
    for (int64_t b = 0; b < packing.batch(); ++b) mask["kv"].push_back(kv_json(kv_plan(plan, *entry, b)));
    json["masks"][entry->name] = mask;
  }
  return json.dump(2);
}

}  // namespace blockcp
