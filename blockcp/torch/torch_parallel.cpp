#include "blockcp/torch/torch_parallel.h"

#include <ATen/Parallel.h>
#include <torch/csrc/stable/c/shim.h>

#include "blockcp/base/error.h"

namespace blockcp {
namespace {

// at::parallel_for is a template that runs serially in a file without OpenMP; this one runs inside libtorch.
void fork_join(int threads, const std::function<void(int)>& participate) {
  const auto range = [](int64_t begin, int64_t end, void* body) {
    const auto& run = *static_cast<const std::function<void(int)>*>(body);
    for (int64_t thread = begin; thread < end; ++thread) run(static_cast<int>(thread));
  };
  void* body = const_cast<void*>(static_cast<const void*>(&participate));
  const auto status = torch_parallel_for(0, threads, /*grain_size=*/1, range, body);
  if (status != 0) fail_system("[torch] torch_parallel_for over {} threads failed with status {}.", threads, status);
}

}  // namespace

std::unique_ptr<Parallel> make_torch_parallel() { return make_borrowed(at::get_num_threads(), fork_join); }

}  // namespace blockcp
