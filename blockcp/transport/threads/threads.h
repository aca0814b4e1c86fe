// Ranks as threads of one process: for tests, for the command line and for trying things on a laptop.
#pragma once

#include <functional>
#include <memory>

#include "blockcp/transport/transport.h"

namespace blockcp {

class ThreadGroup {
 public:
  explicit ThreadGroup(int world, double timeout_seconds = 30);
  ~ThreadGroup();

  std::unique_ptr<Transport> transport(int rank);
  // Wakes every rank that waits; they and all later calls throw Error(system) with `reason`.
  void abort(const std::string& reason);

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

// Runs body(transport) for every rank on a thread of its own and joins them. If ranks throw, the group is aborted so
// that none is left waiting, and the first exception that is not a consequence of the abort is rethrown.
void run_ranks(int world, const std::function<void(Transport& transport)>& body, double timeout_seconds = 30);

}  // namespace blockcp
