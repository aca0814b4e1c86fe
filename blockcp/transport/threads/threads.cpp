#include "blockcp/transport/threads/threads.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "blockcp/base/error.h"

namespace blockcp {
namespace {

// What a rank throws because another one failed.
struct Aborted : Error {
  explicit Aborted(const std::string& reason) : Error(ErrorKind::system, reason) {}
};

struct Message {
  bool control;  // sent by gather(), not by exchange()
  std::string what;
  std::vector<std::byte> bytes;
};

constexpr const char* kGather = "a gather of control records";

}  // namespace

// Rank r's n-th call meets every other rank's n-th call. Every rank posts a message to every other, empty ones too:
// so a size that two ranks do not agree on is seen by the one that would have read it.
struct ThreadGroup::Shared {
  struct Rank {
    uint64_t calls = 0;
    std::map<std::pair<uint64_t, int>, Message> inbox;  // by (call, source)
    std::condition_variable arrived;
  };

  Shared(int world, double timeout_seconds) : timeout(timeout_seconds), ranks(static_cast<size_t>(world)) {}

  int world() const { return static_cast<int>(ranks.size()); }
  Rank& of(int rank) { return ranks[static_cast<size_t>(rank)]; }

  void abort(const std::string& why) {
    {
      std::lock_guard lock(mutex);
      if (broken.empty()) broken = why.empty() ? "[transport] the group was aborted." : why;
    }
    for (Rank& rank : ranks) rank.arrived.notify_all();
  }

  uint64_t next_call(int rank) {
    std::lock_guard lock(mutex);
    if (!broken.empty()) throw Aborted(broken);
    return of(rank).calls++;
  }

  void post(int source, int destination, uint64_t call, Message message) {
    {
      std::lock_guard lock(mutex);
      of(destination).inbox.emplace(std::pair(call, source), std::move(message));
    }
    of(destination).arrived.notify_all();
  }

  // What `source` posted to the transport's rank in this call, checked against what that rank expects.
  std::vector<std::byte> take(const Transport& transport, int source, uint64_t call, size_t bytes, bool control,
                              const std::string& what) {
    Rank& me = of(transport.rank());
    std::unique_lock lock(mutex);
    const auto there = [&] { return !broken.empty() || me.inbox.contains({call, source}); };
    const bool in_time = me.arrived.wait_for(lock, std::chrono::duration<double>(timeout), there);
    if (!broken.empty()) throw Aborted(broken);
    if (!in_time) {
      lock.unlock();
      fault(waited_text(transport, timeout, static_cast<int64_t>(bytes), source, what));
    }
    Message message = std::move(me.inbox.extract({call, source}).mapped());
    lock.unlock();
    if (message.control != control || message.bytes.size() != bytes)
      fault(
          fmt::format("[transport] rank {} must receive {} from rank {} in {}, but rank {} sent {} in {}. Do all "
                      "ranks make the same calls?",
                      transport.rank(), bytes_text(static_cast<int64_t>(bytes)), source, what, source,
                      bytes_text(static_cast<int64_t>(message.bytes.size())), message.what));
    return std::move(message.bytes);
  }

  [[noreturn]] void fault(const std::string& message) {
    abort(message);
    throw Error(ErrorKind::system, message);
  }

  const double timeout;
  std::mutex mutex;
  std::string broken;  // the reason, once the group is of no more use
  std::vector<Rank> ranks;

  class Endpoint;
  class Receipt;
};

class ThreadGroup::Shared::Receipt final : public Pending {
 public:
  Receipt(std::shared_ptr<Shared> shared, const Transport& transport, uint64_t call, const Exchange& exchange)
      : shared_(std::move(shared)),
        transport_(transport),
        call_(call),
        recv_(exchange.recv),
        recv_bytes_(exchange.recv_bytes.begin(), exchange.recv_bytes.end()),
        what_(exchange.what) {}

  ~Receipt() override {
    try {
      wait();
    } catch (const std::exception&) {
      // The group keeps the reason, and the next call throws it.
    }
  }

  void wait() override {
    if (done_) return;
    done_ = true;
    std::byte* to = recv_;
    for (int source = 0; source < transport_.world(); ++source) {
      if (source == transport_.rank()) continue;
      const auto expected = static_cast<size_t>(recv_bytes_[static_cast<size_t>(source)]);
      const auto bytes = shared_->take(transport_, source, call_, expected, false, what_);
      if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
      to += bytes.size();
    }
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const Transport& transport_;
  const uint64_t call_;
  std::byte* const recv_;
  const std::vector<int64_t> recv_bytes_;
  const std::string what_;
  bool done_ = false;
};

class ThreadGroup::Shared::Endpoint final : public Transport {
 public:
  Endpoint(std::shared_ptr<Shared> shared, int rank) : shared_(std::move(shared)), rank_(rank) {}

  int rank() const override { return rank_; }
  int world() const override { return shared_->world(); }

  std::unique_ptr<Pending> exchange(const Exchange& exchange) override {
    check(exchange);
    const uint64_t call = shared_->next_call(rank_);
    const std::byte* from = exchange.send;
    for (int peer = 0; peer < world(); ++peer) {
      const int64_t bytes = exchange.send_bytes[static_cast<size_t>(peer)];
      if (peer != rank_) shared_->post(rank_, peer, call, {false, exchange.what, {from, from + bytes}});
      from += bytes;
    }
    count(exchange);
    return std::make_unique<Receipt>(shared_, *this, call, exchange);
  }

  std::vector<std::byte> gather(std::span<const std::byte> mine) override {
    const uint64_t call = shared_->next_call(rank_);
    for (int peer = 0; peer < world(); ++peer)
      if (peer != rank_) shared_->post(rank_, peer, call, {true, kGather, {mine.begin(), mine.end()}});
    std::vector<std::byte> all;
    for (int source = 0; source < world(); ++source) {
      if (source == rank_) {
        all.insert(all.end(), mine.begin(), mine.end());
        continue;
      }
      const auto theirs = shared_->take(*this, source, call, mine.size(), true, kGather);
      all.insert(all.end(), theirs.begin(), theirs.end());
    }
    return all;
  }

 private:
  void check(const Exchange& exchange) const {
    const auto ranks = static_cast<size_t>(world());
    check_argument(exchange.send_bytes.size() == ranks && exchange.recv_bytes.size() == ranks,
                   "[transport] an exchange must have one size for each of {} ranks, but has {} to send and {} to "
                   "receive ({}).",
                   ranks, exchange.send_bytes.size(), exchange.recv_bytes.size(), exchange.what);
    const auto own = static_cast<size_t>(rank_);
    check_argument(exchange.send_bytes[own] == 0 && exchange.recv_bytes[own] == 0,
                   "[transport] a rank must not send to itself, but rank {} has {} B for itself ({}).", rank_,
                   exchange.send_bytes[own] + exchange.recv_bytes[own], exchange.what);
  }

  const std::shared_ptr<Shared> shared_;
  const int rank_;
};

ThreadGroup::ThreadGroup(int world, double timeout_seconds) {
  check_argument(world >= 1, "[transport] a group must have at least one rank, but world = {}.", world);
  shared_ = std::make_shared<Shared>(world, timeout_seconds);
}

ThreadGroup::~ThreadGroup() = default;

std::unique_ptr<Transport> ThreadGroup::transport(int rank) {
  check_argument(0 <= rank && rank < shared_->world(),
                 "[transport] a rank of this group must be in [0, {}), but was {}.", shared_->world(), rank);
  return std::make_unique<Shared::Endpoint>(shared_, rank);
}

void ThreadGroup::abort(const std::string& reason) { shared_->abort(reason); }

void run_ranks(int world, const std::function<void(Transport& transport)>& body, double timeout_seconds) {
  ThreadGroup group(world, timeout_seconds);
  std::mutex mutex;
  std::exception_ptr first, consequence;
  const auto keep = [&](std::exception_ptr& slot) {
    std::lock_guard lock(mutex);
    if (!slot) slot = std::current_exception();
  };
  const auto run = [&](int rank) {
    try {
      body(*group.transport(rank));
    } catch (const Aborted&) {
      keep(consequence);
    } catch (const std::exception& error) {
      keep(first);
      group.abort(fmt::format("[transport] the group ended because rank {} failed: {}", rank, error.what()));
    }
  };
  {
    std::vector<std::jthread> ranks;
    for (int rank = 1; rank < world; ++rank) ranks.emplace_back(run, rank);
    run(0);
  }
  if (first || consequence) std::rethrow_exception(first ? first : consequence);
}

}  // namespace blockcp
