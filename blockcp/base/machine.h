// What this processor can do, asked once and handed in.
#pragma once

#include <string>

namespace blockcp {

struct Machine {
  bool avx2 = false;         // AVX2 and FMA
  bool avx512 = false;       // F, BW, DQ, VL
  bool avx512_bf16 = false;  // bf16 dot products
  bool neon = false;         // belongs to every 64-bit ARM processor
  int processors = 1;        // that this process may run on
  std::string cpu;           // model name, for people
};

Machine detect_machine();

}  // namespace blockcp
