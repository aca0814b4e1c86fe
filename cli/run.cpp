
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "blockcp/base/error.h"
#include "blockcp/base/machine.h"
#include "blockcp/base/text.h"
#include "blockcp/kernels/select.h"
#include "blockcp/transport/threads/threads.h"
#include "cli/check.h"
#include "cli/command.h"
#include "cli/input.h"
#include "cli/progress.h"

namespace blockcp {
namespace {

using Json = nlohmann::ordered_json;

struct RunInput : Input {
  int64_t seed = 1;
  std::string kernel;
  int threads = 0;  // per rank; 0: what the machine has, shared out
  int64_t check = 4'000'000;
};

struct RankReport {
  RankCost cost;
  int64_t allgather_rows = 0;                         // what the rank would receive on that path
  int64_t counted_forward = 0, counted_backward = 0;  // bytes received, from the schedule
  int64_t moved_forward = 0, moved_backward = 0;      // bytes received, from the transport
  bool bytes_agree() const { return counted_forward == moved_forward && counted_backward == moved_backward; }
};

struct RunReport {
  int64_t pairs = 0;
  double balance = 1;
  std::vector<RankReport> ranks;
  double forward_seconds = 0, backward_seconds = 0;
  CheckReport check;

  bool bytes_agree() const {
    return std::all_of(ranks.begin(), ranks.end(), [](const RankReport& rank) { return rank.bytes_agree(); });
  }
  bool ok() const { return check.ok() && bytes_agree(); }
};

// Multiplications and additions of the products that attention cannot do without: q k and p v; backward adds q k again,
// dout v, dv, dk and dq.
double forward_flops(const AttentionShape& shape, int64_t pairs) {
  return 2.0 * static_cast<double>(pairs * shape.q_heads * (shape.head_dim + shape.value_dim));
}
double backward_flops(const AttentionShape& shape, int64_t pairs) {
  return 2.0 * static_cast<double>(pairs * shape.q_heads * (3 * shape.head_dim + 2 * shape.value_dim));
}

class Runner {
 public:
  explicit Runner(const RunInput& input)
      : input_(input),
        shape_(checked(input)),
        kernel_(select_kernel(shape_, machine_, input.kernel)),
        plan_(packing_of(input), options_of(input)),
        entry_(plan_.entry()),
        threads_(input.threads > 0 ? input.threads : std::max(1, machine_.processors / plan_.world())),
        scale_(1 / std::sqrt(static_cast<double>(shape_.head_dim))),
        tensors_(shape_, countable_rows()) {}

  // Before anything is allocated or started.
  static AttentionShape checked(const RunInput& input) {
    constexpr int kMostRanks = 256;
    check_argument(input.world <= kMostRanks, "[cli] run takes at most {} ranks, which are threads, but --ranks is {}.",
                   kMostRanks, input.world);
    return shape_of(input);
  }

  int64_t countable_rows() const {
    check_countable(cost_shape(shape_), plan_.packing().rows());
    return plan_.packing().rows();
  }

  int run() {
    make_inputs();
    count();
    attend();
    check();
    input_.json ? print_json() : print_table();
    return report_.ok() ? 0 : 1;
  }

 private:
  void make_inputs();
  void count();
  void attend();
  void attend(Transport& transport);
  void check();
  void print_table() const;
  void print_json() const;

  const RunInput& input_;
  const Machine machine_ = detect_machine();
  const AttentionShape shape_;
  const Kernel& kernel_;
  const Plan plan_;
  const Plan::Entry& entry_;
  const int threads_;
  const double scale_;
  WholeTensors tensors_;
  RunReport report_;
};

void Runner::make_inputs() {
  const Progress progress(fmt::format("making random data of {}", counted(plan_.packing().rows(), "row")));
  const auto pool = make_pool(0);
  uint64_t seed = static_cast<uint64_t>(input_.seed) * 4;
  for (WholeTensor* tensor : {&tensors_.q, &tensors_.k, &tensors_.v, &tensors_.dout}) tensor->fill(seed++, *pool);
}

void Runner::count() {
  const Problem problem = plan_.problem(entry_);
  const std::vector<int64_t> pairs = work(problem);
  report_.pairs = std::accumulate(pairs.begin(), pairs.end(), int64_t{0});
  report_.balance = balance(pairs);
  for (int rank = 0; rank < plan_.world(); ++rank) {
    RankReport& of = report_.ranks.emplace_back();
    of.cost = cost(problem, build_schedule(problem, entry_.choice.path, rank));
    of.allgather_rows = cost(problem, build_schedule(problem, Path::allgather, rank)).forward_received;
    of.counted_forward = forward_bytes_received(of.cost, cost_shape(shape_));
    of.counted_backward = backward_bytes_received(of.cost, cost_shape(shape_));
  }
}

void Runner::attend() {
  constexpr double kPatience = 24 * 3600;  // a rank that computes long is alive
  run_ranks(
      plan_.world(), [this](Transport& transport) { attend(transport); }, kPatience);
}

void Runner::attend(Transport& transport) {
  const int rank = transport.rank();
  const Schedule schedule = build_schedule(plan_.problem(entry_), entry_.choice.path, rank);
  const auto pool = make_pool(threads_);
  const Call call{.schedule = schedule,
                  .shape = shape_,
                  .batch = 1,
                  .local_rows = plan_.local_rows(),
                  .scale = scale_,
                  .kernel = kernel_,
                  .transport = transport,
                  .parallel = *pool,
                  .needs_grad = 7};
  const auto mine = [&](const WholeTensor& tensor) { return tensor.from(rank * plan_.local_rows()); };
  const BackwardTensors t{mine(tensors_.q),   mine(tensors_.k),   mine(tensors_.v),
                          mine(tensors_.out), mine(tensors_.lse), mine(tensors_.dout),
                          mine(tensors_.dq),  mine(tensors_.dk),  mine(tensors_.dv)};
  RankReport& report = report_.ranks[static_cast<size_t>(rank)];
  const auto timed = [&](const char* stage, double& seconds, const std::function<void()>& act) {
    transport.gather({});  // all start together
    std::optional<Progress> progress;
    if (rank == 0) progress.emplace(fmt::format("{} on {}", stage, counted(plan_.world(), "rank")));
    act();
    transport.gather({});
    if (rank == 0) seconds = progress->seconds();
  };
  timed("forward", report_.forward_seconds, [&] { forward(call, {t.q, t.k, t.v, t.out, t.lse}); });
  report.moved_forward = transport.bytes_received();
  timed("backward", report_.backward_seconds, [&] { backward(call, t); });
  report.moved_backward = transport.bytes_received() - report.moved_forward;
}

void Runner::check() {
  if (input_.check == 0) return;
  const Progress progress("checking against the reference");
  const auto pool = make_pool(0);
  report_.check = check_run(plan_, shape_, scale_, tensors_, input_.check, *pool);
}

void Runner::print_table() const {
  const Packing& packing = plan_.packing();
  fmt::print("{}{} in {}\n", padding_text(plan_), counted(std::ssize(packing.documents()), "document"),
             counted(packing.rows(), "row"));
  fmt::print("ranks as threads: {}, with {} each; kernel {}, {} heads {}/{}, width {}/{}\n", plan_.world(),
             counted(threads_, "thread"), kernel_.name, name(shape_.dtype), shape_.q_heads, shape_.kv_heads,
             shape_.head_dim, shape_.value_dim);
  fmt::print("path {}: {}\n\n", name(entry_.choice.path), entry_.choice.reason);

  fmt::print("  rank  rows received  all-gather  work/mean   fwd bytes counted = moved   bwd bytes counted = moved\n");
  const double mean = static_cast<double>(report_.pairs) / plan_.world();
  for (size_t i = 0; i < report_.ranks.size(); ++i) {
    const RankReport& rank = report_.ranks[i];
    fmt::print("  {:>4}  {:>13}  {:>10}  {:>9.3f}  {:>12} {} {:>12}  {:>12} {} {:>12}\n", i, rank.cost.forward_received,
               rank.allgather_rows, mean > 0 ? static_cast<double>(rank.cost.pairs) / mean : 1.0, rank.counted_forward,
               rank.counted_forward == rank.moved_forward ? " = " : "is not", rank.moved_forward, rank.counted_backward,
               rank.counted_backward == rank.moved_backward ? " = " : "is not", rank.moved_backward);
  }
  fmt::print("\n  work max/mean {:.3f}, {}\n", report_.balance, counted(report_.pairs, "visible pair"));
  const auto line = [](const char* what, double seconds, double flops) {
    fmt::print("  {:<8} {:>9.3f} s {:>9.1f} GFLOP/s\n", what, seconds, seconds > 0 ? flops / seconds * 1e-9 : 0.0);
  };
  line("forward", report_.forward_seconds, forward_flops(shape_, report_.pairs));
  line("backward", report_.backward_seconds, backward_flops(shape_, report_.pairs));

  const CheckReport& check = report_.check;
  if (input_.check == 0) {
    fmt::print("\nnot checked (--check 0)\n");
    return;
  }
  fmt::print("\nchecked against the fp64 reference on one rank: {} of {} in full, {} of others, {} of padding\n",
             check.documents, counted(check.all_documents, "document"), counted(check.single_rows, "single row"),
             counted(check.padding_rows, "row"));
  for (const TensorError& e : check.tensors)
    fmt::print("  {:<4} relative error {:.2e}  (limit {:.1e})  {}\n", e.name, e.error, e.limit,
               e.ok() ? "ok" : "WRONG");
  if (check.padding_rows > 0)
    fmt::print("  padding is {}\n", check.padding_ok ? "exactly zero, ok" : "not zero: WRONG");
  fmt::print("{}\n", report_.ok() ? "all right" : "WRONG: see above");
}

void Runner::print_json() const {
  Json json = {{"documents", plan_.packing().documents().size()},
               {"given_rows", plan_.given_rows()},
               {"rows", plan_.packing().rows()},
               {"world", plan_.world()},
               {"threads", threads_},
               {"kernel", kernel_.name},
               {"dtype", name(shape_.dtype)},
               {"path", name(entry_.choice.path)},
               {"reason", entry_.choice.reason},
               {"visible_pairs", report_.pairs},
               {"balance", report_.balance},
               {"forward_seconds", report_.forward_seconds},
               {"backward_seconds", report_.backward_seconds},
               {"forward_flops", forward_flops(shape_, report_.pairs)},
               {"backward_flops", backward_flops(shape_, report_.pairs)}};
  for (const RankReport& rank : report_.ranks)
    json["ranks"].push_back({{"rows_received", rank.cost.forward_received},
                             {"allgather_rows_received", rank.allgather_rows},
                             {"visible_pairs", rank.cost.pairs},
                             {"forward_bytes_counted", rank.counted_forward},
                             {"forward_bytes_moved", rank.moved_forward},
                             {"backward_bytes_counted", rank.counted_backward},
                             {"backward_bytes_moved", rank.moved_backward}});
  const CheckReport& check = report_.check;
  json["check"] = {{"documents", check.documents},
                   {"single_rows", check.single_rows},
                   {"padding_rows", check.padding_rows},
                   {"padding_ok", check.padding_ok}};
  for (const TensorError& e : check.tensors) json["check"]["errors"][e.name] = {{"error", e.error}, {"limit", e.limit}};
  json["ok"] = report_.ok();
  fmt::print("{}\n", json.dump(2));
}

}  // namespace

Command add_run(CLI::App& program) {
  auto input = std::make_shared<RunInput>();
  CLI::App* command = program.add_subcommand(
      "run", "Run forward and backward on random data, ranks as threads, and check the result against the reference");
  command->footer(R"(Examples:
  blockcp run --lengths 600,200,500,300 --ranks 4
  blockcp run --lengths lengths.txt --max-rows 16384 --ranks 4 --window 1024 --exchange ring
  blockcp run --lengths lengths.txt --max-rows 65536 --heads 8/2 --dim 128 --dtype bf16 --json
The exit code is 1 if a result is wrong, 2 for bad usage, 3 if memory does not suffice or the machine fails otherwise.)");
  add_options(*command, *input);
  constexpr int64_t kMostSeed = std::numeric_limits<int64_t>::max() / 4;  // each makes four tensors
  add_integer(*command, "--seed", input->seed, "Of the random data", {0, kMostSeed})->default_str("1");
  command->add_option("--kernel", input->kernel,
                      "Name of a kernel or family, as in reference or cpu; default: the best");
  add_integer(*command, "--threads", input->threads, "Threads of each rank; 0 shares out the processors", {0, 1024})
      ->default_str("0");
  add_integer(*command, "--check", input->check,
              "Visible pairs times query heads to compare with the reference, about; 0 checks nothing", {0})
      ->default_str(std::to_string(input->check));
  return [input] { return Runner(*input).run(); };
}

}  // namespace blockcp
