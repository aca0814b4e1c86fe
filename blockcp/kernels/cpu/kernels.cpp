#include "blockcp/kernels/cpu/kernels.h"

#include <fmt/format.h>

#include "blockcp/kernels/cpu/drivers.h"

namespace blockcp {

namespace {

using cpu::IsaTable;

template <const cpu::Isa<float>* IsaTable<float>::*kFloat, const cpu::Isa<double>* IsaTable<double>::*kDouble>
struct CpuKernel {
  static void forward(const ForwardArgs& args) {
    if (args.shape.dtype == DType::f64) return cpu::run_forward(args, *(cpu::isas(double{}).*kDouble));
    cpu::run_forward(args, *(cpu::isas(float{}).*kFloat));
  }
  static void backward(const BackwardArgs& args) {
    if (args.shape.dtype == DType::f64) return cpu::run_backward(args, *(cpu::isas(double{}).*kDouble));
    cpu::run_backward(args, *(cpu::isas(float{}).*kFloat));
  }
  static bool built() { return cpu::isas(float{}).*kFloat != nullptr; }
};

using Avx512 = CpuKernel<&IsaTable<float>::avx512, &IsaTable<double>::avx512>;
using Avx2 = CpuKernel<&IsaTable<float>::avx2, &IsaTable<double>::avx2>;
using Baseline = CpuKernel<&IsaTable<float>::baseline, &IsaTable<double>::baseline>;

struct Avx512Bf16 {
  static void forward(const ForwardArgs& args) { cpu::run_forward(args, *cpu::avx512_bf16()); }
  static void backward(const BackwardArgs& args) { cpu::run_backward(args, *cpu::avx512_bf16()); }
};

std::string why_not_avx512_bf16(const AttentionShape& shape, const Machine& machine) {
  if (shape.dtype != DType::bf16) return fmt::format("it multiplies bf16, and this is {}", name(shape.dtype));
  if (cpu::avx512_bf16() == nullptr) return "this build has no AVX-512 code";
  return machine.avx512_bf16 ? "" : "the processor has no AVX-512 with dot products of bf16";
}

std::string why_not_avx512(const AttentionShape&, const Machine& machine) {
  if (!Avx512::built()) return "this build has no AVX-512 code";
  return machine.avx512 ? "" : "the processor has no AVX-512 (F, BW, CD, DQ, VL)";
}

std::string why_not_avx2(const AttentionShape&, const Machine& machine) {
  if (!Avx2::built()) return "this build has no AVX2 code";
  return machine.avx2 ? "" : "the processor has no AVX2 with FMA";
}

#if defined(__aarch64__)
constexpr const char* kBaseline = "cpu_neon";
#else
constexpr const char* kBaseline = "cpu_baseline";
#endif

std::string why_not_baseline(const AttentionShape&, const Machine&) { return ""; }

}  // namespace

std::vector<Kernel> cpu_kernels() {
  return {{"cpu_avx512_bf16", why_not_avx512_bf16, Avx512Bf16::forward, Avx512Bf16::backward},
          {"cpu_avx512", why_not_avx512, Avx512::forward, Avx512::backward},
          {"cpu_avx2", why_not_avx2, Avx2::forward, Avx2::backward},
          {kBaseline, why_not_baseline, Baseline::forward, Baseline::backward}};
}

}  // namespace blockcp
