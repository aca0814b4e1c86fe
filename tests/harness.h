// Runs global tensors through the whole pipeline: packed, cut over ranks that are threads, forward and backward, and
// put together again.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "blockcp/base/machine.h"
#include "blockcp/engine/engine.h"
#include "blockcp/kernels/element.h"
#include "blockcp/kernels/select.h"
#include "blockcp/schedule/cost.h"
#include "blockcp/schedule/fill.h"
#include "blockcp/transport/threads/threads.h"
#include "tests/oracle.h"

namespace blockcp {

// How a tensor [batch, heads, rows, width] lies in memory.
enum class Strides { bhld, blhd, odd };  // odd: rows from last to first, a gap after every element and every row

class LocalTensor {
 public:
  LocalTensor(DType type, int64_t batch, int64_t heads, int64_t rows, int64_t width, Strides strides)
      : type_(type), extent_{batch, heads, rows, width} {
    if (strides == Strides::bhld) tensor_ = {nullptr, heads * rows * width, rows * width, width, 1};
    if (strides == Strides::blhd) tensor_ = {nullptr, heads * rows * width, width, heads * width, 1};
    const int64_t row = 2 * width + 3;
    if (strides == Strides::odd) tensor_ = {nullptr, heads * rows * row, rows * row, -row, 2};
    const int64_t elements = batch * heads * rows * (strides == Strides::odd ? row : width);
    // All bits set is NaN in every type: what is not written shows, and so does what must not be read.
    bytes_.assign(static_cast<size_t>(elements * size_of(type)), std::byte{0xff});
    tensor_.data = bytes_.data() + (strides == Strides::odd ? (rows - 1) * row * size_of(type) : 0);
    if (elements == 0) tensor_.data = bytes_.data();
  }
  LocalTensor(const LocalTensor&) = delete;
  LocalTensor& operator=(const LocalTensor&) = delete;

  const Tensor& tensor() const { return tensor_; }

  // Rows [first, first + rows) of a global tensor of `all` rows, in and out.
  void read(const std::vector<double>& global, int64_t first, int64_t all) {
    each(first, all, [&](size_t from, int64_t to) { store(type_, tensor_.data, to, global[from]); });
  }
  void write(std::vector<double>& global, int64_t first, int64_t all) const {
    each(first, all, [&](size_t to, int64_t from) { global[to] = load(type_, tensor_.data, from); });
  }

 private:
  void each(int64_t first, int64_t all, const std::function<void(size_t global, int64_t local)>& visit) const {
    const auto [batch, heads, rows, width] = extent_;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < width; ++c)
            visit(static_cast<size_t>(((b * heads + h) * all + first + r) * width + c),
                  b * tensor_.batch_stride + h * tensor_.head_stride + r * tensor_.row_stride + c * tensor_.col_stride);
  }

  struct Sizes {
    int64_t batch, heads, rows, width;
  };
  DType type_;
  Sizes extent_;
  Tensor tensor_;
  std::vector<std::byte> bytes_;
};

struct Experiment {
  Pack pack;
  int world = 1;
  Path path = Path::allgather;
  AttentionShape shape{DType::f32, 4, 2, 16, 16};
  double scale = 0.25;
  const Kernel* kernel = &all_kernels().back();  // the reference
  int threads = 1;
  Strides strides = Strides::bhld;
};

// Packing, layout and bands of a experiment; they refer to each other, so it stays where it is.
struct Planned {
  explicit Planned(const Pack& pack, int world)
      : packing(Packing::from_ids(pack.ids, pack.batch, pack.rows)),
        layout(Layout::contiguous(pack.batch, pack.rows, world)),
        bands(packing, pack.mask),
        problem{packing,
                layout,
                bands,
                {.documents = packing.fingerprint(), .layout = layout.fingerprint(), .mask = text(pack.mask)}} {}
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;

  Packing packing;
  Layout layout;
  Bands bands;
  Problem problem;
};

inline bool admitted(const Pack& pack, int world, Path path) {
  const Planned planned(pack, world);
  return why_not(path, planned.problem).empty();
}

inline std::vector<Path> admitted_paths(const Pack& pack, int world) {
  std::vector<Path> paths;
  for (Path path : kPaths)
    if (admitted(pack, world, path)) paths.push_back(path);
  return paths;
}

// Kernels that run this shape on this machine, the reference last.
inline std::vector<const Kernel*> kernels_for(const AttentionShape& shape) {
  const Machine machine = detect_machine();
  std::vector<const Kernel*> kernels;
  for (const Kernel& kernel : all_kernels())
    if (kernel.why_not(shape, machine).empty()) kernels.push_back(&kernel);
  return kernels;
}

struct RankBytes {
  int64_t forward_sent = 0, forward_received = 0, backward_sent = 0, backward_received = 0;
};

// One rank's tensors, and its calls.
class Worker {
 public:
  Worker(const Experiment& experiment, const Planned& planned, const Globals& in, Transport& transport)
      : experiment_(experiment),
        rank_(transport.rank()),
        local_(planned.layout.local_rows()),
        schedule_(build_schedule(planned.problem, experiment.path, rank_)),
        parallel_(experiment.threads == 1 ? make_serial() : make_pool(experiment.threads)),
        call{.schedule = schedule_,
             .shape = experiment.shape,
             .batch = experiment.pack.batch,
             .local_rows = local_,
             .scale = experiment.scale,
             .kernel = *experiment.kernel,
             .transport = transport,
             .parallel = *parallel_,
             .needs_grad = 7},
        q_(make(experiment.shape.q_heads, experiment.shape.head_dim)),
        k_(make(experiment.shape.kv_heads, experiment.shape.head_dim)),
        v_(make(experiment.shape.kv_heads, experiment.shape.value_dim)),
        out_(make(experiment.shape.q_heads, experiment.shape.value_dim)),
        lse_(accumulator(experiment.shape.dtype), experiment.pack.batch, experiment.shape.q_heads, local_, 1,
             Strides::bhld),
        dout_(make(experiment.shape.q_heads, experiment.shape.value_dim)),
        dq_(make(experiment.shape.q_heads, experiment.shape.head_dim)),
        dk_(make(experiment.shape.kv_heads, experiment.shape.head_dim)),
        dv_(make(experiment.shape.kv_heads, experiment.shape.value_dim)) {
    q_.read(in.q, first(), rows());
    k_.read(in.k, first(), rows());
    v_.read(in.v, first(), rows());
    dout_.read(in.dout, first(), rows());
    tensors = {q_.tensor(),    k_.tensor(),  v_.tensor(),  out_.tensor(), lse_.tensor(),
               dout_.tensor(), dq_.tensor(), dk_.tensor(), dv_.tensor()};
  }

  void forward() { blockcp::forward(call, {tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse}); }
  void backward() { blockcp::backward(call, tensors); }
  void write(Results& results) const {
    out_.write(results.out, first(), rows());
    lse_.write(results.lse, first(), rows());
    dq_.write(results.dq, first(), rows());
    dk_.write(results.dk, first(), rows());
    dv_.write(results.dv, first(), rows());
  }

 private:
  LocalTensor make(int64_t heads, int64_t width) const {
    return {experiment_.shape.dtype, experiment_.pack.batch, heads, local_, width, experiment_.strides};
  }
  int64_t first() const { return rank_ * local_; }
  int64_t rows() const { return experiment_.pack.rows; }

  const Experiment& experiment_;
  const int rank_;
  const int64_t local_;
  const Schedule schedule_;
  const std::unique_ptr<Parallel> parallel_;

 public:
  Call call;
  BackwardTensors tensors;  // those of both calls; a test may put others in

 private:
  LocalTensor q_, k_, v_, out_, lse_, dout_, dq_, dk_, dv_;
};

struct Outcome {
  Results results;
  std::vector<RankBytes> bytes;
};

inline Outcome run(
    const Experiment& experiment, const Globals& in, const std::function<void(Worker&)>& change = [](Worker&) {}) {
  const Planned planned(experiment.pack, experiment.world);
  const auto size = [&](int64_t heads, int64_t width) {
    return static_cast<size_t>(experiment.pack.batch * heads * experiment.pack.rows * width);
  };
  const AttentionShape& shape = experiment.shape;
  Outcome result;
  result.results.out.resize(size(shape.q_heads, shape.value_dim));
  result.results.lse.resize(size(shape.q_heads, 1));
  result.results.dq.resize(size(shape.q_heads, shape.head_dim));
  result.results.dk.resize(size(shape.kv_heads, shape.head_dim));
  result.results.dv.resize(size(shape.kv_heads, shape.value_dim));
  result.bytes.resize(static_cast<size_t>(experiment.world));
  run_ranks(experiment.world, [&](Transport& transport) {
    Worker worker(experiment, planned, in, transport);
    change(worker);
    RankBytes& bytes = result.bytes[static_cast<size_t>(transport.rank())];
    worker.forward();
    bytes.forward_sent = transport.bytes_sent();
    bytes.forward_received = transport.bytes_received();
    worker.backward();
    bytes.backward_sent = transport.bytes_sent() - bytes.forward_sent;
    bytes.backward_received = transport.bytes_received() - bytes.forward_received;
    worker.write(result.results);
  });
  return result;
}

// Random values as `type` can hold them.
inline Globals random_globals(const Pack& pack, const AttentionShape& shape, std::mt19937& random) {
  std::normal_distribution<double> normal;
  const auto fill = [&](int64_t heads, int64_t width) {
    std::vector<double> values(static_cast<size_t>(pack.batch * heads * pack.rows * width));
    for (double& value : values) {
      double stored = 0;
      store(shape.dtype, &stored, 0, normal(random));
      value = load(shape.dtype, &stored, 0);
    }
    return values;
  };
  return {fill(shape.q_heads, shape.head_dim), fill(shape.kv_heads, shape.head_dim),
          fill(shape.kv_heads, shape.value_dim), fill(shape.q_heads, shape.value_dim)};
}

// A tensor of Results by name.
struct NamedTensor {
  const char* name;
  std::vector<double> Results::*values;
};
inline constexpr NamedTensor kTensors[] = {
    {"out", &Results::out}, {"lse", &Results::lse}, {"dq", &Results::dq}, {"dk", &Results::dk}, {"dv", &Results::dv}};

// Largest difference; infinite where one is NaN or only one is infinite.
inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    const double difference = std::abs(a[i] - b[i]);
    most = difference < std::numeric_limits<double>::infinity() ? std::max(most, difference)
                                                                : std::numeric_limits<double>::infinity();
    if (std::isinf(most)) return most;
  }
  return most;
}

inline double largest(const std::vector<double>& values) {
  double most = 0;
  for (double value : values)
    if (std::isfinite(value)) most = std::max(most, std::abs(value));
  return most;
}

// How far each of kTensors may be from the fp64 oracle, u being the rounding unit of the sums:
// - twice the error of a dense fp32 computation, which sums as many terms of the same size in another order;
// - u times the largest size of terms times a number of roundings, which is the sum of
//   - 16, for exp, quotients and the sums over keys, columns, blocks and ranks;
//   - (2 W + 2) A, where A is the largest |lse|. Rounding a score or an lse of size A changes it by up to u A, and a
//     weight by that much relatively (a score far below the lse may be larger, but exp(s - lse) |s| < |lse| + 1). Each
//     of at most W hops of ring rounds its own lse and the merged one; backward takes a score and an lse once more;
//   - sqrt(D) T, where T is the largest sum of sizes of a score's D terms: it bounds the partial sums, whose D
//   roundings
//     add up like their root. A dense computation of few scores may be lucky with all of them;
// - for 16-bit inputs, the storage type's unit times the size of terms, once for each number that is rounded to it: P
//   as an operand and the result in out and dv; out, P in it and dS as an operand and the result in dq and dk.
//   2^-14 is the least normal number of fp16.
// fp64: 1e-12 of the size, 9000 roundings.
inline std::vector<double> allowed_errors(const Experiment& experiment, const Globals& in, const Results& truth) {
  constexpr int kStored[] = {2, 0, 4, 4, 2};
  const DType dtype = experiment.shape.dtype;
  const Dense<double> terms(experiment.pack, experiment.shape, experiment.scale, in);
  const Results fp32 = dense<float>(experiment.pack, experiment.shape, experiment.scale, in);
  const double roundings = 16 + (2 * experiment.world + 2) * largest(truth.lse) +
                           std::sqrt(static_cast<double>(experiment.shape.head_dim)) * terms.size_of_scores;
  const double unit = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0;
  std::vector<double> allowed;
  for (size_t i = 0; i < std::size(kTensors); ++i) {
    const auto tensor = kTensors[i].values;
    const double size = largest(terms.sizes.*tensor), other = distance(fp32.*tensor, truth.*tensor);
    allowed.push_back(dtype == DType::f64
                          ? 1e-12 * size
                          : 2 * other + roundings * 0x1p-24 * size + kStored[i] * unit * (size + 0x1p-14));
  }
  return allowed;
}

inline std::string describe(const Experiment& experiment) {
  std::string text = fmt::format(
      "W {} path {} kernel {} threads {} strides {} {} heads {}/{} dims {}/{} B {} S {} causal {} "
      "window ({}, {}) spans {} rule {} ids",
      experiment.world, name(experiment.path), experiment.kernel->name, experiment.threads,
      static_cast<int>(experiment.strides), name(experiment.shape.dtype), experiment.shape.q_heads,
      experiment.shape.kv_heads, experiment.shape.head_dim, experiment.shape.value_dim, experiment.pack.batch,
      experiment.pack.rows, experiment.pack.mask.causal, experiment.pack.mask.left.value_or(-1),
      experiment.pack.mask.right.value_or(-1), !experiment.pack.mask.spans.empty(),
      static_cast<int>(experiment.pack.mask.span_window));
  for (size_t i = 0; i < std::min<size_t>(experiment.pack.ids.size(), 64); ++i)
    text += fmt::format(" {}", experiment.pack.ids[i]);
  return text;
}

}  // namespace blockcp
