#include "blockcp/kernels/select.h"

#include <vector>

#include "blockcp/base/error.h"
#include "blockcp/kernels/cpu/kernels.h"
#include "blockcp/kernels/reference.h"

namespace blockcp {

namespace {

bool matches(std::string_view kernel, std::string_view wanted) {
  if (wanted.empty() || kernel == wanted) return true;
  return kernel.size() > wanted.size() && kernel.starts_with(wanted) && kernel[wanted.size()] == '_';
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
  for (const Kernel& kernel : all_kernels()) {
    if (!matches(kernel.name, wanted)) continue;
    const std::string reason = kernel.why_not(shape, machine);
    if (reason.empty()) return kernel;
    refusals += fmt::format("{}{}: {}", refusals.empty() ? "" : "; ", kernel.name, reason);
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
