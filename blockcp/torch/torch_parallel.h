// torch's own threads, handed to the kernels: one runtime, one setting (torch.set_num_threads).
#pragma once

#include <memory>

#include "blockcp/base/parallel.h"

namespace blockcp {

std::unique_ptr<Parallel> make_torch_parallel();

}  // namespace blockcp
