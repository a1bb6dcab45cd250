#include "tensors.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <vector>

#include "core/last_error.h"

namespace nybble::binding {
namespace {

struct DtypeCodes {
  int32_t float32 = aoti_torch_dtype_float32();
  int32_t float16 = aoti_torch_dtype_float16();
  int32_t bfloat16 = aoti_torch_dtype_bfloat16();
  int32_t float64 = aoti_torch_dtype_float64();
  int32_t uint8 = aoti_torch_dtype_uint8();
  int32_t int8 = aoti_torch_dtype_int8();
  int32_t int32 = aoti_torch_dtype_int32();
  int32_t int64 = aoti_torch_dtype_int64();
};
const DtypeCodes& codes() {
  static const DtypeCodes all;
  return all;
}

int64_t bytes_of(std::span<const int64_t> sizes, int32_t dtype) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count * (dtype == codes().float32 ? 4 : dtype == codes().uint8 ? 1 : dtype == codes().int64 ? 8 : 2);
}

// A shim's failure carries no text before torch 2.13, so an allocation of the size of the result tells whether memory was the reason.
[[noreturn]] void fail_aten(const char* what, std::span<const int64_t> result, int32_t dtype, const Device& device) {
  empty(result, dtype, device, "the result of torch's matmul");
  fail(ErrorKind::kCuda, "torch's ", what, " failed on ", name(device), "; torch printed the reason to stderr");
}

}  // namespace

bool Device::cuda() const { return type == aoti_torch_device_type_cuda(); }

std::string name(const Device& device) {
  if (device.cuda()) return "cuda:" + std::to_string(device.index);
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  return "a device of torch's type " + std::to_string(device.type);
}

Device device_of(const Tensor& tensor) {
  Device device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  if (!device.cuda()) device.index = -1;
  return device;
}

int32_t torch_dtype(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return codes().float32;
    case DType::kFloat16:
      return codes().float16;
    case DType::kBFloat16:
      return codes().bfloat16;
  }
  fail(ErrorKind::kValue, "dtype code ", static_cast<int>(dtype), ", expected 0, 1 or 2");
}

std::string dtype_name(int32_t dtype) {
  const DtypeCodes& all = codes();
  if (dtype == all.float32) return "float32";
  if (dtype == all.float16) return "float16";
  if (dtype == all.bfloat16) return "bfloat16";
  if (dtype == all.float64) return "float64";
  if (dtype == all.uint8) return "uint8";
  if (dtype == all.int8) return "int8";
  if (dtype == all.int32) return "int32";
  if (dtype == all.int64) return "int64";
  return "torch dtype " + std::to_string(dtype);
}

bool is_float_dtype(int32_t dtype) { return dtype == codes().float32 || dtype == codes().float16 || dtype == codes().bfloat16; }

DType float_dtype(const Tensor& tensor, const char* name) {
  const int32_t dtype = torch_dtype(tensor);
  if (dtype == codes().bfloat16) return DType::kBFloat16;
  if (dtype == codes().float16) return DType::kFloat16;
  if (dtype == codes().float32) return DType::kFloat32;
  fail(ErrorKind::kType, name, " is ", dtype_name(dtype), ", expected float32, float16 or bfloat16; cast it with .to(torch.bfloat16)");
}

DType dtype_from_code(int64_t code, const char* name) {
  if (code < 0 || code > 2) fail(ErrorKind::kValue, name, " code ", code, ", expected 0 (float32), 1 (float16) or 2 (bfloat16)");
  return static_cast<DType>(code);
}

std::span<const int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.data(), sizes.size()};
}

std::span<const int64_t> strides_of(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return {strides.data(), strides.size()};
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (const int64_t size : sizes_of(tensor)) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

Tensor empty(std::span<const int64_t> sizes, int32_t dtype, const Device& device, const char* what) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device.type,
                               std::max(device.index, 0), &handle) != TORCH_SUCCESS) {
    fail(ErrorKind::kOutOfMemory, "out of memory on ", name(device), ": no ", bytes_of(sizes, dtype), " bytes for ", what,
         "; use fewer tokens a step, or mode=\"fused\", which keeps no dense weight");
  }
  return Tensor(handle);
}

int32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  return bits == 0 ? 256 : 1 << std::min(8, std::countr_zero(bits));
}

Rows as_rows(const Tensor& tensor, int64_t columns) {
  const auto sizes = sizes_of(tensor);
  const auto strides = strides_of(tensor);
  const size_t dims = sizes.size();
  int64_t m = 1;
  for (size_t i = 0; i + 1 < dims; i++) m *= sizes[i];
  if (m == 0) return {tensor, nullptr, 0, columns};
  bool view = columns == 1 || strides[dims - 1] == 1;
  int64_t row_stride = columns;  // of a single row: any value will do
  int64_t span = 0;              // elements that the dimensions below i cover, in rows; 0 while they are all of size 1
  for (size_t i = dims - 1; view && i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (span == 0) {
      row_stride = strides[i];
      view = row_stride >= columns;
      span = row_stride * sizes[i];
    } else {
      view = strides[i] == span;
      span *= sizes[i];
    }
  }
  if (view) return {tensor, tensor.const_data_ptr(), m, row_stride};
  Tensor copy = as_contiguous(tensor);
  const void* data = copy.const_data_ptr();
  return {std::move(copy), data, m, columns};
}

Tensor aten_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  using torch::stable::detail::from;
  StableIValue stack[3] = {from(x), from(weight), from(bias)};
  if (torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION) == TORCH_SUCCESS) {
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  std::vector<int64_t> result(sizes_of(x).begin(), sizes_of(x).end());
  result.back() = weight.size(0);
  fail_aten("linear", result, torch_dtype(x), device_of(x));
}

Tensor aten_matmul(const Tensor& a, const Tensor& b) {
  using torch::stable::detail::from;
  StableIValue stack[2] = {from(a), from(b)};
  if (torch_call_dispatcher("aten::matmul", "", stack, TORCH_ABI_VERSION) == TORCH_SUCCESS) {
    return torch::stable::detail::to<Tensor>(stack[0]);
  }
  std::vector<int64_t> result(sizes_of(a).begin(), sizes_of(a).end());
  result.back() = b.size(1);
  fail_aten("matmul", result, torch_dtype(a), device_of(a));
}

// Not torch's contiguous(): a shim that runs out of memory does not say so, an allocation of our own does.
Tensor as_contiguous(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  Tensor copy = empty(sizes_of(tensor), torch_dtype(tensor), device_of(tensor), "a contiguous copy of an operand");
  torch::stable::copy_(copy, tensor);
  return copy;
}

Tensor to_dtype(const Tensor& tensor, DType dtype) {
  if (torch_dtype(tensor) == torch_dtype(dtype)) return tensor;
  const torch::headeronly::ScalarType target = dtype == DType::kFloat32   ? torch::headeronly::ScalarType::Float
                                               : dtype == DType::kFloat16 ? torch::headeronly::ScalarType::Half
                                                                          : torch::headeronly::ScalarType::BFloat16;
  return torch::stable::to(tensor, target);
}

void rethrow_for_python() {
  const ErrorKind kind = record_current_exception();
  if (kind == ErrorKind::kValue || kind == ErrorKind::kFormat) throw std::invalid_argument(last_error_text());
  throw std::runtime_error(last_error_text());
}

}  // namespace nybble::binding
