#include "blockcp/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <new>

#include "blockcp/base/error.h"
#include "tests/harness.h"

#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

// Fresh memory is full of NaN, so that whoever reads what nobody wrote shows it.
void* operator new(std::size_t bytes) {
  void* data = std::malloc(bytes ? bytes : 1);
  if (!data) throw std::bad_alloc();
  return std::memset(data, 0xff, bytes);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto align = static_cast<std::size_t>(alignment);
  void* data = std::aligned_alloc(align, (bytes + align - 1) / align * align + (bytes ? 0 : align));
  if (!data) throw std::bad_alloc();
  return std::memset(data, 0xff, bytes);
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  void* data = std::malloc(bytes ? bytes : 1);
  return data ? std::memset(data, 0xff, bytes) : nullptr;
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }

namespace blockcp {
namespace {

using testing::HasSubstr;

constexpr int kWorlds[] = {1, 2, 3, 4, 5, 8};

class Random {
 public:
  explicit Random(unsigned seed) : engine(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }
  std::mt19937 engine;
};

// Documents and padding anywhere, labels in no order.
std::vector<int64_t> random_ids(Random& random, int64_t rows, int64_t mean) {
  std::vector<int64_t> ids;
  int64_t label = 1000;
  while (static_cast<int64_t>(ids.size()) < rows) {
    const int64_t length = std::min(rows - static_cast<int64_t>(ids.size()), 1 + random.below(2 * mean));
    label += random.of<int64_t>({1, 5, -700});
    if (label <= 0) label += 5000;
    ids.insert(ids.end(), static_cast<size_t>(length), random.one_in(5) ? 0 : label);
  }
  return ids;
}

std::vector<int64_t> random_spans(Random& random, int64_t rows) {
  std::vector<int64_t> spans;
  for (int64_t id = 1; static_cast<int64_t>(spans.size()) < rows; ++id) {
    const int64_t length = std::min(rows - static_cast<int64_t>(spans.size()), 1 + random.below(6));
    spans.insert(spans.end(), static_cast<size_t>(length), random.one_in(2) ? id : 0);
  }
  return spans;
}

// Labels must not come back within a sequence; the generator above may repeat one.
void make_unique(std::vector<int64_t>& ids) {
  int64_t label = 0, before = -1;
  for (int64_t& id : ids) {
    if (id != 0 && id != before) ++label;
    before = id;
    if (id != 0) id = 7919 * label % 10007 + 1;
  }
}

Mask random_mask(Random& random, int64_t batch, int64_t rows) {
  Mask mask;
  mask.causal = !random.one_in(4);
  if (random.one_in(2)) mask.left = random.below(rows + 3);
  if (!mask.causal && random.one_in(2)) mask.right = random.below(rows + 3);
  if (mask.causal) mask.right = 0;
  if (mask.causal && random.one_in(3)) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t id : random_spans(random, rows)) mask.spans.push_back(id);
    mask.span_window = random.of({SpanWindow::left, SpanWindow::both, SpanWindow::none});
  }
  return mask;
}

Pack random_pack(Random& random, int world, int64_t most_local) {
  Pack pack;
  pack.batch = 1 + random.below(2);
  pack.rows = world * (1 + random.below(most_local));
  for (int64_t b = 0; b < pack.batch; ++b) {
    auto ids = random_ids(random, pack.rows, 1 + random.below(pack.rows));
    make_unique(ids);
    pack.ids.insert(pack.ids.end(), ids.begin(), ids.end());
  }
  pack.mask = random_mask(random, pack.batch, pack.rows);
  return pack;
}

AttentionShape random_shape(Random& random, DType dtype) {
  AttentionShape shape{.dtype = dtype};
  shape.kv_heads = 1 + random.below(3);
  shape.q_heads = shape.kv_heads * (1 + random.below(3));
  shape.head_dim = random.of<int64_t>({1, 3, 8, 16, 20});
  shape.value_dim = random.one_in(2) ? shape.head_dim : random.of<int64_t>({1, 5, 16, 24});
  return shape;
}

Experiment random_experiment(Random& random, int64_t most_local) {
  Experiment experiment;
  experiment.world = random.of({1, 2, 3, 4, 5, 8});
  experiment.pack = random_pack(random, experiment.world, most_local);
  experiment.shape = random_shape(random, random.of({DType::f32, DType::f64, DType::bf16, DType::f16}));
  experiment.scale = random.of({0.05, 0.3, 1.0});
  experiment.threads = random.of({1, 1, 3});
  experiment.strides = random.of({Strides::bhld, Strides::blhd, Strides::odd});
  return experiment;
}

void expect_agreement(Experiment experiment, Random& random) {
  const Globals in = random_globals(experiment.pack, experiment.shape, random.engine);
  const Results truth = dense<double>(experiment.pack, experiment.shape, experiment.scale, in);
  const std::vector<double> allowed = allowed_errors(experiment, in, truth);
  for (const Kernel* kernel : kernels_for(experiment.shape)) {
    experiment.kernel = kernel;
    for (Path path : admitted_paths(experiment.pack, experiment.world)) {
      experiment.path = path;
      SCOPED_TRACE(describe(experiment));
      const Results results = run(experiment, in).results;
      for (size_t i = 0; i < std::size(kTensors); ++i)
        EXPECT_LE(distance(results.*kTensors[i].values, truth.*kTensors[i].values), allowed[i]) << kTensors[i].name;
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(Engine, random_problems_agree_with_the_oracle) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 70 && !HasFailure(); ++round) expect_agreement(random_experiment(random, 9), random);
}

TEST(Engine, longer_random_problems_agree_with_the_oracle) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 6 && !HasFailure(); ++round) {
    Experiment experiment = random_experiment(random, 150 / random.of({1, 2, 4}));
    experiment.shape.q_heads = experiment.shape.kv_heads = 1 + random.below(2);
    if (experiment.pack.rows > 400) continue;
    expect_agreement(experiment, random);
  }
}

TEST(Engine, gradients_are_those_of_finite_differences_through_every_path) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  Experiment experiment;
  experiment.world = 3;
  experiment.pack = {1, 9, {4, 4, 4, 4, 4, 7, 7, 0, 9}, {}};
  experiment.pack.mask = random.one_in(2) ? windowed(3) : Mask{};
  experiment.shape = {DType::f64, 2, 1, 3, 2};
  experiment.scale = 0.7;
  Globals in = random_globals(experiment.pack, experiment.shape, random.engine);
  const auto loss = [&] {
    const Results results = run(experiment, in).results;
    double sum = 0;
    for (size_t i = 0; i < results.out.size(); ++i) sum += results.out[i] * in.dout[i];
    return sum;
  };
  for (Path path : admitted_paths(experiment.pack, experiment.world)) {
    experiment.path = path;
    SCOPED_TRACE(describe(experiment));
    const Results analytic = run(experiment, in).results;
    struct {
      std::vector<double>* input;
      const std::vector<double>* gradient;
    } const pairs[] = {{&in.q, &analytic.dq}, {&in.k, &analytic.dk}, {&in.v, &analytic.dv}};
    for (const auto& [input, gradient] : pairs)
      for (size_t i = 0; i < input->size(); ++i) {
        const double value = (*input)[i], step = 1e-5;
        (*input)[i] = value + step;
        const double above = loss();
        (*input)[i] = value - step;
        const double below = loss();
        (*input)[i] = value;
        ASSERT_NEAR((above - below) / (2 * step), (*gradient)[i], 1e-8) << "element " << i;
      }
  }
}

TEST(Engine, counted_bytes_are_the_bytes_that_travel) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 60; ++round) {
    Experiment experiment = random_experiment(random, 9);
    const Shape shape{experiment.shape.q_heads, experiment.shape.kv_heads, experiment.shape.head_dim,
                      experiment.shape.value_dim, experiment.shape.dtype};
    const Globals in = random_globals(experiment.pack, experiment.shape, random.engine);
    for (Path path : admitted_paths(experiment.pack, experiment.world)) {
      experiment.path = path;
      SCOPED_TRACE(describe(experiment));
      const Outcome moved = run(experiment, in);
      const Planned planned(experiment.pack, experiment.world);
      for (int rank = 0; rank < experiment.world; ++rank) {
        const RankCost counted = cost(planned.problem, build_schedule(planned.problem, path, rank));
        const RankBytes& bytes = moved.bytes[static_cast<size_t>(rank)];
        EXPECT_EQ(forward_bytes_received(counted, shape), bytes.forward_received);
        EXPECT_EQ(backward_bytes_received(counted, shape), bytes.backward_received);
        EXPECT_EQ(counted.forward_sent * shape.kv_row_bytes(), bytes.forward_sent);
        EXPECT_EQ(counted.backward_sent * shape.kv_row_bytes() + counted.gradient_sent * shape.dkv_row_bytes(),
                  bytes.backward_sent);
      }
      ASSERT_FALSE(HasFailure());
    }
  }
}

// One problem, cut over any number of ranks up to 8.
Experiment divisible_experiment(Random& random) {
  Experiment experiment = random_experiment(random, 2);
  experiment.world = 1;
  experiment.pack = random_pack(random, 120, 1);
  return experiment;
}

TEST(Engine, out_and_dq_have_the_same_bits_for_every_world_thread_count_and_path) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 4; ++round) {
    Experiment experiment = divisible_experiment(random);
    const Globals in = random_globals(experiment.pack, experiment.shape, random.engine);
    for (const Kernel* kernel : kernels_for(experiment.shape)) {
      experiment.kernel = kernel;
      experiment.world = 1;
      experiment.path = Path::allgather;
      const Results alone = run(experiment, in).results;
      for (int world : kWorlds)
        for (Path path : admitted_paths(experiment.pack, world)) {
          if (path == Path::ring) continue;
          experiment.world = world;
          experiment.path = path;
          experiment.threads = 1 + static_cast<int>(random.below(4));
          experiment.strides = random.of({Strides::bhld, Strides::blhd, Strides::odd});
          SCOPED_TRACE(describe(experiment));
          const Results cut = run(experiment, in).results;
          EXPECT_EQ(cut.out, alone.out);
          EXPECT_EQ(cut.lse, alone.lse);
          EXPECT_EQ(cut.dq, alone.dq);
          ASSERT_FALSE(HasFailure());
        }
    }
  }
}

TEST(Engine, the_same_plan_gives_the_same_bits_again) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 8; ++round) {
    Experiment experiment = random_experiment(random, 20);
    experiment.threads = 3;
    const Globals in = random_globals(experiment.pack, experiment.shape, random.engine);
    for (const Kernel* kernel : kernels_for(experiment.shape))
      for (Path path : admitted_paths(experiment.pack, experiment.world)) {
        experiment.kernel = kernel;
        experiment.path = path;
        SCOPED_TRACE(describe(experiment));
        const Results once = run(experiment, in).results, again = run(experiment, in).results;
        for (const auto& [name, tensor] : kTensors) EXPECT_EQ(once.*tensor, again.*tensor) << name;
        ASSERT_FALSE(HasFailure());
      }
  }
}

TEST(Engine, no_two_blocks_of_a_kernel_call_share_a_query_row) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 300; ++round) {
    const int world = random.of({1, 2, 3, 4, 5, 8});
    const Pack pack = random_pack(random, world, 9);
    const Planned planned(pack, world);
    for (Path path : admitted_paths(pack, world))
      for (int rank = 0; rank < world; ++rank) {
        const Schedule schedule = build_schedule(planned.problem, path, rank);
        for (const auto* steps : {&schedule.forward, &schedule.backward})
          for (const Step& step : *steps) {
            std::vector<int> calls(static_cast<size_t>(schedule.buffers[kQ].rows));
            for (const Block& block : step.blocks)
              for (int64_t row = 0; row < block.q.count; ++row)
                ASSERT_EQ(++calls[static_cast<size_t>(block.q.row + row)], 1)
                    << name(path) << " rank " << rank << " of " << world << " causal " << pack.mask.causal;
          }
      }
  }
}

// Faults and disagreements

std::atomic<bool> kernel_fails{true};

void failing_forward(const ForwardArgs& args) {
  if (kernel_fails) throw std::runtime_error("out of luck");
  all_kernels().back().forward(args);
}
void failing_backward(const BackwardArgs& args) {
  if (kernel_fails) throw std::runtime_error("out of luck in backward");
  all_kernels().back().backward(args);
}
constexpr auto kWilling = [](const AttentionShape&, const Machine&) { return std::string(); };
// The reference's name, so that ranks with it and without it agree.
const Kernel kFailing{"reference", kWilling, failing_forward, failing_backward};

Experiment spread_experiment() {
  Experiment experiment;
  experiment.world = 4;
  experiment.pack = {1, 16, {1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0}, {}};
  experiment.shape = {DType::f32, 4, 2, 8, 8};
  return experiment;
}

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(Engine, a_kernel_that_fails_on_one_rank_fails_all_and_the_group_works_on) {
  std::mt19937 random(1);
  for (Path path : kPaths) {
    Experiment experiment = spread_experiment();
    experiment.path = path;
    if (!admitted(experiment.pack, experiment.world, path)) continue;
    const Globals in = random_globals(experiment.pack, experiment.shape, random);
    const Results expected = run(experiment, in).results;
    Experiment failing = experiment;
    failing.kernel = &kFailing;
    const Planned planned(experiment.pack, experiment.world);
    Results results = expected;
    for (double& value : results.dk) value = 0;
    run_ranks(experiment.world, [&](Transport& transport) {
      Worker bad(transport.rank() == 2 ? failing : experiment, planned, in, transport);
      EXPECT_THAT(error_of([&] { bad.forward(); }), HasSubstr("failed on rank 2 of 4 (out of luck)")) << name(path);
      Worker good(experiment, planned, in, transport);
      good.forward();
      EXPECT_THAT(error_of([&] { bad.backward(); }), HasSubstr("failed on rank 2 of 4 (out of luck in backward)"));
      good.backward();
      good.write(results);
    });
    EXPECT_EQ(results.out, expected.out);
    EXPECT_EQ(results.dk, expected.dk);
  }
}

TEST(Engine, a_failing_kernel_without_agreement_fails_its_own_rank_after_the_transfers) {
  std::mt19937 random(1);
  Experiment experiment = spread_experiment(), failing = experiment;
  failing.kernel = &kFailing;
  const Globals in = random_globals(experiment.pack, experiment.shape, random);
  const Planned planned(experiment.pack, experiment.world);
  run_ranks(experiment.world, [&](Transport& transport) {
    Worker worker(transport.rank() == 2 ? failing : experiment, planned, in, transport);
    worker.call.agree = false;
    if (transport.rank() == 2)
      EXPECT_THROW(worker.forward(), std::runtime_error);
    else
      EXPECT_NO_THROW(worker.forward());
    Worker next(experiment, planned, in, transport);
    EXPECT_NO_THROW(next.forward());
  });
}

// One rank changes its call; all ranks must throw `message`, and then complete an ordinary call.
void expect_all_throw(const char* message, const std::function<void(Call&)>& change) {
  std::mt19937 random(1);
  const Experiment experiment = spread_experiment();
  const Globals in = random_globals(experiment.pack, experiment.shape, random);
  const Planned planned(experiment.pack, experiment.world);
  std::atomic<int> thrown{0};
  run_ranks(experiment.world, [&](Transport& transport) {
    Worker worker(experiment, planned, in, transport);
    if (transport.rank() == 1) change(worker.call);
    EXPECT_THAT(error_of([&] { worker.forward(); }), HasSubstr(message));
    EXPECT_THAT(error_of([&] { worker.backward(); }), HasSubstr(message));
    thrown += 2;
    Worker next(experiment, planned, in, transport);
    next.forward();
    next.backward();
  });
  EXPECT_EQ(thrown, 8);
}

TEST(Engine, calls_that_differ_between_ranks_fail_on_all) {
  expect_all_throw("rank 1 differs from rank 0 (scale 0.5 vs scale 0.25)", [](Call& call) { call.scale = 0.5; });
  expect_all_throw("rank 1 differs from rank 0 (call 1 vs call 0)", [](Call& call) { call.number = 1; });
  expect_all_throw("rank 1 differs from rank 0 (2 query heads", [](Call& call) { call.shape.q_heads = 2; });
  expect_all_throw("same inputs, but rank 1 differs", [](Call& call) { call.needs_grad = 1; });
}

TEST(Engine, a_call_that_one_rank_cannot_make_fails_on_all) {
  expect_all_throw("number of query heads, but they are 3 and 4", [](Call& call) { call.shape.kv_heads = 3; });
  expect_all_throw("[engine] the tensors must have the plan's 4 rows, but have 5 (batch 1 of 5 rows, rank 1)",
                   [](Call& call) { call.local_rows = 5; });
  expect_all_throw("head_dim and value width must be at least 1", [](Call& call) { call.shape.head_dim = 0; });
}

TEST(Engine, a_plan_for_another_world_is_refused_on_every_rank) {
  std::mt19937 random(1);
  const Experiment experiment = spread_experiment();
  const Globals in = random_globals(experiment.pack, experiment.shape, random);
  const Planned planned(experiment.pack, 4);
  run_ranks(2, [&](Transport& transport) {
    Worker worker(experiment, planned, in, transport);
    EXPECT_THAT(error_of([&] { worker.forward(); }),
                HasSubstr("this one is for rank 0 of 4, and the group has this rank as 0 of 2"));
    EXPECT_EQ(transport.bytes_sent(), 0);
  });
}

TEST(Engine, different_documents_on_one_rank_fail_on_all) {
  std::mt19937 random(1);
  const Experiment experiment = spread_experiment();
  Experiment other = experiment;
  other.pack.ids[6] = 1;
  const Globals in = random_globals(experiment.pack, experiment.shape, random);
  const Planned planned(experiment.pack, 4), others(other.pack, 4);
  run_ranks(4, [&](Transport& transport) {
    Worker worker(experiment, transport.rank() == 3 ? others : planned, in, transport);
    EXPECT_THAT(error_of([&] { worker.forward(); }),
                HasSubstr("must hold the same documents, but rank 3 differs from rank 0"));
    EXPECT_EQ(transport.bytes_sent(), 0);
  });
}

TEST(Engine, tensors_without_rows_or_sequences_pass_through) {
  std::mt19937 random(1);
  for (const auto& [batch, rows] : {std::pair<int64_t, int64_t>{1, 0}, {0, 8}})
    for (Path path : kPaths) {
      Experiment experiment;
      experiment.world = 2;
      experiment.pack.batch = batch;
      experiment.pack.rows = rows;
      experiment.path = path;
      if (!admitted(experiment.pack, 2, path)) continue;
      const Outcome nothing = run(experiment, random_globals(experiment.pack, experiment.shape, random));
      EXPECT_TRUE(nothing.results.out.empty());
      for (const RankBytes& bytes : nothing.bytes) EXPECT_EQ(bytes.forward_sent + bytes.backward_sent, 0);
    }
}

}  // namespace
}  // namespace blockcp
