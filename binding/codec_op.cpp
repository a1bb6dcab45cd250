// Quantise and dequantise as torch ops. CUDA work goes to torch's current stream, outputs come from torch's allocator.
#include "codec_op.h"

#include <array>
#include <utility>

#include "core/parallel.h"
#include "nybble/cuda.h"
#include "weight.h"

namespace nybble::binding {
namespace {

using torch::stable::detail::from;

// The device of a call, made current for its duration; on the CPU it takes over torch's thread count.
class CallDevice {
 public:
  explicit CallDevice(const Tensor& operand) : device(device_of(operand)) {
    if (device.cuda()) {
#ifdef NYBBLE_HAVE_CUDA
      guard_.emplace(device.index);
      cuda_device_model(device.index);  // refuses a driver or a card that this build cannot use
      stream = current_stream(device);
#else
      fail(ErrorKind::kUnsupported, "nybble was built without CUDA, but a tensor is on ", name(device),
           "; install the CUDA build or use the CPU");
#endif
    } else {
      uint32_t threads = 1;
      TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
      set_num_threads(static_cast<int>(threads));
    }
  }
  const Device device;
  CudaStream stream = nullptr;

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Runs body with errors turned into what Python sees.
template <typename Body>
void for_python(Body&& body) {
  try {
    body();
  } catch (...) {
    rethrow_for_python();
  }
}

Tensor dequantize(WeightTensors& tensors, int64_t out_dtype_code) {
  const DType dtype = dtype_from_code(out_dtype_code, "out_dtype");
  const CallDevice call(tensors.packed);
  check_owner(tensors, call.device);
  const Nf4Weight weight = checked_weight(tensors, call.device);
  const std::array<int64_t, 2> sizes = {weight.n, weight.k};
  Tensor out = empty(sizes, torch_dtype(dtype), call.device, "the dequantised weight");
  const int64_t count = weight.n * weight.k;
  if (count == 0) return out;
#ifdef NYBBLE_HAVE_CUDA
  if (call.device.cuda()) {
    dequantize_4bit_cuda(weight, dtype, 0, count, out.mutable_data_ptr(), call.stream);
    return out;
  }
#endif
  dequantize_4bit(weight, dtype, 0, count, out.mutable_data_ptr());
  return out;
}

std::pair<Tensor, Tensor> quantize(const Tensor& x, int64_t block_size, int64_t quant_type) {
  const DType dtype = float_dtype(x, "A");
  if (!is_block_size(block_size)) fail(ErrorKind::kValue, "blocksize ", block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  if (quant_type != 0 && quant_type != 1) fail(ErrorKind::kValue, "quant_type code ", quant_type, ", expected 0 (nf4) or 1 (fp4)");
  const CallDevice call(x);
  const Tensor in = as_contiguous(x);
  const int64_t count = in.numel();
  Tensor packed = empty(std::array<int64_t, 2>{packed_bytes(count), 1}, aoti_torch_dtype_uint8(), call.device, "the packed weight");
  Tensor absmax = empty(std::array<int64_t, 1>{num_blocks(count, block_size)}, aoti_torch_dtype_float32(), call.device, "absmax");
  if (count == 0) return {packed, absmax};
  auto* bytes = static_cast<uint8_t*>(packed.mutable_data_ptr());
  auto* scales = static_cast<float*>(absmax.mutable_data_ptr());
  const auto type = static_cast<QuantType>(quant_type);
#ifdef NYBBLE_HAVE_CUDA
  if (call.device.cuda()) {
    quantize_4bit_cuda(in.const_data_ptr(), dtype, count, static_cast<int>(block_size), type, bytes, scales, call.stream);
    return {packed, absmax};
  }
#endif
  quantize_4bit(in.const_data_ptr(), dtype, count, static_cast<int>(block_size), type, bytes, scales);
  return {packed, absmax};
}

const float* float32_operand(const Tensor& tensor, const char* name, int64_t count, const Device& device) {
  if (torch_dtype(tensor) != aoti_torch_dtype_float32()) {
    fail(ErrorKind::kType, name, " is ", dtype_name(torch_dtype(tensor)), ", expected float32");
  }
  if (count >= 0 && tensor.numel() != count) fail(ErrorKind::kValue, name, " has ", tensor.numel(), " elements, expected ", count);
  if (!(device_of(tensor) == device)) {
    fail(ErrorKind::kValue, name, " is on ", binding::name(device_of(tensor)), ", expected ", binding::name(device));
  }
  if (!tensor.is_contiguous()) fail(ErrorKind::kValue, name, " is not contiguous; call .contiguous() on it");
  return static_cast<const float*>(tensor.const_data_ptr());
}

std::pair<Tensor, Tensor> quantize_nested(const Tensor& absmax, const Tensor& offset, const Tensor& nested_code) {
  const CallDevice call(absmax);
  const float* values = float32_operand(absmax, "absmax", -1, call.device);
  const float* mean = float32_operand(offset, "offset", 1, call.device);
  const float* code = float32_operand(nested_code, "nested_code", 256, call.device);
  const int64_t blocks = absmax.numel();
  Tensor codes = empty(std::array<int64_t, 1>{blocks}, aoti_torch_dtype_uint8(), call.device, "the nested codes");
  Tensor nested_absmax =
      empty(std::array<int64_t, 1>{num_blocks(blocks, kNestedBlockSize)}, aoti_torch_dtype_float32(), call.device, "nested_absmax");
  if (blocks == 0) return {codes, nested_absmax};
  auto* code_out = static_cast<uint8_t*>(codes.mutable_data_ptr());
  auto* absmax_out = static_cast<float*>(nested_absmax.mutable_data_ptr());
#ifdef NYBBLE_HAVE_CUDA
  if (call.device.cuda()) {
    quantize_scales_cuda(values, blocks, mean, code, code_out, absmax_out, call.stream);
    return {codes, nested_absmax};
  }
#endif
  quantize_scales(values, blocks, *mean, code, code_out, absmax_out);
  return {codes, nested_absmax};
}

Tensor mean(const Tensor& absmax) {
  const CallDevice call(absmax);
  const float* values = float32_operand(absmax, "absmax", -1, call.device);
  Tensor out = empty({}, aoti_torch_dtype_float32(), call.device, "the mean of absmax");
  auto* result = static_cast<float*>(out.mutable_data_ptr());
#ifdef NYBBLE_HAVE_CUDA
  if (call.device.cuda()) {
    const std::array<int64_t, 1> partials = {num_blocks(absmax.numel(), 256)};
    Tensor workspace = empty(partials, aoti_torch_dtype_float64(), call.device, "partial sums");
    absmax_mean_cuda(values, absmax.numel(), static_cast<double*>(workspace.mutable_data_ptr()), result, call.stream);
    return out;
  }
#endif
  *result = nybble::absmax_mean(values, absmax.numel());
  return out;
}

}  // namespace

void dequantize_4bit_op(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  Tensor packed = in.tensor(), absmax = in.tensor(), code = in.tensor();
  auto nested_absmax = in.optional_tensor(), nested_code = in.optional_tensor(), offset = in.optional_tensor(), uid = in.optional_tensor();
  const int64_t n = in.integer(), k = in.integer(), block_size = in.integer(), quant_type = in.integer(), nested_dtype = in.integer();
  const int64_t out_dtype = in.integer();
  WeightTensors weight{packed, absmax, code, nested_absmax, nested_code, offset, uid, n, k, block_size, quant_type, nested_dtype};
  for_python([&] { stack[0] = from(dequantize(weight, out_dtype)); });
}

void quantize_4bit_op(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor x = in.tensor();
  const int64_t block_size = in.integer(), quant_type = in.integer();
  for_python([&] {
    const auto [packed, absmax] = quantize(x, block_size, quant_type);
    stack[0] = from(packed);
    stack[1] = from(absmax);
  });
}

void quantize_scales_op(StableIValue* stack, uint64_t, uint64_t) {
  Arguments in(stack);
  const Tensor absmax = in.tensor(), offset = in.tensor(), nested_code = in.tensor();
  for_python([&] {
    const auto [codes, nested_absmax] = quantize_nested(absmax, offset, nested_code);
    stack[0] = from(codes);
    stack[1] = from(nested_absmax);
  });
}

void absmax_mean_op(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor absmax = Arguments(stack).tensor();
  for_python([&] { stack[0] = from(mean(absmax)); });
}

}  // namespace nybble::binding
