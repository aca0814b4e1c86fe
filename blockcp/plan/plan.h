// Packing, layout and, for each named mask, which path delivers its K/V and why.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "blockcp/schedule/cost.h"
#include "blockcp/schedule/fill.h"

namespace blockcp {

struct Choice {
  Path path;
  std::string reason;
};

struct PlanOptions {
  int world = 1;
  int rank = 0;
  std::map<std::string, Mask> masks = {{"full", Mask{}}};  // by name
  std::map<std::string, Path> exchange;                    // explicit paths by mask; the others are chosen
  bool pad = false;  // add padding at the end until world divides the rows; else such a length is refused
};

// Picks the admitted path that moves the fewest rows, and says why.
Choice choose(const Problem& problem);

class Plan {
 public:
  // All one-time work and every refusal happens here; throws Error(argument). Pure: equal inputs give equal plans.
  Plan(Packing packing, const PlanOptions& options);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  struct Entry {
    std::string name;
    Mask mask;
    Bands bands;
    Origin origin;
    Choice choice;
    Schedule schedule;  // this rank's
  };

  const Packing& packing() const { return packing_; }  // padded
  const Layout& layout() const { return layout_; }
  int world() const { return layout_.world(); }
  int rank() const { return rank_; }
  int64_t given_rows() const { return given_rows_; }  // before padding
  int64_t local_rows() const { return layout_.local_rows(); }
  uint64_t fingerprint() const { return fingerprint_; }  // the same on all ranks of a group that agree

  const std::vector<std::unique_ptr<Entry>>& entries() const { return entries_; }  // ascending by name
  // Empty name: the only mask. Throws Error(argument) that says how to declare a mask.
  const Entry& entry(const std::string& name = "") const;
  Problem problem(const Entry& entry) const;

 private:
  int rank_;
  int64_t given_rows_;
  Packing packing_;
  Layout layout_;
  uint64_t fingerprint_ = 0;
  std::vector<std::unique_ptr<Entry>> entries_;
};

// What a rank fetches from its left, sends on and holds, per rank, in the terms of the needed-only exchange: rows of
// sequence `batch` of a contiguous layout.
struct KvPlan {
  std::vector<int64_t> recv;      // rows needed from ranks before this one
  std::vector<int64_t> send;      // recv of the next rank; 0 on the last
  std::vector<int64_t> nreal;     // rows of this rank that are not padding
  std::vector<int64_t> s_first;   // first row this rank needs
  std::vector<int64_t> real_end;  // one past its last row that is not padding; s_first where it has none
  bool use_halo;                  // every recv fits into the left neighbour, and nothing is needed from the right
};
KvPlan kv_plan(const Plan& plan, const Plan::Entry& entry, int64_t batch = 0);

// matrix[s][r]: rows held by s that r needs; the diagonal is what r holds and uses. Over the whole batch.
std::vector<std::vector<int64_t>> split_matrix(const Plan& plan, const Plan::Entry& entry);

// The needed-only all-to-all-v of one rank, its own rows included: rows for each rank, rows from each rank, and which
// local rows (flattened over batch and local row) to gather for sending, by destination.
struct NeededSplits {
  std::vector<int64_t> in_splits, out_splits, send_index;
};
NeededSplits needed_splits(const Plan& plan, const Plan::Entry& entry, int rank);

// For people and for programs: paths, reasons, steps, rows, bytes and balance of every path and rank.
std::string explain(const Plan& plan, const Shape& shape);
std::string explain_json(const Plan& plan, const Shape& shape);

}  // namespace blockcp
