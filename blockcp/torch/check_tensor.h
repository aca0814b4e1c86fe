// Between torch's tensors and errors and the library's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <exception>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "blockcp/base/dtype.h"
#include "blockcp/base/error.h"
#include "blockcp/engine/engine.h"

namespace blockcp {

// "[2, 4, 8]"
std::string text(at::IntArrayRef sizes);

// Throws Error(argument) unless the type is one of fp32, fp64, bf16 and fp16.
DType dtype_of(const at::Tensor& tensor, std::string_view what);
at::ScalarType scalar_type(DType type);

// Strides and pointer of a 4-D (or, for lse, 3-D) CPU tensor.
Tensor view_of(const at::Tensor& tensor);

// Integers of any width, or bool, as a contiguous int64 CPU tensor: at most one copy from a device. Throws
// Error(argument) for other element types, naming the first value.
at::Tensor integers(const at::Tensor& tensor, std::string_view what);
std::span<const int64_t> span_of(const at::Tensor& integers);

// The geometry that q, k and v agree on. Throws Error(argument), naming the numbers, unless
// q is [B, Hq, L, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv], of one element type, on the CPU, and Hkv divides Hq.
AttentionShape check_qkv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
// The same for q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv].
AttentionShape check_packed_qkv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// What backward is given beside q, k and v must be what forward returned, and a gradient of it: throws Error(argument).
void check_saved(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& dout, at::IntArrayRef of_out,
                 at::IntArrayRef of_lse, DType type);

// What scores are multiplied with: D ** -0.5 if nothing is given. Throws Error(argument) unless it is a number in the
// type of the sums.
double checked_scale(std::optional<double> scale, const AttentionShape& shape);

// For Meta kernels, which the dispatcher calls where any tensor is on meta: where some are not, the CPU kernel's checks
// say what is wrong, to all ranks.
bool all_meta(std::initializer_list<at::Tensor> tensors);

// An error that this rank found in its own call, as the others are told: one line.
struct Trouble {
  std::string text;
  bool is_argument = true;
};
Trouble trouble_of(const std::exception_ptr& error);

// What is wrong, if anything: a tensor that forward-mode differentiation has given a tangent, which we would drop.
std::string tangent_trouble(std::initializer_list<std::pair<const char*, at::Tensor>> tensors);

// Runs body and turns the library's errors into torch's: ValueError for arguments, RuntimeError for faults.
template <class Body>
auto translated(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(error.kind() != ErrorKind::argument, error.what());
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace blockcp
