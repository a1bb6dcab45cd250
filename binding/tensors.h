// What the ops need of torch's tensors, on the LibTorch stable ABI. The only folder that includes torch headers.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "nybble/error.h"
#include "nybble/format.h"

namespace nybble::binding {

using torch::stable::Tensor;

// CPU or one CUDA device.
struct Device {
  int32_t type = 0;  // torch's code
  int32_t index = -1;
  bool cuda() const;
  bool operator==(const Device&) const = default;
};
std::string name(const Device& device);  // "cpu", "cuda:1"
Device device_of(const Tensor& tensor);

int32_t torch_dtype(const Tensor& tensor);
int32_t torch_dtype(DType dtype);
// "bfloat16"; numbers torch gives to dtypes that no op here takes are spelled "torch dtype 11".
std::string dtype_name(int32_t torch_dtype);
bool is_float_dtype(int32_t torch_dtype);
// The dtype of an operand; kType with the operand's name for anything but float32, float16, bfloat16.
DType float_dtype(const Tensor& tensor, const char* name);
// The codes that travel as ints in op schemas; kValue when out of range.
DType dtype_from_code(int64_t code, const char* name);

std::string shape_text(const Tensor& tensor);  // "[3, 64]"
std::span<const int64_t> sizes_of(const Tensor& tensor);
std::span<const int64_t> strides_of(const Tensor& tensor);

// Uninitialised contiguous memory from torch's allocator. kOutOfMemory when it refuses; `what` names the tensor in that message.
Tensor empty(std::span<const int64_t> sizes, int32_t torch_dtype, const Device& device, const char* what);
// Largest power of two, at most 256, that divides an address.
int32_t alignment_of(const void* address);

// x as a matrix whose rows are contiguous: a view where strides allow it, else a copy.
struct Rows {
  Tensor tensor;  // keeps data alive
  const void* data = nullptr;
  int64_t m = 0;
  int64_t stride = 0;  // elements
};
Rows as_rows(const Tensor& tensor, int64_t columns);

// aten ops through the dispatcher. A failure is kOutOfMemory when memory for the result is what lacks, else kCuda.
Tensor aten_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);
Tensor aten_matmul(const Tensor& a, const Tensor& b);
Tensor as_contiguous(const Tensor& tensor);  // itself when it is
Tensor to_dtype(const Tensor& tensor, DType dtype);

// Reads the arguments of a boxed call in schema order. Each is owned by the caller afterwards, so read all of them before anything can
// throw.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  Tensor tensor() { return torch::stable::detail::to<Tensor>(*next_++); }
  std::optional<Tensor> optional_tensor() { return torch::stable::detail::to<std::optional<Tensor>>(*next_++); }
  int64_t integer() { return torch::stable::detail::to<int64_t>(*next_++); }
  bool boolean() { return torch::stable::detail::to<bool>(*next_++); }

 private:
  StableIValue* next_;
};

// Rethrows the exception in flight as a type that pybind11 knows (ValueError for values, RuntimeError else), its kind and text kept for the
// Python front, which raises the exact type.
[[noreturn]] void rethrow_for_python();

}  // namespace nybble::binding
