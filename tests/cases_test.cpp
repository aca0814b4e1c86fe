// Cases that users of such systems reported, through the whole pipeline and by their ids. Most are probes with exact
// answers: q = 0 gives every visible key the same weight, so with v_j = j and dout = 1
//   out_i = mean of the visible row numbers     dv_j = sum over the rows i that see j of 1 / n_i     dk = 0
//   lse_i = ln n_i, n_i = number of keys that row i sees
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <sstream>

#include "tests/harness.h"
#include "tests/refusal.h"

namespace blockcp {
namespace {

using Numbers = std::vector<double>;

// "0 .5 | 1 1.5": bars mark the ranks' borders and are there for the reader.
Numbers numbers(const std::string& text) {
  Numbers values;
  std::istringstream words(text);
  for (std::string word; words >> word;)
    if (word != "|") values.push_back(std::stod(word));
  return values;
}

Pack docs(const std::vector<int64_t>& lengths, int64_t padding = 0, Mask mask = {}) {
  Pack pack{1, padding, {}, std::move(mask)};
  for (size_t i = 0; i < lengths.size(); ++i)
    pack.ids.insert(pack.ids.end(), static_cast<size_t>(lengths[i]), static_cast<int64_t>(i) + 1);
  pack.ids.resize(pack.ids.size() + static_cast<size_t>(padding));
  pack.rows = static_cast<int64_t>(pack.ids.size());
  return pack;
}

Mask spans(const std::string& ids, std::optional<int64_t> window = {}, SpanWindow rule = SpanWindow::left) {
  Mask mask = windowed(window);
  for (double id : numbers(ids)) mask.spans.push_back(static_cast<int64_t>(id));
  mask.span_window = rule;
  return mask;
}

// One value per row for all heads and columns.
Numbers spread(const Pack& pack, const Numbers& rows, int64_t heads, int64_t width) {
  Numbers all;
  for (int64_t b = 0; b < pack.batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t row = 0; row < pack.rows; ++row)
        all.insert(all.end(), static_cast<size_t>(width), rows[static_cast<size_t>(b * pack.rows + row)]);
  return all;
}

struct Probe {
  Pack pack;
  int world;
  Numbers v{};     // by row; row numbers if empty
  Numbers dout{};  // by row; ones if empty
  AttentionShape shape{DType::f32, 4, 2, 16, 16};
  std::vector<Path> paths{};  // all admitted ones if empty
  bool large = false;         // only the best kernel and the reference

  Globals inputs() const {
    const auto rows = static_cast<size_t>(pack.batch * pack.rows);
    Numbers values = v;
    if (values.empty())
      for (size_t row = 0; row < rows; ++row)
        values.push_back(static_cast<double>(row % static_cast<size_t>(pack.rows)));
    std::mt19937 random(std::random_device{}());
    Globals in = random_globals(pack, shape, random);
    std::fill(in.q.begin(), in.q.end(), 0);
    in.v = spread(pack, values, shape.kv_heads, shape.value_dim);
    in.dout = spread(pack, dout.empty() ? Numbers(rows, 1) : dout, shape.q_heads, shape.value_dim);
    return in;
  }

  // Every path and kernel.
  void each(const std::function<void(const Experiment&, const Globals&, const Outcome&)>& check) const {
    const Globals in = inputs();
    Experiment experiment{.pack = pack, .world = world, .shape = shape};
    std::vector<const Kernel*> kernels = kernels_for(shape);
    if (large) kernels = {kernels.front(), kernels.back()};
    for (const Kernel* kernel : kernels)
      for (Path path : paths.empty() ? admitted_paths(pack, world) : paths) {
        experiment.kernel = kernel;
        experiment.path = path;
        SCOPED_TRACE(fmt::format("{} on {} ranks, kernel {}", name(path), world, kernel->name));
        check(experiment, in, run(experiment, in));
      }
  }

  // Checks everything the probe has an exact answer for; `dv` is that of one query head.
  void expect(const Numbers& out, const Numbers& dv = {}) const {
    const double tolerance = 1e-6 * static_cast<double>(pack.rows);
    each([&](const Experiment&, const Globals&, const Outcome& outcome) {
      const Results& r = outcome.results;
      EXPECT_LE(distance(r.out, spread(pack, out, shape.q_heads, shape.value_dim)), tolerance);
      EXPECT_LE(distance(r.lse, spread(pack, lse(), shape.q_heads, 1)), 1e-6);
      EXPECT_EQ(largest(r.dk), 0);
      EXPECT_EQ(distance(r.dk, Numbers(r.dk.size(), 0)), 0);
      expect_padding_is_zero(r);
      if (dv.empty()) return;
      Numbers of_group = dv;
      for (double& value : of_group) value *= static_cast<double>(shape.group());
      EXPECT_LE(distance(r.dv, spread(pack, of_group, shape.kv_heads, shape.value_dim)), tolerance);
    });
  }

  Numbers lse() const {
    Numbers rows;
    for (int64_t b = 0; b < pack.batch; ++b)
      for (int64_t i = 0; i < pack.rows; ++i) {
        int64_t seen = 0;
        for (int64_t j = 0; j < pack.rows; ++j) seen += pack.visible(b, i, j);
        rows.push_back(std::log(static_cast<double>(seen)));
      }
    return rows;
  }

  void expect_padding_is_zero(const Results& r) const {
    const auto zero = [&](const Numbers& values, int64_t heads, int64_t width) {
      for (size_t i = 0; i < values.size(); ++i) {
        const auto plane = i / static_cast<size_t>(width);
        const auto row = static_cast<int64_t>(plane) % pack.rows;
        const auto batch = static_cast<int64_t>(plane) / pack.rows / heads;
        const bool padding = pack.ids[static_cast<size_t>(batch * pack.rows + row)] == 0;
        ASSERT_TRUE(!padding || values[i] == 0) << "row " << row << " has " << values[i];
      }
    };
    zero(r.out, shape.q_heads, shape.value_dim);
    zero(r.dq, shape.q_heads, shape.head_dim);
    zero(r.dk, shape.kv_heads, shape.head_dim);
    zero(r.dv, shape.kv_heads, shape.value_dim);
  }
};

// Row numbers' mean under a causal window of documents of consecutive rows.
Numbers causal_means(const Pack& pack) {
  Numbers means;
  for (int64_t i = 0; i < pack.rows; ++i) {
    double sum = 0, seen = 0;
    for (int64_t j = 0; j < pack.rows; ++j)
      if (pack.visible(0, i, j)) sum += static_cast<double>(j), ++seen;
    means.push_back(seen > 0 ? sum / seen : 0);
  }
  return means;
}

std::vector<int64_t> rows_received(const Pack& pack, int world, Path path) {
  const Planned planned(pack, world);
  std::vector<int64_t> rows;
  for (int rank = 0; rank < world; ++rank)
    rows.push_back(rows_received(build_schedule(planned.problem, path, rank).forward, Role::kv));
  return rows;
}

// Rows of the forward a2a by sender and receiver.
std::vector<std::vector<int64_t>> sent_matrix(const Pack& pack, int world) {
  const Planned planned(pack, world);
  std::vector<std::vector<int64_t>> matrix(static_cast<size_t>(world),
                                           std::vector<int64_t>(static_cast<size_t>(world)));
  for (int rank = 0; rank < world; ++rank)
    for (const Step& step : build_schedule(planned.problem, Path::a2a, rank).forward)
      for (const Transfer& transfer : step.starts)
        for (const Move& move : transfer.send)
          matrix[static_cast<size_t>(rank)][static_cast<size_t>(move.peer)] += rows(move);
  return matrix;
}

// Random q, k, v and dout against the oracle.
void expect_oracle(const Probe& probe, double scale = 0.25) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const Globals in = random_globals(probe.pack, probe.shape, random);
  const Results truth = dense<double>(probe.pack, probe.shape, scale, in);
  probe.each([&](Experiment experiment, const Globals&, const Outcome&) {
    experiment.scale = scale;
    const Results results = run(experiment, in).results;
    const std::vector<double> allowed = allowed_errors(experiment, in, truth);
    for (size_t i = 0; i < std::size(kTensors); ++i)
      EXPECT_LE(distance(results.*kTensors[i].values, truth.*kTensors[i].values), allowed[i]) << kTensors[i].name;
  });
}

TEST(CasesPlan, PL_02_a_document_of_odd_length_keeps_its_last_key) {
  Probe{docs({7}, 1), 2, {1, 1, 1, 1, 2, 2, 2, 9}}.expect(numbers("1 1 1 1 | 1.2 1.333333 1.428571 0"));
  for (int64_t length = 1; length <= 8; ++length) {
    const Pack pack = docs({length}, 8 - length);
    Probe{pack, 2}.expect(causal_means(pack));
  }
}

TEST(CasesPlan, PL_03_every_real_row_is_written_whatever_the_tail) {
  for (int64_t length = 697; length <= 704; ++length) {
    Probe probe{docs({length}, 704 - length), 4};
    probe.shape = {DType::f32, 1, 1, 4, 4};
    probe.large = true;
    Numbers halves;
    for (int64_t i = 0; i < 704; ++i) halves.push_back(i < length ? static_cast<double>(i) / 2 : 0);
    probe.each([&](const Experiment& experiment, const Globals& in, const Outcome& outcome) {
      EXPECT_LE(distance(outcome.results.out, spread(probe.pack, halves, 1, 4)), 1e-6 * 704);
      const Results again = run(experiment, in).results;
      EXPECT_EQ(again.out, outcome.results.out);
      EXPECT_EQ(again.dv, outcome.results.dv);
    });
  }
  const Pack twin = docs({13}, 3);
  Probe{twin, 4}.each([&](const Experiment&, const Globals&, const Outcome& outcome) {
    EXPECT_NEAR(outcome.results.out[12 * 16], 6, 2e-5);
    EXPECT_NEAR(outcome.results.dv[12 * 16], 2 * 0.076923, 2e-5);
  });
}

TEST(CasesPlan, PL_04_ranks_of_nothing_but_padding_take_part) {
  Probe{docs({3}, 13), 4}.expect(numbers("0 .5 1 0 | 0 0 0 0 | 0 0 0 0 | 0 0 0 0"));
  Probe{docs({}, 8), 2}.expect(Numbers(8, 0), Numbers(8, 0));
}

TEST(CasesPlan, PL_09_padding_is_not_documents_and_documents_may_be_many) {
  const Pack padding = docs({100}, 70000);
  EXPECT_EQ(Planned(padding, 2).packing.documents().size(), 1u);
  const Pack single = docs(std::vector<int64_t>(70000, 1));
  Probe probe{single, 2};
  probe.large = true;
  probe.shape = {DType::f32, 1, 1, 8, 8};
  probe.each(
      [&](const Experiment&, const Globals& in, const Outcome& outcome) { EXPECT_EQ(outcome.results.out, in.v); });
}

TEST(CasesPlan, PL_11_every_sequence_of_a_batch_has_its_own_documents) {
  Pack pack{2, 8, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2}, {}};
  Probe{pack, 2, numbers("0 1 2 3 4 5 6 7 100 101 102 103 104 105 106 107")}.expect(
      numbers("0 .5 1 1.5 | 2 2.5 3 3.5   100 100.5 101 103 | 103.5 104 104.5 105"));
}

TEST(CasesPlan, PL_14_shards_of_one_row) {
  Probe{docs({4}), 4}.expect(numbers("0 | .5 | 1 | 1.5"));
  Probe{docs({2}, 2), 4}.expect(numbers("0 | .5 | 0 | 0"));
  Probe{docs({1}), 1}.expect({0});
  EXPECT_FALSE(admitted(docs({4}), 4, Path::halo));
  EXPECT_EQ(sent_matrix(docs({4}), 4),
            (std::vector<std::vector<int64_t>>{{0, 1, 1, 1}, {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 0, 0, 0}}));
}

TEST(CasesPlan, PL_16_padding_in_front) {
  Probe{Pack{1, 8, {0, 0, 0, 1, 1, 1, 1, 1}, {}}, 2}.expect(numbers("0 0 0 3 | 3.5 4 4.5 5"),
                                                            numbers("0 0 0 2.283333 | 1.283333 .783333 .45 .2"));
}

TEST(CasesPlan, PL_18_a_window_ends_at_its_document) {
  const Pack pack = docs({5, 11}, 0, windowed(4));
  Probe{pack, 4}.expect(numbers("0 .5 1 1.5 | 2.5 5 5.5 6 | 6.5 7.5 8.5 9.5 | 10.5 11.5 12.5 13.5"));
  EXPECT_EQ(rows_received(pack, 4, Path::halo), (std::vector<int64_t>{0, 3, 3, 3}));
}

TEST(CasesKernel, KN_01_queries_are_the_last_rows_of_their_document) {
  Probe{docs({6, 2}), 2}.expect(numbers("0 .5 1 1.5 | 2 2.5 6 6.5"));
}

TEST(CasesKernel, KN_02_ways_to_say_unbounded_give_the_same_bits) {
  std::vector<Results> first;  // by kernel and path
  for (const Mask& mask : {windowed(std::nullopt), windowed(-1), windowed(-1, 0, true), windowed(std::nullopt, 0, true),
                           windowed(8), windowed(80)}) {
    SCOPED_TRACE(text(mask));
    const Probe probe{docs({3, 5}, 0, mask), 2};
    probe.expect(numbers("0 .5 1 3 | 3.5 4 4.5 5"));
    std::mt19937 random(1);
    const Globals in = random_globals(probe.pack, probe.shape, random);
    size_t next = 0;
    probe.each([&](const Experiment& experiment, const Globals&, const Outcome&) {
      const Results results = run(experiment, in).results;
      if (next == first.size()) first.push_back(results);
      for (const auto& [name, tensor] : kTensors) EXPECT_EQ(results.*tensor, first[next].*tensor) << name;
      ++next;
    });
  }
}

TEST(CasesKernel, KN_03_a_window_counts_the_row_itself) {
  Probe{docs({12}, 0, windowed(4)), 3}.expect(numbers("0 .5 1 1.5 | 2.5 3.5 4.5 5.5 | 6.5 7.5 8.5 9.5"));
  Probe{docs({12}, 0, windowed(1)), 3}.expect(numbers("0 1 2 3 | 4 5 6 7 | 8 9 10 11"));
}

TEST(CasesKernel, KN_04_a_window_longer_than_a_shard) {
  const Pack pack = docs({16}, 0, windowed(6));
  Probe{pack, 4}.expect(numbers("0 .5 1 1.5 | 2 2.5 3.5 4.5 | 5.5 6.5 7.5 8.5 | 9.5 10.5 11.5 12.5"));
  EXPECT_FALSE(admitted(pack, 4, Path::halo));
  EXPECT_EQ(rows_received(pack, 4, Path::a2a), (std::vector<int64_t>{0, 4, 5, 5}));
}

TEST(CasesKernel, KN_05_a_window_longer_than_the_text_stays_causal) {
  for (int64_t w : {5, 8, 100}) Probe{docs({3, 5}, 0, windowed(w)), 2}.expect(numbers("0 .5 1 3 | 3.5 4 4.5 5"));
}

TEST(CasesKernel, KN_10_partial_results_merge_in_natural_logarithms) {
  const Pack pack = docs({64});
  Probe ring{pack, 8, {}, {}, {DType::f32, 4, 2, 16, 16}, {Path::ring}};
  ring.expect(causal_means(pack));
  ring.each([](const Experiment&, const Globals&, const Outcome& outcome) {
    EXPECT_NEAR(outcome.results.lse[63], 4.158883, 1e-6);
  });
  std::mt19937 random(std::random_device{}());
  const Globals in = random_globals(pack, ring.shape, random);
  ring.each([&](Experiment experiment, const Globals&, const Outcome&) {
    const Results hops = run(experiment, in).results;
    experiment.path = Path::allgather;
    const Results all = run(experiment, in).results;
    for (const auto& [name, tensor] : kTensors)
      EXPECT_LE(distance(hops.*tensor, all.*tensor), 1e-5 * std::max(1.0, largest(all.*tensor))) << name;
  });
}

TEST(CasesKernel, KN_11_hops_that_bring_nothing_visible) {
  const auto ring = [](const Pack& pack, int world) {
    return Probe{pack, world, {}, {}, {DType::f32, 4, 2, 16, 16}, {Path::ring}};
  };
  ring(docs({4, 4, 4, 4}), 4).expect(numbers("0 .5 1 1.5 | 4 4.5 5 5.5 | 8 8.5 9 9.5 | 12 12.5 13 13.5"));
  ring(docs({4}, 12), 4).expect(numbers("0 .5 1 1.5 | 0 0 0 0 | 0 0 0 0 | 0 0 0 0"));
  ring(docs({2, 9, 1}), 3).expect(numbers("0 .5 2 2.5 | 3 3.5 4 4.5 | 5 5.5 6 11"));
  for (const Pack& pack : {docs({4, 4, 4, 4}), docs({4}, 12)}) expect_oracle(ring(pack, 4));
}

TEST(CasesKernel, KN_13_the_scale_reaches_every_path) {
  const Probe probe{docs({7, 9}), 4, {}, {}, {DType::f32, 4, 2, 64, 64}};
  for (double scale : {1.0, 0.125, 0.05}) {
    SCOPED_TRACE(scale);
    expect_oracle(probe, scale);
  }
  std::mt19937 random(std::random_device{}());
  const Globals in = random_globals(probe.pack, probe.shape, random);
  probe.each([&](Experiment experiment, const Globals&, const Outcome&) {
    experiment.scale = 0.125;
    const Results eighth = run(experiment, in).results;
    experiment.scale = 1;
    EXPECT_GT(distance(run(experiment, in).results.out, eighth.out), 0.01);
  });
}

TEST(CasesKernel, KN_14_query_heads_read_their_own_kv_head) {
  const Pack pack = docs({3, 5});
  const Numbers probe_dv = numbers("1.833333 .833333 .333333 2.283333 | 1.283333 .783333 .45 .2");
  for (const auto& [q_heads, kv_heads] :
       std::vector<std::pair<int64_t, int64_t>>{{6, 2}, {8, 2}, {7, 1}, {5, 5}, {12, 3}}) {
    Probe probe{pack, 2};
    probe.shape = {DType::f32, q_heads, kv_heads, 16, 16};
    Globals in = probe.inputs();
    const size_t head = 8 * 16;
    for (size_t i = 0; i < in.v.size(); ++i) in.v[i] = static_cast<double>(i / head + 1);
    Numbers group_dv = probe_dv;
    for (double& value : group_dv) value *= static_cast<double>(probe.shape.group());
    probe.each([&](const Experiment& experiment, const Globals&, const Outcome&) {
      const Results r = run(experiment, in).results;
      for (size_t i = 0; i < r.out.size(); ++i)
        ASSERT_NEAR(r.out[i], static_cast<double>(i / head / static_cast<size_t>(probe.shape.group()) + 1), 1e-5);
      EXPECT_LE(distance(r.dv, spread(pack, group_dv, kv_heads, 16)), 2e-5);
    });
  }
}

TEST(CasesKernel, KN_15_spans_side_by_side_stay_apart) {
  Probe{docs({8}, 0, spans("0 1 1 1 | 2 2 2 0")), 2}.expect(
      numbers("0 1.5 1.5 1.5 | 3 3 3 3.5"),
      numbers("2.303571 1.303571 1.303571 1.303571 | .553571 .553571 .553571 .125"));
}

TEST(CasesKernel, KN_17_a_span_is_cut_at_a_documents_border) {
  Probe{docs({4, 4}, 0, spans("0 0 7 7 | 7 7 0 0")), 2}.expect(numbers("0 .5 1.5 1.5 | 4.5 4.5 5 5.5"));
}

TEST(CasesKernel, KN_18_how_a_window_cuts_a_span_is_a_rule) {
  const char* rows = "0 1 1 1 | 1 1 1 0";
  Probe{docs({8}, 0, spans(rows, 3, SpanWindow::left)), 2}.expect(numbers("0 3 3 3.5 | 4 4.5 5 6"));
  Probe{docs({8}, 0, spans(rows, 3, SpanWindow::both)), 2}.expect(numbers("0 1.5 2 3 | 4 4.5 5 6"));
  Probe{docs({8}, 0, spans(rows, 3, SpanWindow::none)), 2}.expect(numbers("0 3 3 3.5 | 3.5 3.5 3.5 6"));
  Probe{docs({8}, 0, windowed(3)), 2}.expect(numbers("0 .5 1 2 | 3 4 5 6"));
}

TEST(CasesKernel, KE_04_rows_after_the_last_document_have_zero_gradients) {
  const Pack pack = docs({144, 288, 512}, 80);
  Probe probe{pack, 4};
  probe.shape = {DType::f32, 1, 1, 8, 8};
  std::mt19937 random(std::random_device{}());
  const Globals in = random_globals(pack, probe.shape, random);
  const auto without_tail = [](Numbers values, size_t width) {
    values.resize(944 * width);
    return values;
  };
  Experiment unpadded{.pack = docs({144, 288, 512}), .world = 1, .shape = probe.shape};
  const Globals real{without_tail(in.q, 8), without_tail(in.k, 8), without_tail(in.v, 8), without_tail(in.dout, 8)};
  probe.each([&](const Experiment& experiment, const Globals&, const Outcome&) {
    unpadded.kernel = experiment.kernel;
    const Results alone = run(unpadded, real).results, results = run(experiment, in).results;
    probe.expect_padding_is_zero(results);
    for (const auto& [name, tensor] : kTensors)
      EXPECT_LE(distance(without_tail(results.*tensor, tensor == &Results::lse ? 1 : 8), alone.*tensor),
                4e-6 * std::max(1.0, largest(alone.*tensor)))
          << name;
  });
}

TEST(CasesKernel, KE_06_an_incoming_gradient_may_have_any_strides) {
  Probe probe{docs({3, 5}), 2};
  float one = 1;
  probe.each([&](const Experiment& experiment, const Globals& in, const Outcome& contiguous) {
    const Results broadcast = run(experiment, in, [&](Worker& worker) {
                                worker.tensors.dout = {&one, 0, 0, 0, 0};
                              }).results;
    for (const auto& [name, tensor] : kTensors) EXPECT_EQ(broadcast.*tensor, contiguous.results.*tensor) << name;
  });
}

TEST(CasesKernel, KE_08_the_layout_is_told_and_not_guessed) {
  Probe probe{docs({3, 5}), 2};  // on 2 ranks 4 rows of 4 heads: the two layouts have the same sizes
  probe.shape = {DType::f32, 4, 4, 8, 8};
  std::mt19937 random(std::random_device{}());
  const Globals in = random_globals(probe.pack, probe.shape, random);
  probe.each([&](Experiment experiment, const Globals&, const Outcome&) {
    const Results bhld = run(experiment, in).results;
    experiment.strides = Strides::blhd;
    const Results blhd = run(experiment, in).results;
    for (const auto& [name, tensor] : kTensors) EXPECT_EQ(bhld.*tensor, blhd.*tensor) << name;
  });
}

TEST(CasesKernel, KE_11_values_may_be_wider_or_narrower_than_keys) {
  for (const auto& [head_dim, value_dim] : {std::pair<int64_t, int64_t>{16, 32}, {32, 16}})
    expect_oracle({docs({6, 2, 5, 3}), 4, {}, {}, {DType::f32, 4, 2, head_dim, value_dim}});
}

TEST(CasesExchange, EX_02_the_first_exchange_of_a_group_may_concern_two_ranks) {
  const Pack pack = docs({4, 8, 4});
  Probe{pack, 4, {}, {}, {DType::f32, 4, 2, 16, 16}, {Path::halo}}.expect(
      numbers("0 .5 1 1.5 | 4 4.5 5 5.5 | 6 6.5 7 7.5 | 12 12.5 13 13.5"));
  EXPECT_EQ(rows_received(pack, 4, Path::halo), (std::vector<int64_t>{0, 0, 4, 0}));
}

TEST(CasesExchange, EX_03_ranks_that_send_and_receive_nothing) {
  const auto a2a = [](const Pack& pack) { return Probe{pack, 4, {}, {}, {DType::f32, 4, 2, 16, 16}, {Path::a2a}}; };
  a2a(docs({5}, 11)).expect(numbers("0 .5 1 1.5 | 2 0 0 0 | 0 0 0 0 | 0 0 0 0"));
  a2a(docs({4, 4, 4, 4})).expect(numbers("0 .5 1 1.5 | 4 4.5 5 5.5 | 8 8.5 9 9.5 | 12 12.5 13 13.5"));
  a2a(docs({}, 16)).expect(Numbers(16, 0));
  EXPECT_EQ(sent_matrix(docs({5}, 11), 4),
            (std::vector<std::vector<int64_t>>{{0, 4, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}}));
}

TEST(CasesExchange, EX_04_nothing_to_exchange) {
  const auto expect_silence = [](const Pack& pack, int world) {
    Probe{pack, world}.each([](const Experiment& experiment, const Globals&, const Outcome& outcome) {
      if (experiment.path == Path::allgather && experiment.world > 1) return;  // it moves everything by definition
      for (const RankBytes& bytes : outcome.bytes)
        EXPECT_EQ(bytes.forward_sent + bytes.forward_received + bytes.backward_sent + bytes.backward_received, 0);
    });
    Probe{pack, world}.expect(causal_means(pack));
  };
  expect_silence(docs({4, 4, 4, 4}), 4);
  expect_silence(docs({16}, 0, windowed(1)), 4);
  expect_silence(docs({5, 7}), 1);
}

// What every rank of `world` says to `wrong`, which it must refuse before it sends anything; afterwards the group
// completes an ordinary forward and backward of the experiment.
std::vector<std::string> refusals(const Experiment& experiment, const std::function<void(Worker&)>& wrong) {
  std::vector<std::string> messages(static_cast<size_t>(experiment.world));
  std::mt19937 random(1);
  const Globals in = random_globals(experiment.pack, experiment.shape, random);
  const Planned planned(experiment.pack, experiment.world);
  run_ranks(experiment.world, [&](Transport& transport) {
    Worker worker(experiment, planned, in, transport);
    messages[static_cast<size_t>(transport.rank())] = refusal([&] { wrong(worker); });
    EXPECT_EQ(transport.bytes_sent() + transport.bytes_received(), 0);
    worker.forward();
    worker.backward();
    EXPECT_GT(transport.bytes_sent() + transport.bytes_received(), 0);
  });
  return messages;
}

// The call of `worker` with another schedule and shape, in one direction.
void attend(Worker& worker, Phase phase, const Schedule& schedule, const AttentionShape& shape, int64_t rows) {
  const Call& own = worker.call;
  const Call call{.schedule = schedule,
                  .shape = shape,
                  .batch = own.batch,
                  .local_rows = rows,
                  .scale = own.scale,
                  .kernel = own.kernel,
                  .transport = own.transport,
                  .parallel = own.parallel,
                  .needs_grad = own.needs_grad};
  const BackwardTensors& t = worker.tensors;
  phase == Phase::forward ? forward(call, {t.q, t.k, t.v, t.out, t.lse}) : backward(call, t);
}

TEST(CasesExchange, EX_15_a_plan_for_a_group_of_another_size_sends_nothing) {
  const Planned two(docs({8}), 2);
  for (Path path : kPaths)
    for (Phase phase : {Phase::forward, Phase::backward})
      for (const std::string& message :
           refusals({.pack = docs({6, 10}), .world = 4, .path = Path::a2a}, [&](Worker& w) {
             attend(w, phase, build_schedule(two.problem, path, w.call.transport.rank() % 2), w.call.shape, 4);
           }))
        EXPECT_EQ(message,
                  "[engine] a plan must be used on the group it was made for, but this one is for rank 0 of 2, and the "
                  "group has this rank as 0 of 4. Plan with the group's size. (rank 0 of 4)");
}

TEST(CasesExchange, EX_16_more_than_two_ranks) {
  const Pack four = docs({6, 2, 5, 3});
  EXPECT_EQ(rows_received(four, 4, Path::halo), (std::vector<int64_t>{0, 4, 0, 4}));
  Probe{four, 4}.expect(numbers("0 .5 1 1.5 | 2 2.5 6 6.5 | 8 8.5 9 9.5 | 10 13 13.5 14"),
                        numbers("2.45 1.45 .95 .616667 | .366667 .166667 1.5 .5 | 2.283333 1.283333 .783333 .45 | .2 "
                                "1.833333 .833333 .333333"));
  EXPECT_EQ(rows_received(docs({10, 6}), 4, Path::a2a), (std::vector<int64_t>{0, 4, 8, 2}));
  EXPECT_FALSE(admitted(docs({10, 6}), 4, Path::halo));
  EXPECT_EQ(sent_matrix(docs({10, 6}), 4),
            (std::vector<std::vector<int64_t>>{{0, 4, 4, 0}, {0, 0, 4, 0}, {0, 0, 0, 2}, {0, 0, 0, 0}}));
  EXPECT_EQ(rows_received(docs({2, 9, 1}), 3, Path::a2a), (std::vector<int64_t>{0, 2, 6}));
  Probe{docs({2, 9, 1}), 3}.expect(
      numbers("0 .5 2 2.5 | 3 3.5 4 4.5 | 5 5.5 6 11"),
      numbers("1.5 .5 2.828968 1.828968 | 1.328968 .995635 .745635 .545635 | .378968 .236111 .111111 1"));
  for (int world : {1, 2, 3, 4, 5, 8}) {
    const Pack pack = docs({50, 3, 41, 26});
    Probe{pack, world}.expect(causal_means(pack));
  }
}

TEST(CasesBackward, BW_01_every_hop_has_its_own_keys) {
  Probe{docs({16}), 4}.expect(
      causal_means(docs({16})),
      numbers(
          "3.380729 2.380729 1.880729 1.547396 | 1.297396 1.097396 .930729 .787872 | .662872 .551761 .451761 .360852 "
          "| .277518 .200595 .129167 .0625"));
  expect_oracle({docs({16}), 4});
}

TEST(CasesBackward, BW_02_every_rank_has_the_right_gradients) {
  const AttentionShape shape{DType::f32, 6, 2, 16, 16};
  Probe{docs({3, 9, 4}), 4, {}, {}, shape}.expect(
      causal_means(docs({3, 9, 4})),
      numbers(
          "1.833333 .833333 .333333 2.828968 | 1.828968 1.328968 .995635 .745635 | .545635 .378968 .236111 .111111 | "
          "2.083333 1.083333 .583333 .25"));
  expect_oracle({docs({3, 9, 4}), 4, {}, {}, shape});
  expect_oracle({docs({2, 9, 1}), 3, {}, {}, shape});
}

TEST(CasesBackward, BW_03_every_ranks_share_is_added_once) {
  Probe probe{docs({8}), 2, {}, numbers("1 1 1 1 | 2 2 2 2")};
  probe.each([](Experiment experiment, const Globals& in, const Outcome& outcome) {
    EXPECT_NEAR(outcome.results.dv[0], 2 * 3.352381, 2e-5);
    experiment.strides = Strides::odd;
    EXPECT_EQ(run(experiment, in).results.dv, outcome.results.dv);
  });
}

TEST(CasesBackward, BW_04_no_factor_of_the_world) {
  const Pack pack = docs({5, 7}, 4);
  std::mt19937 random(std::random_device{}());
  Probe probe{pack, 1};
  const Globals in = random_globals(pack, probe.shape, random);
  for (int world : {1, 2, 4}) expect_oracle({pack, world});
  probe.each([&](Experiment experiment, const Globals&, const Outcome&) {
    const auto weight_gradient = [&](int world) {
      experiment.world = world;
      const Results r = run(experiment, in).results;
      return std::inner_product(r.dk.begin(), r.dk.end(), in.k.begin(), 0.0) +
             std::inner_product(r.dv.begin(), r.dv.end(), in.v.begin(), 0.0);
    };
    if (!admitted(pack, 2, experiment.path) || !admitted(pack, 4, experiment.path)) return;
    const double alone = weight_gradient(1);
    for (int world : {2, 4}) EXPECT_NEAR(weight_gradient(world), alone, 1e-4 * std::max(1.0, std::abs(alone)));
  });
}

TEST(CasesBackward, BW_05_every_option_given_and_left_out) {
  Mask windowed_spans = spans("0 0 1 1 | 0 2 2 2", 3);
  for (const Mask& mask : {Mask{}, windowed(3), windowed(2, 1, false), windowed_spans}) {
    SCOPED_TRACE(text(mask));
    Probe probe{docs({3, 5}, 0, mask), 2};
    probe.large = true;  // every kernel would say the same
    std::mt19937 random(1);
    const Globals in = random_globals(probe.pack, probe.shape, random);
    for (const double scale : {0.25, 0.7}) expect_oracle(probe, scale);
    probe.each([&](Experiment experiment, const Globals&, const Outcome&) {
      const Results plain = run(experiment, in).results;
      for (uint32_t needs_grad : {0, 1, 6, 7})
        for (bool agree : {false, true})
          for (Strides strides : {Strides::bhld, Strides::blhd, Strides::odd}) {
            experiment.strides = strides;
            const Results given = run(experiment, in, [&](Worker& worker) {
                                    worker.call.needs_grad = needs_grad;
                                    worker.call.agree = agree;
                                    worker.call.number = 5;
                                  }).results;
            for (const auto& [name, tensor] : kTensors) ASSERT_EQ(given.*tensor, plain.*tensor) << name;
          }
    });
  }
}

TEST(CasesBackward, BW_07_gradients_are_linear_in_dout) {
  Probe probe{docs({3, 5}), 2};
  std::mt19937 random(std::random_device{}());
  const Globals in = random_globals(probe.pack, probe.shape, random);
  Globals twice = in, second = in;
  for (double& value : twice.dout) value *= 2;
  for (size_t i = 0; i < second.dout.size(); ++i)
    if (i / 16 % 8 < 4) second.dout[i] = 0;  // rank 0's rows
  const Results from_second = dense<double>(probe.pack, probe.shape, 0.25, second);
  probe.each([&](const Experiment& experiment, const Globals&, const Outcome&) {
    const Results once = run(experiment, in).results, doubled = run(experiment, twice).results;
    for (auto tensor : {&Results::dq, &Results::dk, &Results::dv})
      for (size_t i = 0; i < (once.*tensor).size(); ++i) ASSERT_EQ((doubled.*tensor)[i], 2 * (once.*tensor)[i]);
    const Results half = run(experiment, second).results;
    for (size_t i = 0; i < half.dq.size(); ++i) ASSERT_TRUE(i / 16 % 8 >= 4 || half.dq[i] == 0);
    for (auto tensor : {&Results::dq, &Results::dk, &Results::dv})
      EXPECT_LE(distance(half.*tensor, from_second.*tensor), 1e-5);
  });
}

TEST(CasesBackward, BW_09_keys_values_and_queries_may_be_one_tensor) {
  Probe probe{docs({6, 2}), 2};
  probe.shape = {DType::f32, 2, 2, 16, 16};
  std::mt19937 random(std::random_device{}());
  Globals in = random_globals(probe.pack, probe.shape, random);
  in.v = in.k;
  probe.each([&](const Experiment& experiment, const Globals&, const Outcome&) {
    const Results clones = run(experiment, in).results;
    const Results shared = run(experiment, in, [](Worker& worker) { worker.tensors.v = worker.tensors.k; }).results;
    for (const auto& [name, tensor] : kTensors) EXPECT_EQ(shared.*tensor, clones.*tensor) << name;
  });
  in.q = in.k;
  probe.each([&](const Experiment& experiment, const Globals&, const Outcome&) {
    const Results clones = run(experiment, in).results;
    const Results one =
        run(experiment, in, [](Worker& worker) { worker.tensors.v = worker.tensors.q = worker.tensors.k; }).results;
    for (const auto& [name, tensor] : kTensors) EXPECT_EQ(one.*tensor, clones.*tensor) << name;
  });
}

TEST(CasesIntegration, IN_03_another_mask_on_one_rank_is_one_error_and_none_is_dropped) {
  const Experiment experiment{.pack = docs({6, 10}), .world = 4, .path = Path::a2a};
  const Planned stricter(docs({6, 10}, 0, windowed(2)), 4), own(experiment.pack, 4);
  for (Phase phase : {Phase::forward, Phase::backward})
    for (const std::string& message : refusals(experiment, [&](Worker& w) {
           const int rank = w.call.transport.rank();
           const Problem& problem = rank == 2 ? stricter.problem : own.problem;
           attend(w, phase, build_schedule(problem, Path::a2a, rank), w.call.shape, 4);
         }))
      EXPECT_THAT(message, testing::HasSubstr("use the same mask, but rank 2 differs from rank 0 (causal, window 2 vs "
                                              "causal)"));
  // The stricter mask on all ranks is the one that counts.
  Probe{docs({6, 10}, 0, windowed(2)), 4}.expect(
      numbers("0 .5 1.5 2.5 | 3.5 4.5 6 6.5 | 7.5 8.5 9.5 10.5 | 11.5 12.5 13.5 14.5"));
}

TEST(CasesValidation, VA_01_head_counts_that_do_not_divide_are_one_error_naming_both) {
  for (const auto& [q_heads, kv_heads] : std::vector<std::pair<int64_t, int64_t>>{{28, 8}, {4, 3}, {2, 4}, {4, 0}})
    for (int bad_rank : {0, 1, -1})  // -1: all
      for (const std::string& message : refusals({.pack = docs({3, 5}), .world = 2}, [&](Worker& w) {
             AttentionShape shape = w.call.shape;
             if (bad_rank == -1 || bad_rank == w.call.transport.rank())
               shape.q_heads = q_heads, shape.kv_heads = kv_heads;
             attend(w, Phase::forward, w.call.schedule, shape, 4);
           }))
        EXPECT_THAT(message, testing::HasSubstr(fmt::format("they are {} and {}.", kv_heads, q_heads)));
}

TEST(CasesMemory, PM_06_bytes_are_those_of_the_kv_heads) {
  const Pack pack = docs({6, 2, 6, 2, 6, 2});
  const auto bytes = [&](Path path, int64_t q_heads, int64_t kv_heads) {
    Experiment experiment{.pack = pack, .world = 4, .path = path, .shape = {DType::f32, q_heads, kv_heads, 16, 16}};
    std::mt19937 random(1);
    RankBytes sum;
    for (const RankBytes& rank : run(experiment, random_globals(pack, experiment.shape, random)).bytes) {
      sum.forward_sent += rank.forward_sent;
      sum.backward_sent += rank.backward_sent;
    }
    return std::pair(sum.forward_sent, sum.backward_sent);
  };
  for (Path path : admitted_paths(pack, 4)) {
    const auto grouped = bytes(path, 16, 2);
    EXPECT_EQ(grouped, bytes(path, 2, 2)) << name(path);
    const auto one = bytes(path, 16, 1);
    EXPECT_EQ(grouped, std::pair(2 * one.first, 2 * one.second)) << name(path);
    EXPECT_GT(one.first, 0) << name(path);
  }
}

}  // namespace
}  // namespace blockcp
