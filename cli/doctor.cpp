#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "blockcp/base/machine.h"
#include "blockcp/base/peak.h"
#include "blockcp/base/text.h"
#include "blockcp/kernels/select.h"
#include "cli/command.h"
#include "cli/input.h"

namespace blockcp {
namespace {

using Json = nlohmann::ordered_json;

// The most that multiply-adds of one type reach, in GFLOP/s.
struct Peak {
  std::string_view type;
  std::string_view instructions;
  double one_thread, all_threads;
};

struct Report {
  Machine machine;
  AttentionShape shape;
  const Kernel* chosen;
  std::vector<Peak> peaks;
};

std::vector<Peak> measure(const Machine& machine) {
  const auto one = make_serial(), all = make_pool(machine.processors);
  const auto peak = [&](std::string_view type, std::string_view instructions, Fma kind) {
    return Peak{type, instructions, fma_peak(*one, kind, Clock(0)), fma_peak(*all, kind, Clock(0))};
  };
  if (machine.neon) return {peak("fp32", "NEON", Fma::fp32_neon), peak("fp64", "NEON", Fma::fp64_neon)};
  if (!machine.avx2) return {peak("fp64", "one at a time", Fma::scalar)};
  std::vector<Peak> peaks =
      machine.avx512 ? std::vector{peak("fp32", "AVX-512", Fma::fp32_avx512), peak("fp64", "AVX-512", Fma::fp64_avx512)}
                     : std::vector{peak("fp32", "AVX2", Fma::fp32_avx2), peak("fp64", "AVX2", Fma::fp64_avx2)};
  if (machine.avx512_bf16) peaks.push_back(peak("bf16", "AVX-512 dot products", Fma::bf16_avx512));
  return peaks;
}

void print_table(const Report& report) {
  const Machine& machine = report.machine;
  const auto yes = [](bool has) { return has ? "yes" : "no"; };
  fmt::print("cpu           {}, {}\n", machine.cpu, counted(machine.processors, "processor"));
  fmt::print("instructions  AVX2 with FMA: {}, AVX-512: {}, AVX-512 BF16: {}, NEON: {}\n\n", yes(machine.avx2),
             yes(machine.avx512), yes(machine.avx512_bf16), yes(machine.neon));
  const AttentionShape& shape = report.shape;
  fmt::print("kernels for {}, heads {}/{}, width {}/{}; * is chosen\n", name(shape.dtype), shape.q_heads,
             shape.kv_heads, shape.head_dim, shape.value_dim);
  for (const Kernel& kernel : all_kernels()) {
    const std::string reason = kernel.why_not(shape, machine);
    fmt::print("{} {:<16} {}\n", &kernel == report.chosen ? '*' : ' ', kernel.name,
               reason.empty() ? "can run" : "cannot run: " + reason);
  }
  fmt::print("\npeaks of multiply-adds, GFLOP/s {:>14} {:>12}\n", "1 thread", counted(machine.processors, "thread"));
  for (const Peak& peak : report.peaks)
    fmt::print("  {:<5} {:<24} {:>13.1f} {:>12.1f}\n", peak.type, peak.instructions, peak.one_thread, peak.all_threads);
}

void print_json(const Report& report) {
  const Machine& machine = report.machine;
  const AttentionShape& shape = report.shape;
  Json json = {
      {"cpu", machine.cpu},
      {"processors", machine.processors},
      {"instruction_sets", {{"avx2", machine.avx2}, {"avx512", machine.avx512}, {"avx512_bf16", machine.avx512_bf16}}},
      {"shape",
       {{"dtype", name(shape.dtype)},
        {"q_heads", shape.q_heads},
        {"kv_heads", shape.kv_heads},
        {"head_dim", shape.head_dim},
        {"value_dim", shape.value_dim}}}};
  json["instruction_sets"]["neon"] = machine.neon;
  for (const Kernel& kernel : all_kernels())
    json["kernels"].push_back({{"name", kernel.name}, {"why_not", kernel.why_not(shape, machine)}});
  json["chosen"] = report.chosen->name;
  for (const Peak& peak : report.peaks)
    json["peaks"].push_back({{"type", peak.type},
                             {"instructions", peak.instructions},
                             {"unit", "GFLOP/s"},
                             {"one_thread", peak.one_thread},
                             {"all_threads", peak.all_threads}});
  fmt::print("{}\n", json.dump(2));
}

}  // namespace

Command add_doctor(CLI::App& program) {
  auto input = std::make_shared<Input>();
  CLI::App* command = program.add_subcommand(
      "doctor",
      "What this processor can do, which kernels can run on it and why others cannot, and its measured peaks");
  command->footer(R"(Examples:
  blockcp doctor
  blockcp doctor --dtype bf16 --heads 32/8 --dim 128 --json)");
  add_shape_options(*command, *input);
  return [input] {
    const Machine machine = detect_machine();
    const AttentionShape shape = shape_of(*input);
    const Report report{machine, shape, &select_kernel(shape, machine), measure(machine)};
    input->json ? print_json(report) : print_table(report);
    return 0;
  };
}

}  // namespace blockcp
