#include "blockcp/base/machine.h"

#include <fmt/format.h>

#include <fstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace blockcp {

namespace {

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

#if defined(__linux__) && defined(__aarch64__)
// The kernel knows numbers only; /proc/cpuinfo would, under an emulator, be that of the machine around it.
std::string model_name() {
  if ((getauxval(AT_HWCAP) & HWCAP_CPUID) == 0) return "unknown";
  uint64_t id;
  asm("mrs %0, MIDR_EL1" : "=r"(id));
  return fmt::format("ARM, implementer {:#04x}, part {:#05x}", id >> 24 & 0xff, id >> 4 & 0xfff);
}
#else
std::string model_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}
#endif

}  // namespace

Machine detect_machine() {
  Machine machine;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Every processor with AVX2 and FMA has the smaller sets that compilers and Highway tie to it, except F16C and BMI,
  // which are asked for too.
  machine.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                 __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  machine.avx512 = machine.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl");
  machine.avx512_bf16 = machine.avx512 && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
  machine.neon = true;
#endif
  machine.processors = processors();
  machine.cpu = model_name();
  return machine;
}

}  // namespace blockcp
