#include "blockcp/base/parallel.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace blockcp {
namespace {

struct Named {
  const char* name;
  std::unique_ptr<Parallel> (*make)();
};

std::unique_ptr<Parallel> borrowed() {
  return make_borrowed(3, [](int threads, const std::function<void(int)>& participate) {
    std::vector<std::jthread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back([&participate, i] { participate(i); });
    participate(0);
  });
}

class EveryParallel : public testing::TestWithParam<Named> {
 protected:
  std::unique_ptr<Parallel> parallel = GetParam().make();
};

INSTANTIATE_TEST_SUITE_P(All, EveryParallel,
                         testing::Values(Named{"serial", [] { return make_serial(); }},
                                         Named{"pool1", [] { return make_pool(1); }},
                                         Named{"pool4", [] { return make_pool(4); }}, Named{"borrowed3", borrowed}),
                         [](const auto& named) { return named.param.name; });

TEST_P(EveryParallel, runs_every_item_once_on_a_thread_it_has) {
  for (int64_t items : {0, 1, 2, 7, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(items));
    std::atomic<bool> in_range{true};
    parallel->run(items, [&](int64_t item, int thread) {
      ++runs[static_cast<size_t>(item)];
      if (thread < 0 || thread >= parallel->threads()) in_range = false;
    });
    for (auto& n : runs) EXPECT_EQ(n, 1);
    EXPECT_TRUE(in_range);
  }
}

TEST_P(EveryParallel, one_thread_number_is_never_in_two_bodies) {
  std::vector<std::atomic<int>> inside(static_cast<size_t>(parallel->threads()));
  std::atomic<int> clashes{0};
  parallel->run(500, [&](int64_t, int thread) {
    if (++inside[static_cast<size_t>(thread)] != 1) ++clashes;
    --inside[static_cast<size_t>(thread)];
  });
  EXPECT_EQ(clashes, 0);
}

TEST_P(EveryParallel, an_item_may_wait_for_a_lower_one) {
  std::atomic<int64_t> done{0};
  parallel->run(200, [&](int64_t item, int) {
    while (done != item) std::this_thread::yield();
    ++done;
  });
  EXPECT_EQ(done, 200);
}

TEST_P(EveryParallel, rethrows_the_exception_skips_the_rest_and_works_again) {
  std::atomic<int64_t> started{0};
  const auto body = [&](int64_t item, int) {
    ++started;
    if (item == 3) throw std::runtime_error("item 3");
  };
  try {
    parallel->run(1'000'000, body);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "item 3");
  }
  EXPECT_LT(started, 1'000'000);
  started = 0;
  parallel->run(100, [&](int64_t, int) { ++started; });
  EXPECT_EQ(started, 100);
}

TEST_P(EveryParallel, a_run_inside_a_body_completes) {
  std::atomic<int> inner{0};
  parallel->run(8, [&](int64_t, int) { parallel->run(10, [&](int64_t, int) { ++inner; }); });
  EXPECT_EQ(inner, 80);
}

TEST_P(EveryParallel, runs_from_several_threads_do_not_mix) {
  std::atomic<int64_t> sum{0};
  {
    std::vector<std::jthread> callers;
    for (int caller = 0; caller < 4; ++caller)
      callers.emplace_back([&] {
        for (int round = 0; round < 50; ++round) parallel->run(20, [&](int64_t item, int) { sum += item; });
      });
  }
  EXPECT_EQ(sum, 4 * 50 * 190);
}

TEST(Pool, uses_more_than_one_thread) {
  const auto pool = make_pool(2);
  std::atomic<int> together{0};
  pool->run(2, [&](int64_t, int) {
    ++together;
    while (together < 2) std::this_thread::yield();
  });
  EXPECT_EQ(together, 2);
}

// The child's exit code: 0 if two of its threads met in a run.
int child_runs(Parallel& pool) {
  std::atomic<int> together{0};
  pool.run(2, [&](int64_t, int) {
    ++together;
    while (together < 2) std::this_thread::yield();
  });
  return together == 2 ? 0 : 1;
}

int fork_and_run(Parallel& pool) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(child_runs(pool));
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(Pool, a_forked_child_starts_threads_of_its_own) {
  const auto pool = make_pool(3);
  EXPECT_EQ(child_runs(*pool), 0);
  EXPECT_EQ(fork_and_run(*pool), 0);
  EXPECT_EQ(child_runs(*pool), 0);
}

TEST(Pool, a_child_forked_while_the_pool_works_has_a_pool_that_works) {
  const auto pool = make_pool(3);
  std::atomic<bool> stop{false};
  std::jthread busy([&] {
    while (!stop) pool->run(50, [](int64_t, int) { std::this_thread::yield(); });
  });
  for (int i = 0; i < 10; ++i) EXPECT_EQ(fork_and_run(*pool), 0);
  stop = true;
}

TEST(Pool, may_be_destroyed_in_a_child_that_never_ran_it) {
  auto pool = make_pool(3);
  EXPECT_EQ(child_runs(*pool), 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    pool.reset();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace blockcp
