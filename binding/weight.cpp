#include "weight.h"

#include "nybble/stream.h"

#ifdef NYBBLE_HAVE_CUDA
// Weak: a torch without CUDA has no such symbol, and the library loads there all the same.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace nybble::binding {
namespace {

void check_device(const Tensor& tensor, const char* name, const Device& device) {
  const Device found = device_of(tensor);
  if (!(found == device)) {
    fail(ErrorKind::kValue, name, " is on ", binding::name(found), ", expected ", binding::name(device),
         " like the other operand; move it with .to(\"", binding::name(device), "\")");
  }
}

void check_count(const Tensor& tensor, const char* name, int64_t expected, const WeightTensors& weight) {
  if (tensor.numel() != expected) {
    fail(ErrorKind::kValue, name, " has shape ", shape_text(tensor), ", expected ", expected, " elements for a weight [", weight.n, ", ",
         weight.k, "] in blocks of ", weight.block_size, "; weight and state do not belong together");
  }
}

// A contiguous float32 operand. Other float dtypes arise when a checkpoint is loaded under a 16-bit default dtype; they widen exactly.
const float* float_operand(std::optional<Tensor>& operand, const char* name, int64_t count, const WeightTensors& weight,
                           const Device& device) {
  check_device(*operand, name, device);
  check_count(*operand, name, count, weight);
  if (float_dtype(*operand, name) != DType::kFloat32) operand = to_dtype(*operand, DType::kFloat32);
  operand = as_contiguous(*operand);
  return static_cast<const float*>(operand->const_data_ptr());
}

void check_packed(const WeightTensors& weight, const Device& device) {
  check_device(weight.packed, "packed", device);
  const int64_t found = weight.packed.numel() * static_cast<int64_t>(weight.packed.element_size());
  const int64_t expected = packed_bytes(weight.n * weight.k);
  if (found != expected) {
    fail(ErrorKind::kValue, "packed has shape ", shape_text(weight.packed), " (", found, " bytes), expected ", expected,
         " bytes for a weight [", weight.n, ", ", weight.k, "]; weight and state do not belong together");
  }
}

void check_scalars(const WeightTensors& weight) {
  if (weight.n < 0 || weight.k < 1)
    fail(ErrorKind::kValue, "weight shape [", weight.n, ", ", weight.k, "], expected [out_features, in_features]");
  if (!is_block_size(weight.block_size)) {
    fail(ErrorKind::kValue, "blocksize ", weight.block_size, ", expected 32, 64, 128, 256, 512, 1024, 2048 or 4096");
  }
  if (weight.quant_type != 0 && weight.quant_type != 1)
    fail(ErrorKind::kValue, "quant_type code ", weight.quant_type, ", expected 0 (nf4) or 1 (fp4)");
}

Scales checked_scales(WeightTensors& weight, const Device& device) {
  const int64_t blocks = num_blocks(weight.n * weight.k, weight.block_size);
  const int nested_parts = weight.nested_absmax.has_value() + weight.nested_code.has_value() + weight.offset.has_value();
  check_device(weight.absmax, "absmax", device);
  check_count(weight.absmax, "absmax", blocks, weight);
  weight.absmax = as_contiguous(weight.absmax);
  Scales scales;
  const int32_t dtype = torch_dtype(weight.absmax);
  if (nested_parts == 0) {
    if (dtype != torch_dtype(DType::kFloat32)) {
      fail(ErrorKind::kType, "absmax is ", dtype_name(dtype),
           ", expected float32 (plain scales), or uint8 with nested_absmax, nested_code and offset");
    }
    scales.absmax = static_cast<const float*>(weight.absmax.const_data_ptr());
    return scales;
  }
  if (nested_parts != 3)
    fail(ErrorKind::kValue, "nested scales need nested_absmax, nested_code and offset, found ", nested_parts, " of the three");
  if (dtype != aoti_torch_dtype_uint8()) {
    fail(ErrorKind::kType, "absmax is ", dtype_name(dtype), ", expected uint8 codes, as nested_absmax, nested_code and offset are given");
  }
  const int64_t nested_blocks = num_blocks(blocks, kNestedBlockSize);
  scales.absmax_codes = static_cast<const uint8_t*>(weight.absmax.const_data_ptr());
  scales.nested_absmax = float_operand(weight.nested_absmax, "nested_absmax", nested_blocks, weight, device);
  scales.nested_code = float_operand(weight.nested_code, "nested_code", 256, weight, device);
  scales.offset = float_operand(weight.offset, "offset", 1, weight, device);
  scales.nested_dtype = dtype_from_code(weight.nested_dtype, "nested_dtype");
  return scales;
}

}  // namespace

Nf4Weight checked_weight(WeightTensors& tensors, const Device& device) {
  check_scalars(tensors);
  check_packed(tensors, device);
  if (tensors.code.numel() != 16) {
    fail(ErrorKind::kValue, "code has ", tensors.code.numel(), " entries, expected the 16 values of a 4-bit type");
  }
  check_device(tensors.code, "code", device);
  tensors.packed = as_contiguous(tensors.packed);
  Nf4Weight weight;
  weight.scales = checked_scales(tensors, device);
  weight.packed = static_cast<const uint8_t*>(tensors.packed.const_data_ptr());
  weight.n = tensors.n;
  weight.k = tensors.k;
  weight.block_size = static_cast<int32_t>(tensors.block_size);
  weight.quant_type = static_cast<QuantType>(tensors.quant_type);
  return weight;
}

void check_owner(const WeightTensors& tensors, [[maybe_unused]] const Device& device) {
  if (!tensors.uid) return;
  const Tensor& uid = *tensors.uid;
  if (torch_dtype(uid) != aoti_torch_dtype_int64() || uid.numel() != 1 || device_of(uid).cuda()) {
    fail(ErrorKind::kValue, "uid is ", dtype_name(torch_dtype(uid)), shape_text(uid), " on ", name(device_of(uid)),
         ", expected one int64 on the CPU, as SlotPool hands out");
  }
#ifdef NYBBLE_HAVE_CUDA
  if (device.cuda() && cuda_stream_is_capturing(current_stream(device))) {
    fail(ErrorKind::kUnsupported,
         "a streamed weight was used while a CUDA graph is being captured: replays would skip the check that its slot still holds it; "
         "capture only with resident weights");
  }
#endif
  const void* pointers[4] = {tensors.packed.const_data_ptr(), tensors.absmax.const_data_ptr()};
  int count = 2;
  for (const auto* part : {&tensors.nested_absmax, &tensors.offset}) {
    if (part->has_value()) pointers[count++] = (*part)->const_data_ptr();
  }
  verify_owner(*static_cast<const int64_t*>(uid.const_data_ptr()), pointers, count);
}

CudaStream current_stream(const Device& device) {
  if (!device.cuda()) return nullptr;
#ifdef NYBBLE_HAVE_CUDA
  if (aoti_torch_get_current_cuda_stream != nullptr) {
    CudaStream stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &stream));
    return stream;
  }
#endif
  fail(ErrorKind::kUnsupported, "this torch or this build of nybble has no CUDA, but a tensor is on ", name(device));
}

}  // namespace nybble::binding
