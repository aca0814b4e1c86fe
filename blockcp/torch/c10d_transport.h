// Moves bytes through a torch process group: one all-to-all of bytes an exchange, whatever the backend.
#pragma once

#include <memory>
#include <string>

#include "blockcp/transport/transport.h"

namespace blockcp {

// A group as this layer sees it. Ranks are ranks within the group. After a fault the group is broken: every later
// exchange or gather throws Error(system) at once, naming the first fault. One call at a time.
class Group : public Transport {
 public:
  virtual const std::string& name() const = 0;

  // Calls count from 0 and in the same order on every rank, for the agreement.
  int64_t next_call() { return calls_++; }

 private:
  int64_t calls_ = 0;
};

// The group registered in torch under `name`, the same object at every call; an empty name is one rank on its own.
// Throws Error(argument) for an unknown name.
std::shared_ptr<Group> find_group(const std::string& name);

}  // namespace blockcp
