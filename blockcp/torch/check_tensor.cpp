#include "blockcp/torch/check_tensor.h"

#include <c10/core/ScalarType.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace blockcp {
namespace {

std::string type_name(const at::Tensor& tensor) { return c10::toString(tensor.scalar_type()); }

void check_dense(const at::Tensor& tensor, std::string_view what, int64_t dimensions, std::string_view layout) {
  check_argument(tensor.dim() == dimensions, "[torch] {} must have {}, but its shape is {}.", what, layout,
                 text(tensor.sizes()));
  check_argument(tensor.is_cpu(), "[torch] {} must be on the CPU in this build, but it is on {}.", what,
                 tensor.device().str());
}

// Element type, heads and widths of [B, H, L, D] or [T, H, D].
AttentionShape check_shape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_argument(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
                 "[torch] q, k and v must have one element type, but they are {}, {} and {}.", type_name(q),
                 type_name(k), type_name(v));
  check_argument(k.size(1) == v.size(1), "[torch] k and v must have the same heads, but k has {} and v has {}.",
                 k.size(1), v.size(1));
  check_argument(k.size(1) > 0 && q.size(1) > 0 && q.size(1) % k.size(1) == 0,
                 "[torch] the KV heads must divide the query heads, but q has {} heads and k has {}.", q.size(1),
                 k.size(1));
  check_argument(q.size(-1) == k.size(-1) && q.size(-1) > 0 && v.size(-1) > 0,
                 "[torch] q and k must have one width of at least 1, and v at least 1, but they are {}, {} and {}.",
                 q.size(-1), k.size(-1), v.size(-1));
  return {.dtype = dtype_of(q, "q"),
          .q_heads = q.size(1),
          .kv_heads = k.size(1),
          .head_dim = q.size(-1),
          .value_dim = v.size(-1)};
}

}  // namespace

std::string text(at::IntArrayRef sizes) { return fmt::format("[{}]", fmt::join(sizes.begin(), sizes.end(), ", ")); }

DType dtype_of(const at::Tensor& tensor, std::string_view what) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kDouble:
      return DType::f64;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      break;
  }
  fail_argument("[torch] {} must be fp32, fp64, bf16 or fp16, but it is {}.", what, type_name(tensor));
}

at::ScalarType scalar_type(DType type) {
  constexpr at::ScalarType types[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  return types[static_cast<int>(type)];
}

Tensor view_of(const at::Tensor& tensor) {
  return {.data = tensor.data_ptr(),
          .batch_stride = tensor.stride(0),
          .head_stride = tensor.stride(1),
          .row_stride = tensor.stride(2),
          .col_stride = tensor.dim() == 4 ? tensor.stride(3) : 1};
}

at::Tensor integers(const at::Tensor& tensor, std::string_view what) {
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    const std::string seen = tensor.numel() == 0
                                 ? "no values"
                                 : fmt::format("first value {}", tensor.flatten()[0].to(at::kDouble).item<double>());
    // An empty Python list becomes an empty float tensor.
    check_argument(tensor.numel() == 0, "[plan] {} must be integers, but they are {} ({}). Convert them first.", what,
                   type_name(tensor), seen);
  }
  return tensor.to(tensor.options().device(at::kCPU).dtype(at::kLong)).contiguous();
}

std::span<const int64_t> span_of(const at::Tensor& integers) {
  return {integers.const_data_ptr<int64_t>(), static_cast<size_t>(integers.numel())};
}

AttentionShape check_qkv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  constexpr std::string_view kLayout = "four dimensions [B, H, L, D]";
  check_dense(q, "q", 4, kLayout);
  check_dense(k, "k", 4, kLayout);
  check_dense(v, "v", 4, kLayout);
  check_argument(q.size(0) == k.size(0) && q.size(0) == v.size(0) && q.size(2) == k.size(2) && q.size(2) == v.size(2),
                 "[torch] q, k and v must have the same batch and rows, but they are {}, {} and {}.", text(q.sizes()),
                 text(k.sizes()), text(v.sizes()));
  return check_shape(q, k, v);
}

AttentionShape check_packed_qkv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  constexpr std::string_view kLayout = "three dimensions [T, H, D]";
  check_dense(q, "q", 3, kLayout);
  check_dense(k, "k", 3, kLayout);
  check_dense(v, "v", 3, kLayout);
  check_argument(k.size(0) == v.size(0), "[torch] k and v must have the same rows, but k has {} and v has {}.",
                 k.size(0), v.size(0));
  return check_shape(q, k, v);
}

void check_saved(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& dout, at::IntArrayRef of_out,
                 at::IntArrayRef of_lse, DType type) {
  const auto check = [](const at::Tensor& tensor, at::IntArrayRef sizes, DType of, const char* what) {
    check_argument(tensor.sizes() == sizes && tensor.scalar_type() == scalar_type(of) && tensor.is_cpu(),
                   "[torch] {}, {} {} on the CPU, but it is {} {} on {}.", what, text(sizes),
                   c10::toString(scalar_type(of)), text(tensor.sizes()), type_name(tensor), tensor.device().str());
  };
  check(out, of_out, type, "out must be what the forward returned");
  check(lse, of_lse, accumulator(type), "lse must be what the forward returned");
  check(dout, of_out, type, "the gradient of out must be like out");
}

double checked_scale(std::optional<double> scale, const AttentionShape& shape) {
  // pow, not 1 / sqrt: the same bits as D ** -0.5 in Python, with which another rank may spell it out.
  if (!scale) return std::pow(static_cast<double>(shape.head_dim), -0.5);
  const DType sums = accumulator(shape.dtype);
  const double largest = sums == DType::f64 ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  // Half of it: scores are multiplied with log2(e) as well.
  check_argument(std::abs(*scale) <= largest / 2, "[torch] scale must be a finite number in {}, but it is {}.",
                 name(sums), *scale);
  return *scale;
}

bool all_meta(std::initializer_list<at::Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.is_meta(); });
}

Trouble trouble_of(const std::exception_ptr& error) {
  const auto foreign = [](std::string_view text) {
    return Trouble{fmt::format("[torch] {}", text.substr(0, text.find('\n'))), false};
  };
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    return {ours.what(), ours.kind() == ErrorKind::argument};
  } catch (const c10::Error& torchs) {
    return foreign(torchs.what_without_backtrace());
  } catch (const std::exception& other) {
    return foreign(other.what());
  }
}

std::string tangent_trouble(std::initializer_list<std::pair<const char*, at::Tensor>> tensors) {
  for (const auto& [name, tensor] : tensors)
    if (tensor._fw_grad(/*level=*/0).defined())
      return fmt::format(
          "[torch] gradients must be taken in reverse mode, but {} has a forward-mode tangent. Use backward().", name);
  return "";
}

}  // namespace blockcp
