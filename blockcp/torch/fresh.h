// Results of the ops.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "blockcp/base/huge_pages.h"

namespace blockcp {

// A contiguous tensor without contents, on huge pages where it is large.
inline at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options);
  advise_huge_pages(tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  return tensor;
}

}  // namespace blockcp
