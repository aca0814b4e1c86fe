#include "blockcp/kernels/select.h"

#include <vector>

#include "blockcp/base/error.h"
#include "blockcp/kernels/cpu/kernels.h"
#include "blockcp/kernels/reference.h"

namespace blockcp {

namespace {

bool is_of_family(std::string_view kernel, std::string_view family) {
  return kernel.size() > family.size() && kernel.starts_with(family) && kernel[family.size()] == '_';
}

// A name that is one kernel's own means that one alone, even where it begins others'.
std::vector<const Kernel*> kernels_called(std::string_view wanted) {
  std::vector<const Kernel*> family;
  for (const Kernel& kernel : all_kernels()) {
    if (kernel.name == wanted) return {&kernel};
    if (wanted.empty() || is_of_family(kernel.name, wanted)) family.push_back(&kernel);
  }
  return family;
}

std::string names_of_all() {
  std::string names;
  for (const Kernel& kernel : all_kernels()) names += (names.empty() ? "" : ", ") + std::string(kernel.name);
  return names;
}

}  // namespace

std::span<const Kernel> all_kernels() {
  static const std::vector<Kernel> kernels = [] {
    std::vector<Kernel> all = cpu_kernels();
    all.push_back(reference_kernel());
    return all;
  }();
  return kernels;
}

const Kernel& select_kernel(const AttentionShape& shape, const Machine& machine, std::string_view wanted) {
  std::string refusals;
  for (const Kernel* kernel : kernels_called(wanted)) {
    const std::string reason = kernel->why_not(shape, machine);
    if (reason.empty()) return *kernel;
    refusals += fmt::format("{}{}: {}", refusals.empty() ? "" : "; ", kernel->name, reason);
  }
  check_argument(
      !refusals.empty(),
      "[kernels] a kernel must have one of the names {}, or a family's as in cpu, but was \"{}\". Choose one of these.",
      names_of_all(), wanted);
  fail_argument(
      "[kernels] a kernel must be able to run here, but none of \"{}\" can ({}). Leave the name out to get the best "
      "one that can.",
      wanted, refusals);
}

}  // namespace blockcp
