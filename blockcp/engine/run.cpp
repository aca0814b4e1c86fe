#include "blockcp/engine/run.h"

#include "blockcp/base/error.h"
#include "blockcp/engine/courier.h"

namespace blockcp {
namespace {

void check(const Call& call) {
  const Schedule& schedule = call.schedule;
  const int world = call.transport.world(), rank = call.transport.rank();
  check_argument(schedule.world == world && schedule.rank == rank,
                 "[engine] a plan must be used on the group it was made for, but this one is for rank {} of {}, and "
                 "the group has this rank as {} of {}. Plan with the group's size.",
                 schedule.rank, schedule.world, rank, world);
  const int64_t rows = schedule.buffers[kQ].rows;
  check_argument(call.batch * call.local_rows == rows,
                 "[engine] the tensors must have the plan's {} rows, but have {} (batch {} of {} rows, rank {}). Were "
                 "they sharded with another plan?",
                 rows, call.batch * call.local_rows, call.batch, call.local_rows, rank);
  const AttentionShape& shape = call.shape;
  check_argument(shape.kv_heads >= 1 && shape.q_heads >= 1 && shape.q_heads % shape.kv_heads == 0,
                 "[engine] the number of KV heads must divide the number of query heads, but they are {} and {}. "
                 "Check the shapes of q and k.",
                 shape.kv_heads, shape.q_heads);
  check_argument(
      shape.head_dim >= 1 && shape.value_dim >= 1,
      "[engine] head_dim and value width must be at least 1, but are {} and {}. Check the shapes of q and v.",
      shape.head_dim, shape.value_dim);
}

}  // namespace

CallRecord record_of(const Call& call, Phase phase) {
  return {.call = call.number,
          .phase = phase,
          .origin = call.schedule.origin,
          .path = call.schedule.path,
          .shape = call.shape,
          .batch = call.batch,
          .local_rows = call.local_rows,
          .scale = call.scale,
          .needs_grad = call.needs_grad,
          .kernel = call.kernel.name,
          .trouble = {},
          .trouble_is_argument = true};
}

void begin(const Call& call, Phase phase, const std::function<void()>& prepare) {
  CallRecord record = record_of(call, phase);
  try {
    check(call);
    prepare();
  } catch (const Error& error) {
    record.trouble = error.what();
    record.trouble_is_argument = error.kind() == ErrorKind::argument;
  } catch (const std::bad_alloc&) {
    record.trouble = "[engine] the call needs more memory than there is. Use a2a or ring, or more ranks.";
    record.trouble_is_argument = false;
  }
  if (call.agree) return agree(call.transport, record);
  if (!record.trouble.empty())
    throw Error(record.trouble_is_argument ? ErrorKind::argument : ErrorKind::system, record.trouble);
}

std::exception_ptr run_steps(const Storage& storage, Courier& courier, const std::vector<Step>& steps,
                             const std::function<void(std::span<const Block> blocks)>& compute) {
  std::exception_ptr failure;
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    for (BufferId id : step.clear) storage.clear(id);
    courier.post(step, fmt::format("step {} of {}", i + 1, steps.size()));
    try {
      if (!failure && !step.blocks.empty()) compute(step.blocks);
    } catch (...) {
      failure = std::current_exception();
    }
    courier.finish();
  }
  return failure;
}

void end(const Call& call, std::exception_ptr failure) {
  if (call.agree) return agree_finished(call.transport, failure);
  if (failure) std::rethrow_exception(failure);
}

AttentionBlock attention_block(const Schedule& schedule, const Storage& storage, const Block& block, bool gradients) {
  AttentionBlock out;
  out.q_count = block.q.count;
  out.q_pos = block.q_pos;
  out.k_pos = block.k_pos;
  out.band = &schedule.bands[static_cast<size_t>(block.band)];
  for (size_t i = 0; i < block.k.size(); ++i) {
    const KvRows rows = storage.rows(block.k[i]);
    out.keys.push_back({block.k[i].count, rows.k, rows.v, {}, {}});
    if (!gradients) continue;
    const KvRows sums = storage.rows(block.dkv[i]);
    out.keys.back().dk = sums.k;
    out.keys.back().dv = sums.v;
  }
  return out;
}

}  // namespace blockcp
