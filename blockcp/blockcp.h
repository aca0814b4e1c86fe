// All that a C++ program calls: plans, tensors and calls, kernels, and ranks that are threads.
#pragma once

#include "blockcp/base/machine.h"
#include "blockcp/engine/engine.h"
#include "blockcp/engine/varlen.h"
#include "blockcp/kernels/select.h"
#include "blockcp/plan/plan.h"
#include "blockcp/transport/threads/threads.h"
