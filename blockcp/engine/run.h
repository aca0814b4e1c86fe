// What forward and backward share: agree, run the steps, agree again.
#pragma once

#include <exception>
#include <functional>
#include <span>

#include "blockcp/engine/storage.h"

namespace blockcp {

class Courier;

// Collective. Checks the call and runs prepare(), which takes all the memory the call needs; an error in either is
// thrown on all ranks, before anything is sent.
void begin(const Call& call, Phase phase, const std::function<void()>& prepare);

// The steps in order. compute() runs a step's blocks; if it throws, the remaining transfers are still completed and
// the exception is returned.
std::exception_ptr run_steps(const Storage& storage, Courier& courier, const std::vector<Step>& steps,
                             const std::function<void(std::span<const Block> blocks)>& compute);

// Collective. Throws on all ranks if some rank's kernel failed.
void end(const Call& call, std::exception_ptr failure);

// The keys of a block, in backward with their gradients, and the band.
AttentionBlock attention_block(const Schedule& schedule, const Storage& storage, const Block& block, bool gradients);

}  // namespace blockcp
