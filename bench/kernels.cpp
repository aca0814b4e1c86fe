// Speed of the attention kernels on packed causal documents, as useful GFLOP/s and as a share of the FMA peak that is
// measured in the same process on as many threads.
//
// Useful work is 4 Hq D per visible pair forward and 10 backward (2 and 5 products); masked work does not count.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <fstream>
#include <iostream>
#include <random>
#include <vector>

#include "blockcp/base/error.h"
#include "blockcp/base/memory.h"
#include "blockcp/base/peak.h"
#include "blockcp/kernels/element.h"
#include "blockcp/kernels/select.h"

namespace blockcp::bench {
namespace {

struct Options {
  std::string packing = "long", kernel, dtype = "fp32", pass = "both";
  int64_t rows = 16384, q_heads = 8, kv_heads = 2, width = 128, window = 0;
  int threads = 0, repeats = 5;
  bool processor_time = false;
};

constexpr int64_t kBytesPerRow = 4;  // in files of lengths, see bench/lengths/README.md

bool is_integer(const std::string& text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::vector<int64_t> documents(const Options& options) {
  const int64_t rows = options.rows;
  std::vector<int64_t> lengths;
  if (options.packing == "one") return {rows};
  int64_t left = rows;
  const auto take = [&](int64_t n) {
    check_argument(n > 0, "[bench] a document must have rows, but one of packing {} has {}.", options.packing, n);
    lengths.push_back(std::min(n, left));
    left -= lengths.back();
  };
  if (options.packing == "long") {
    while (left > 0) take(8192);
  } else if (int64_t n = 0; is_integer(options.packing, n)) {
    while (left > 0) take(n);
  } else {
    std::ifstream file(options.packing);
    check_argument(file.good(),
                   "[bench] a packing must be long, one, a length or a file of lengths, but {} cannot be read.",
                   options.packing);
    for (int64_t bytes; left > 0 && file >> bytes;) take(divide_up(bytes, kBytesPerRow));
    check_argument(!lengths.empty(), "[bench] {} must begin with a length.", options.packing);
  }
  return lengths;
}

// A tensor [heads, rows, width] of normally distributed numbers.
class Tensor {
 public:
  Tensor(DType type, int64_t rows, int64_t heads, int64_t width, bool random)
      : type_(type),
        view_{nullptr, width, rows * width, 1},
        bytes_(static_cast<size_t>(rows * heads * width * size_of(type))) {
    view_.data = bytes_.data();
    static std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; random && i < rows * heads * width; ++i) store(type, bytes_.data(), i, normal(generator));
  }
  Rows from(int64_t row) const {
    Rows rows = view_;
    rows.data = static_cast<char*>(rows.data) + row * rows.row * size_of(type_);
    return rows;
  }

 private:
  DType type_;
  Rows view_;
  mutable std::vector<char> bytes_;
};

struct Problem {
  AttentionShape shape;
  Band band;
  Tensor q, k, v, out, dout, lse, delta, dq, dk, dv;
  std::vector<AttentionBlock> blocks;
  double pairs = 0;

  explicit Problem(const Options& o)
      : shape{parse_dtype(o.dtype), o.q_heads, o.kv_heads, o.width, o.width},
        q(shape.dtype, o.rows, o.q_heads, o.width, true),
        k(shape.dtype, o.rows, o.kv_heads, o.width, true),
        v(shape.dtype, o.rows, o.kv_heads, o.width, true),
        out(shape.dtype, o.rows, o.q_heads, o.width, false),
        dout(shape.dtype, o.rows, o.q_heads, o.width, true),
        lse(accumulator(shape.dtype), o.rows, o.q_heads, 1, false),
        delta(accumulator(shape.dtype), o.rows, o.q_heads, 1, false),
        dq(accumulator(shape.dtype), o.rows, o.q_heads, o.width, false),
        dk(accumulator(shape.dtype), o.rows, o.kv_heads, o.width, false),
        dv(accumulator(shape.dtype), o.rows, o.kv_heads, o.width, false) {
    if (o.window > 0) band.left = o.window - 1;
    int64_t row = 0;
    for (const int64_t n : documents(o)) {
      AttentionBlock b;
      b.q_count = n;
      b.keys = {{n, k.from(row), v.from(row), dk.from(row), dv.from(row)}};
      b.band = &band;
      b.q = q.from(row);
      b.out = out.from(row);
      b.lse = lse.from(row);
      b.dout = dout.from(row);
      b.delta = delta.from(row);
      b.dq = dq.from(row);
      blocks.push_back(b);
      row += n;
      for (int64_t i = 0; i < n; ++i)
        pairs += static_cast<double>(std::min(i + 1, band.left == Band::kUnbounded ? i + 1 : band.left + 1));
    }
  }
};

template <class F>
double median_seconds(const Clock& clock, int repeats, F f) {
  std::vector<double> times;
  f();
  for (int i = 0; i < repeats; ++i) {
    const double begin = clock();
    f();
    times.push_back(clock() - begin);
  }
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<size_t>(repeats / 2)];
}

Fma peak_of(std::string_view kernel, DType type) {
  if (kernel == "cpu_avx512") return type == DType::f64 ? Fma::fp64_avx512 : Fma::fp32_avx512;
  if (kernel == "cpu_avx512_bf16") return Fma::bf16_avx512;
  if (kernel == "cpu_avx2") return type == DType::f64 ? Fma::fp64_avx2 : Fma::fp32_avx2;
  if (kernel == "cpu_neon") return type == DType::f64 ? Fma::fp64_neon : Fma::fp32_neon;
  return Fma::scalar;
}

void measure(const Options& options) {
  check_argument(options.q_heads % options.kv_heads == 0, "[bench] {} query heads cannot share {} KV heads.",
                 options.q_heads, options.kv_heads);
  Problem problem(options);
  const Machine machine = detect_machine();
  const Kernel& kernel = select_kernel(problem.shape, machine, options.kernel);
  const std::unique_ptr<Parallel> parallel = make_pool(options.threads);

  const ForwardArgs forward{problem.shape, 0.088, problem.blocks, false, parallel.get()};
  const BackwardArgs backward{problem.shape, 0.088, problem.blocks, parallel.get()};
  const Clock clock(options.processor_time ? parallel->threads() : 0);
  const double peak = fma_peak(*parallel, peak_of(kernel.name, problem.shape.dtype), clock);
  const double pair_flops = problem.pairs * static_cast<double>(options.q_heads * options.width) * 1e-9;
  const auto speed = [&](double products, auto f) {
    return 2 * products * pair_flops / median_seconds(clock, options.repeats, f);
  };
  fmt::print("{:<16} {:<12} {} D {:<3} {}/{} threads {}  peak {:6.1f} GFLOP/s",
             options.packing.substr(options.packing.rfind('/') + 1), kernel.name, options.dtype, options.width,
             options.q_heads, options.kv_heads, parallel->threads(), peak);
  if (options.pass != "backward") {
    const double forward_speed = speed(2, [&] { kernel.forward(forward); });
    fmt::print("  forward {:6.1f} ({:.2f})", forward_speed, forward_speed / peak);
  } else {
    kernel.forward(forward);
  }
  compute_delta(problem.shape, problem.blocks, *parallel);
  if (options.pass != "forward") {
    const double backward_speed = speed(5, [&] { kernel.backward(backward); });
    fmt::print("  backward {:6.1f} ({:.2f})", backward_speed, backward_speed / peak);
  }
  fmt::print("\n");
}

}  // namespace
}  // namespace blockcp::bench

int main(int argc, char** argv) {
  blockcp::bench::Options options;
  const CLI::Range positive(int64_t{1}, int64_t{1} << 30), not_negative(int64_t{0}, int64_t{1} << 30);
  CLI::App app{"Speed of the attention kernels as a share of the FMA peak"};
  app.add_option(
      "--packing", options.packing,
      "long (documents of 8192 rows), one, a length in rows, or a file of lengths in bytes, of which 4 make a row");
  app.add_option("--kernel", options.kernel, "name of a kernel; without it the best");
  app.add_option("--pass", options.pass, "forward, backward or both")
      ->check(CLI::IsMember({"forward", "backward", "both"}));
  app.add_option("--dtype", options.dtype, "fp32, fp64, bf16 or fp16");
  app.add_option("--rows", options.rows, "rows in all")->check(positive);
  app.add_option("--q-heads", options.q_heads)->check(positive);
  app.add_option("--kv-heads", options.kv_heads)->check(positive);
  app.add_option("--width", options.width, "head_dim and value_dim")->check(positive);
  app.add_option("--window", options.window, "keys that a row sees, itself included; 0 is all")->check(not_negative);
  app.add_option("--threads", options.threads, "0 is one per processor")->check(not_negative);
  app.add_option("--repeats", options.repeats, "runs of which the median counts")->check(positive);
  app.add_flag("--processor-time", options.processor_time, "time of the processors, not of the wall");
  CLI11_PARSE(app, argc, argv);
  try {
    blockcp::bench::measure(options);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
