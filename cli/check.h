// Is the result of a run right?
#pragma once

#include <vector>

#include "blockcp/plan/plan.h"
#include "cli/tensors.h"

namespace blockcp {

// Root mean square of (got - wanted), over that of wanted. The gradients share the largest of theirs, because dq and dk
// of a document of one row are zero.
struct TensorError {
  const char* name;
  double error, limit;
  bool ok() const { return error <= limit; }  // NaN is not
};

struct CheckReport {
  int64_t documents = 0, all_documents = 0;  // compared in full
  int64_t single_rows = 0;                   // of other documents
  int64_t padding_rows = 0;                  // must be exactly zero, lse -inf
  bool padding_ok = true;
  std::vector<TensorError> tensors;
  bool ok() const;
};

// Compares with the reference kernel in fp64 on one rank, for about `budget` (visible pair, query head)s: first
// documents that cross a border between ranks, then others, each kind from the shortest on; then rows at borders inside
// longer ones.
CheckReport check_run(const Plan& plan, const AttentionShape& shape, double scale, const WholeTensors& tensors,
                      int64_t budget, Parallel& parallel);

}  // namespace blockcp
