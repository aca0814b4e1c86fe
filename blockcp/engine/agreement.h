// Do all ranks mean the same call? Asked before anything is sent, so that a mistake on one rank is one clear error on
// all of them and never a hang.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "blockcp/kernels/attention.h"
#include "blockcp/schedule/schedule.h"
#include "blockcp/transport/transport.h"

namespace blockcp {

enum class Phase : uint8_t { forward, backward };

// What one rank is about to do. `trouble` carries an error that this rank found in its own arguments: instead of
// throwing, it comes here, and all ranks throw it together.
struct CallRecord {
  int64_t call = 0;  // counts the calls of a group
  Phase phase = Phase::forward;
  Origin origin;
  Path path = Path::allgather;
  AttentionShape shape;
  int64_t batch = 0, local_rows = 0;
  double scale = 0;
  uint32_t needs_grad = 0;  // bits: q, k, v
  std::string kernel;
  std::string trouble;
  bool trouble_is_argument = true;
};

// Collective. Returns if all ranks' records match and none has trouble; otherwise throws the same Error on every rank,
// naming the values and the ranks. With one rank only its own trouble is thrown.
void agree(Transport& transport, const CallRecord& record);

// Collective, after the last transfer of a call: if some rank's kernel failed, all ranks throw, naming it.
void agree_finished(Transport& transport, std::exception_ptr failure);

}  // namespace blockcp
