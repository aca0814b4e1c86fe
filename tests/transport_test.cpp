#include "blockcp/transport/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "blockcp/base/error.h"
#include "blockcp/transport/threads/threads.h"

namespace blockcp {
namespace {

using testing::HasSubstr;
using Sizes = std::vector<int64_t>;
using Bytes = std::vector<std::byte>;

std::string error_of(const std::function<void()>& act, ErrorKind kind = ErrorKind::system) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

int64_t sum(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }

// Byte `at` of what `source` sends to `destination` in call `call`.
std::byte content(int source, int destination, int64_t call, int64_t at) {
  return static_cast<std::byte>(source * 71 + destination * 13 + call * 7 + at);
}

// One exchange in flight, with the storage that it needs.
struct Flight {
  Sizes send_bytes, recv_bytes;
  Bytes send, recv;
  std::unique_ptr<Pending> pending;

  Flight(Sizes send_sizes, Sizes recv_sizes)
      : send_bytes(std::move(send_sizes)),
        recv_bytes(std::move(recv_sizes)),
        send(static_cast<size_t>(sum(send_bytes))),
        recv(static_cast<size_t>(sum(recv_bytes))) {}

  void start(Transport& transport, const std::string& what = "step 3 of 7") {
    pending = transport.exchange({send.data(), send_bytes, recv.data(), recv_bytes, what});
  }
};

Flight start_filled(Transport& transport, const std::vector<Sizes>& matrix, int64_t call) {
  const int me = transport.rank();
  Sizes to = matrix[static_cast<size_t>(me)], from;
  for (const Sizes& row : matrix) from.push_back(row[static_cast<size_t>(me)]);
  Flight flight(to, from);
  size_t at = 0;
  for (int peer = 0; peer < transport.world(); ++peer)
    for (int64_t i = 0; i < to[static_cast<size_t>(peer)]; ++i) flight.send[at++] = content(me, peer, call, i);
  flight.start(transport);
  return flight;
}

void expect_filled(const Flight& flight, int me, int64_t call) {
  size_t at = 0, wrong = 0;
  for (size_t peer = 0; peer < flight.recv_bytes.size(); ++peer)
    for (int64_t i = 0; i < flight.recv_bytes[peer]; ++i)
      wrong += flight.recv[at++] != content(static_cast<int>(peer), me, call, i);
  EXPECT_EQ(wrong, 0u) << "rank " << me << " call " << call;
}

TEST(Transport, delivers_every_byte_to_its_rank_and_counts_it) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (int world : {1, 2, 3, 5, 8}) {
    std::mt19937 random(seed + static_cast<unsigned>(world));
    std::vector<std::vector<Sizes>> calls(6, std::vector<Sizes>(static_cast<size_t>(world), Sizes(world)));
    for (auto& matrix : calls)
      for (size_t i = 0; i < matrix.size(); ++i)
        for (size_t j = 0; j < matrix.size(); ++j) matrix[i][j] = i == j || random() % 3 == 0 ? 0 : random() % 300;
    run_ranks(world, [&](Transport& transport) {
      std::vector<Flight> flights;  // all under way together, and waited for from the last to the first
      int64_t sent = 0, received = 0;
      for (size_t call = 0; call < calls.size(); ++call) {
        flights.push_back(start_filled(transport, calls[call], static_cast<int64_t>(call)));
        sent += sum(flights.back().send_bytes);
        received += sum(flights.back().recv_bytes);
      }
      for (size_t call = calls.size(); call-- > 0;) {
        flights[call].pending->wait();
        expect_filled(flights[call], transport.rank(), static_cast<int64_t>(call));
      }
      EXPECT_EQ(transport.bytes_sent(), sent);
      EXPECT_EQ(transport.bytes_received(), received);
    });
  }
}

TEST(Transport, gather_gives_every_rank_all_records_in_order_of_rank) {
  for (int world : {1, 2, 5}) {
    run_ranks(world, [&](Transport& transport) {
      for (int round = 0; round < 20; ++round) {
        const std::byte mine[2] = {static_cast<std::byte>(transport.rank()), static_cast<std::byte>(round)};
        const Bytes all = transport.gather(mine);
        ASSERT_EQ(all.size(), 2u * static_cast<size_t>(world));
        for (int rank = 0; rank < world; ++rank) {
          EXPECT_EQ(all[2 * static_cast<size_t>(rank)], static_cast<std::byte>(rank));
          EXPECT_EQ(all[2 * static_cast<size_t>(rank) + 1], static_cast<std::byte>(round));
        }
      }
      EXPECT_EQ(transport.bytes_sent(), 0) << "control records are not payload";
    });
  }
}

TEST(Transport, sent_bytes_may_be_overwritten_after_wait) {
  run_ranks(2, [](Transport& transport) {
    const std::vector<Sizes> matrix = {{0, 64}, {64, 0}};
    for (int64_t call = 0; call < 200; ++call) {
      Flight flight = start_filled(transport, matrix, call);
      flight.pending->wait();
      std::fill(flight.send.begin(), flight.send.end(), std::byte{0xee});
      expect_filled(flight, transport.rank(), call);
    }
  });
}

TEST(Transport, a_dropped_result_leaves_the_next_exchange_in_order) {
  run_ranks(2, [](Transport& transport) {
    const std::vector<Sizes> matrix = {{0, 8}, {16, 0}};
    { Flight dropped = start_filled(transport, matrix, 0); }
    Flight flight = start_filled(transport, matrix, 1);
    flight.pending->wait();
    expect_filled(flight, transport.rank(), 1);
  });
}

TEST(Transport, a_silent_peer_is_named_with_the_bytes_and_the_step) {
  ThreadGroup group(8, 0.05);
  const auto transport = group.transport(2);
  Flight flight(Sizes(8), {0, 13107200, 0, 0, 0, 0, 0, 0});
  const Sizes nothing(8);
  const auto other = group.transport(0);
  const auto others = other->exchange({nullptr, nothing, nullptr, nothing, "step 3 of 7"});
  flight.start(*transport);
  EXPECT_EQ(error_of([&] { flight.pending->wait(); }),
            "[transport] rank 2 of 8 waited 0.1 s for 12.5 MiB from rank 1 in step 3 of 7. Is rank 1 alive?");
  // The group is broken: later calls do not wait again.
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of([&] { transport->gather({}); }), HasSubstr("from rank 1 in step 3 of 7"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(40));
}

TEST(Transport, sizes_that_do_not_match_are_named) {
  EXPECT_THAT(error_of([] {
                run_ranks(2, [](Transport& transport) {
                  const bool sender = transport.rank() == 1;
                  Flight flight(sender ? Sizes{100, 0} : Sizes{0, 0}, sender ? Sizes{0, 0} : Sizes{0, 60});
                  flight.start(transport, sender ? "step 2 of 7" : "step 3 of 7");
                  flight.pending->wait();
                });
              }),
              HasSubstr("rank 0 must receive 60 B from rank 1 in step 3 of 7, but rank 1 sent 100 B in step 2 of 7"));
}

TEST(Transport, an_exchange_that_meets_a_gather_is_an_error) {
  EXPECT_THAT(error_of([] {
                run_ranks(2, [](Transport& transport) {
                  if (transport.rank() == 0) transport.gather({});
                  Flight flight(Sizes(2), Sizes(2));
                  flight.start(transport);
                  flight.pending->wait();
                });
              }),
              HasSubstr("Do all ranks make the same calls?"));
}

TEST(Transport, a_rank_that_throws_wakes_the_others_and_its_error_is_the_one_rethrown) {
  std::atomic<int> woken{0};
  const auto start = std::chrono::steady_clock::now();
  const std::string error = error_of(
      [&] {
        run_ranks(4, [&](Transport& transport) {
          if (transport.rank() == 2) fail_argument("[test] rank 2 has had enough.");
          try {
            transport.gather({});
          } catch (const Error& consequence) {
            EXPECT_THAT(consequence.what(), HasSubstr("rank 2 failed: [test] rank 2 has had enough."));
            ++woken;
            throw;
          }
        });
      },
      ErrorKind::argument);
  EXPECT_EQ(error, "[test] rank 2 has had enough.");
  EXPECT_EQ(woken, 3);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Transport, abort_wakes_a_waiting_rank_with_the_reason) {
  ThreadGroup group(2);
  std::string error;
  {
    std::jthread waiting([&] { error = error_of([&] { group.transport(0)->gather({}); }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    group.abort("[test] stop.");
  }
  EXPECT_EQ(error, "[test] stop.");
  EXPECT_EQ(error_of([&] { group.transport(1)->gather({}); }), "[test] stop.");
}

TEST(Transport, misuse_is_refused_before_anything_is_sent) {
  EXPECT_THAT(error_of([] { ThreadGroup(0); }, ErrorKind::argument), HasSubstr("world = 0"));
  ThreadGroup group(2);
  EXPECT_THAT(error_of([&] { group.transport(2); }, ErrorKind::argument), HasSubstr("[0, 2), but was 2"));
  const auto transport = group.transport(0);
  Flight wrong_count({0}, {0, 0}), to_itself({8, 0}, {0, 0});
  EXPECT_THAT(error_of([&] { wrong_count.start(*transport); }, ErrorKind::argument), HasSubstr("1 to send and 2 to"));
  EXPECT_THAT(error_of([&] { to_itself.start(*transport); }, ErrorKind::argument), HasSubstr("8 B for itself"));
}

TEST(Transport, amounts_are_written_for_people) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(13107200), "12.5 MiB");
  EXPECT_EQ(bytes_text(int64_t{3} << 40), "3.0 TiB");
}

}  // namespace
}  // namespace blockcp
