#include "blockcp/base/dtype.h"

#include "blockcp/base/error.h"

namespace blockcp {

DType parse_dtype(std::string_view text) {
  for (DType type : {DType::f32, DType::f64, DType::bf16, DType::f16})
    if (text == name(type)) return type;
  fail_argument("[dtype] an element type must be fp32, fp64, bf16 or fp16, but was \"{}\". Name one of the four.",
                text);
}

}  // namespace blockcp
