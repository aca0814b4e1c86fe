// Plans behind handles. A handle is a 0-d int64 CPU tensor, so that a plan travels through dispatcher ops, autograd
// and compiled graphs as data; the plan lives as long as some tensor shares the handle's storage.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "blockcp/plan/plan.h"

namespace blockcp {

at::Tensor register_plan(std::shared_ptr<const Plan> plan);
// Throws Error(argument) for a handle that register_plan() did not make, or whose plan is gone.
std::shared_ptr<const Plan> find_plan(const at::Tensor& handle);
// Counts a forward attention call with the plan, and says how many there were.
void count_call(const at::Tensor& handle);
int64_t count_of_calls(const at::Tensor& handle);
// How many plans are alive.
int64_t count_plans();

// A plan from what Python collected. `request` is JSON; numbers under "ids", "lengths", "cu_seqlens", "positions",
// "padding" and "spans" are indices into `tensors`:
//   {"world": 4, "rank": 0, "pad": false, "rows": -1,
//    "ids": 0 | "lengths": 0, "counts": [3, 2] | "cu_seqlens": 0 | "positions": 0, "padding": 1,
//    "masks": {"local": {"causal": true, "window": null | 8 | [7, 0], "spans": 2, "span_window": "left"}},
//    "exchange": {"local": "halo"}}
// Throws Error(argument) as Plan does, and for element types and shapes that cannot be meant.
std::shared_ptr<const Plan> make_plan(const std::vector<at::Tensor>& tensors, std::string_view request);

}  // namespace blockcp
