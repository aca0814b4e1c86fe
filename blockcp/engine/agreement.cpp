#include "blockcp/engine/agreement.h"

#include <cstring>
#include <vector>

#include "blockcp/engine/alike.h"

namespace blockcp {
namespace {

constexpr size_t kNameBytes = 48, kMaskBytes = 96, kTroubleBytes = 1000;

// A CallRecord as it travels: of fixed size, all bytes set.
struct Wire {
  int64_t call, batch, local_rows, q_heads, kv_heads, head_dim, value_dim;
  uint64_t documents, layout, spans;
  double scale;
  uint32_t needs_grad;
  uint8_t phase, path, dtype;
  bool troubled, argument;
  char mask[kMaskBytes];
  char kernel[kNameBytes];
  char trouble[kTroubleBytes];
};
static_assert(std::is_trivially_copyable_v<Wire>);

Wire wire_of(const CallRecord& record) {
  Wire wire;
  std::memset(static_cast<void*>(&wire), 0, sizeof wire);
  wire.call = record.call;
  wire.batch = record.batch;
  wire.local_rows = record.local_rows;
  wire.q_heads = record.shape.q_heads;
  wire.kv_heads = record.shape.kv_heads;
  wire.head_dim = record.shape.head_dim;
  wire.value_dim = record.shape.value_dim;
  wire.documents = record.origin.documents;
  wire.layout = record.origin.layout;
  wire.spans = record.origin.spans;
  wire.scale = record.scale;
  wire.needs_grad = record.needs_grad;
  wire.phase = static_cast<uint8_t>(record.phase);
  wire.path = static_cast<uint8_t>(record.path);
  wire.dtype = static_cast<uint8_t>(record.shape.dtype);
  put(wire.mask, record.origin.mask);
  put(wire.kernel, record.kernel);
  put_trouble(wire, record.trouble, record.trouble_is_argument);
  return wire;
}

std::vector<Wire> gather(Transport& transport, const Wire& mine) {
  const auto bytes = transport.gather(std::as_bytes(std::span(&mine, 1)));
  std::vector<Wire> all(static_cast<size_t>(transport.world()));
  std::memcpy(static_cast<void*>(all.data()), bytes.data(), all.size() * sizeof(Wire));
  return all;
}

[[noreturn]] void fail(bool argument, const std::string& message) {
  throw Error(argument ? ErrorKind::argument : ErrorKind::system, message);
}

std::string shape_text(const Wire& w) {
  return fmt::format("{} query heads, {} KV heads, head_dim {}, value width {}", w.q_heads, w.kv_heads, w.head_dim,
                     w.value_dim);
}

std::string fingerprint_text(uint64_t value) { return fmt::format("fingerprint {:016x}", value); }

std::string grads_text(const Wire& w) {
  std::string text;
  for (int i = 0; i < 3; ++i)
    if (w.needs_grad >> i & 1) text += (text.empty() ? "" : ", ") + std::string(1, "qkv"[i]);
  return text.empty() ? "none" : text;
}

const Field<Wire> kFields[] = {
    {"make the same attention calls in the same order", [](const Wire& w) { return fmt::format("call {}", w.call); },
     "Does a rank skip a layer or a step?"},
    {"run the same direction",
     [](const Wire& w) {
       return std::string(w.phase == static_cast<uint8_t>(Phase::forward) ? "forward" : "backward");
     },
     "Does one rank recompute, or not run its backward?"},
    {"hold the same documents", [](const Wire& w) { return fingerprint_text(w.documents); },
     "Broadcast doc_ids before planning."},
    {"cut the rows alike", [](const Wire& w) { return fingerprint_text(w.layout); }, "Plan with the same layout."},
    {"use the same mask", [](const Wire& w) { return std::string(w.mask); },
     "Plan with the same masks, and name the same one in the call."},
    {"hold the same spans", [](const Wire& w) { return fingerprint_text(w.spans); },
     "Broadcast the span ids before planning."},
    {"use the same exchange", [](const Wire& w) { return std::string(name(static_cast<Path>(w.path))); },
     "Plan with the same exchange."},
    {"pass tensors of the same shape", shape_text, "Check how q, k and v are made."},
    {"pass the same dtype", [](const Wire& w) { return std::string(name(static_cast<DType>(w.dtype))); },
     "Check autocast and the types of the weights."},
    {"pass the same number of rows",
     [](const Wire& w) { return fmt::format("batch {} of {} rows", w.batch, w.local_rows); },
     "Were q, k and v sharded with this plan?"},
    {"use the same scale", [](const Wire& w) { return fmt::format("scale {}", w.scale); }, "Pass one scale."},
    {"need gradients of the same inputs", grads_text, "Set requires_grad alike on all ranks."},
    {"use the same kernel", [](const Wire& w) { return std::string(w.kernel); }, "Name one kernel."},
};

std::pair<std::string, bool> described(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return {error.what(), error.kind() == ErrorKind::argument};
  } catch (const std::exception& error) {
    return {error.what(), false};
  } catch (...) {
    return {"an exception of an unknown type", false};
  }
}

}  // namespace

void agree(Transport& transport, const CallRecord& record) {
  if (transport.world() == 1) {
    if (!record.trouble.empty()) fail(record.trouble_is_argument, record.trouble);
    return;
  }
  const std::vector<Wire> all = gather(transport, wire_of(record));
  check_untroubled<Wire>(all);
  check_alike<Wire>(all, kFields);
}

void agree_finished(Transport& transport, std::exception_ptr failure) {
  if (transport.world() == 1) {
    if (failure) std::rethrow_exception(failure);
    return;
  }
  CallRecord record;
  if (failure) std::tie(record.trouble, record.trouble_is_argument) = described(failure);
  const std::vector<Wire> all = gather(transport, wire_of(record));
  for (size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].troubled)
      fail(all[rank].argument,
           fmt::format("[engine] the kernel must succeed on every rank, but it failed on rank {} of "
                       "{} ({}). No rank has a result; the group can be used on.",
                       rank, all.size(), all[rank].trouble));
}

}  // namespace blockcp
