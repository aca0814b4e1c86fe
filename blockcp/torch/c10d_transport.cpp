#include "blockcp/torch/c10d_transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "blockcp/base/error.h"

namespace blockcp {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

at::Tensor bytes_at(const std::byte* data, int64_t count) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (count == 0) return at::empty({0}, options);
  return at::from_blob(const_cast<std::byte*>(data), {count}, options);
}

int64_t sum(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{0}); }

class NothingPending final : public Pending {
 public:
  void wait() override {}
};

class Solo final : public Group {
 public:
  int rank() const override { return 0; }
  int world() const override { return 1; }
  const std::string& name() const override { return name_; }
  std::unique_ptr<Pending> exchange(const Exchange&) override { return std::make_unique<NothingPending>(); }
  std::vector<std::byte> gather(std::span<const std::byte> mine) override { return {mine.begin(), mine.end()}; }

 private:
  std::string name_;
};

class C10dGroup final : public Group {
 public:
  C10dGroup(std::string name, const ProcessGroupPtr& group)
      : name_(std::move(name)), rank_(group->getRank()), world_(group->getSize()), group_(group) {}

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  const std::string& name() const override { return name_; }
  bool is(const ProcessGroupPtr& group) const { return group_.lock() == group; }
  bool expired() const { return group_.expired(); }

  std::unique_ptr<Pending> exchange(const Exchange& exchange) override;
  std::vector<std::byte> gather(std::span<const std::byte> mine) override;

  // Runs body; what it throws breaks the group.
  template <class Body>
  auto guarded(const std::string& doing, Body&& body) {
    if (!fault_.empty())
      fail_system("[transport] group {} must be whole, but it broke before: {} Start the job again.", name_, fault_);
    try {
      return body();
    } catch (const std::exception& error) {
      fault_ = fmt::format("rank {} of {} could not finish {}: {}.", rank_, world_, doing, first_line(error.what()));
      fail_system("[transport] {} Is every rank alive?", fault_);
    }
  }

 private:
  ProcessGroupPtr group() const {
    auto group = group_.lock();
    if (!group) fail_system("[transport] group {} must be alive, but it was destroyed.", name_);
    return group;
  }
  static std::string first_line(std::string text) { return text.substr(0, text.find('\n')); }

  std::string name_;
  int rank_, world_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;  // torch owns it: destroy_process_group() must still end it
  std::string fault_;
};

class AllToAll final : public Pending {
 public:
  AllToAll(C10dGroup& group, const ProcessGroupPtr& process_group, const Exchange& exchange)
      : group_(group),
        in_(exchange.send_bytes.begin(), exchange.send_bytes.end()),
        out_(exchange.recv_bytes.begin(), exchange.recv_bytes.end()),
        send_(bytes_at(exchange.send, sum(in_))),
        recv_(bytes_at(exchange.recv, sum(out_))),
        doing_(fmt::format("{} ({} bytes to send, {} to receive)", exchange.what, sum(in_), sum(out_))) {
    work_ = group_.guarded(doing_, [&] { return process_group->all_to_all_single(recv_, send_, out_, in_); });
  }

  ~AllToAll() override {
    try {
      wait();
    } catch (const std::exception&) {  // the group is marked broken; a later call says why
    }
  }

  void wait() override {
    if (auto work = std::exchange(work_, {})) group_.guarded(doing_, [&] { work->wait(); });
  }

 private:
  C10dGroup& group_;
  std::vector<int64_t> in_, out_;
  at::Tensor send_, recv_;
  std::string doing_;
  c10::intrusive_ptr<c10d::Work> work_;
};

std::unique_ptr<Pending> C10dGroup::exchange(const Exchange& exchange) {
  if (world_ == 1) return std::make_unique<NothingPending>();
  count(exchange);
  return std::make_unique<AllToAll>(*this, group(), exchange);
}

// Every record travels in a frame of one size, behind its own: ranks that make different kinds of calls meet in the
// same collective and find out here, where gloo would end the process.
std::vector<std::byte> C10dGroup::gather(std::span<const std::byte> mine) {
  if (world_ == 1) return {mine.begin(), mine.end()};
  const auto world = static_cast<size_t>(world_);
  const size_t frame = 2048 + 16 * world;  // the longest record, of rows to move, has two numbers a rank
  const uint64_t size = mine.size();
  check_argument(sizeof size + size <= frame, "[transport] a record must fit {} bytes, but it has {}.", frame, size);
  std::vector<std::byte> sent(frame), frames(frame * world), all(size * world);
  std::memcpy(sent.data(), &size, sizeof size);
  std::memcpy(sent.data() + sizeof size, mine.data(), size);
  at::Tensor in = bytes_at(sent.data(), static_cast<int64_t>(frame));
  at::Tensor out = bytes_at(frames.data(), static_cast<int64_t>(frames.size()));
  guarded("the agreement of a call", [&] { group()->all_gather_single(out, in)->wait(); });
  const auto size_of_rank = [&](size_t rank) {
    uint64_t of_rank = 0;
    std::memcpy(&of_rank, &frames[rank * frame], sizeof of_rank);
    return of_rank;
  };
  for (size_t rank = 0; rank < world; ++rank) {
    check_argument(
        size_of_rank(rank) == size_of_rank(0),
        "[agreement] all ranks must make the same calls in the same order, but rank {} makes another kind of "
        "call than rank 0 (attention on one, blockcp.exchange or unshard on the other).",
        rank);
    std::memcpy(&all[rank * size], &frames[rank * frame + sizeof size], size);
  }
  return all;
}

// By object rather than by name: a name may come back after its group was destroyed, and threads may isolate names.
struct Groups {
  std::mutex mutex;
  std::unordered_map<const c10d::ProcessGroup*, std::shared_ptr<C10dGroup>> known;
};

Groups& groups() {
  static auto* all = new Groups;  // never destroyed: torch's groups may outlive static destructors
  return *all;
}

ProcessGroupPtr resolve(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    fail_argument(
        "[torch] group must be one of torch's process groups, but none has the name \"{}\". Was it destroyed?", name);
  }
}

}  // namespace

std::shared_ptr<Group> find_group(const std::string& name) {
  if (name.empty()) return std::make_shared<Solo>();
  const ProcessGroupPtr group = resolve(name);
  std::lock_guard lock(groups().mutex);
  auto& known = groups().known;
  std::erase_if(known, [](const auto& item) { return item.second->expired(); });
  auto& found = known[group.get()];
  if (!found || !found->is(group)) found = std::make_shared<C10dGroup>(name, group);
  return found;
}

}  // namespace blockcp
