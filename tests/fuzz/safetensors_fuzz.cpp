// Feeds any bytes to the checkpoint reader as a file: header, quantised parts, every check of verify. Only nybble::Error may come out, and
// every accepted tensor must lie inside the file (each byte at its ends is touched under AddressSanitizer).
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "nybble/store.h"
#include "store/quant_state.h"
#include "store/safetensors_header.h"

namespace {

// One file in memory, written anew for every input.
const std::string& scratch_path() {
  static const std::string path = [] {
    const int fd = ::memfd_create("input.safetensors", 0);
    if (fd < 0) std::abort();
    return "/proc/self/fd/" + std::to_string(fd);
  }();
  return path;
}

void write_scratch(const uint8_t* data, size_t size) {
  std::FILE* file = std::fopen(scratch_path().c_str(), "wb");
  if (file == nullptr || std::fwrite(data, 1, size, file) != size || std::fclose(file) != 0) std::abort();
}

void read_header(std::span<const std::byte> bytes) {
  // A copy of exact size, so that AddressSanitizer sees a read past the end.
  const std::vector<std::byte> copy(bytes.begin(), bytes.end());
  const auto header = nybble::parse_safetensors_header(copy, "input");
  int64_t end = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.begin != end || tensor.end < tensor.begin) std::abort();
    end = tensor.end;
    if (nybble::element_count(tensor.shape) < 0) std::abort();
  }
  if (header.data_start + end != static_cast<int64_t>(bytes.size())) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  nybble::Faults faults;
  nybble::parse_quant_state({reinterpret_cast<const char*>(data), size}, "input", faults);
  try {
    read_header(bytes);
  } catch (const nybble::Error&) {
    return 0;  // refused: the mapped reader refuses it for the same reason
  }
  write_scratch(data, size);
  const nybble::Checkpoint checkpoint(scratch_path());
  volatile unsigned char touched = 0;
  for (const auto* tensor : checkpoint.tensors()) {
    if (tensor->bytes.empty()) continue;
    touched = touched + std::to_integer<unsigned char>(tensor->bytes.front()) + std::to_integer<unsigned char>(tensor->bytes.back());
  }
  for (const auto& weight : nybble::quantized_tensors(checkpoint, faults)) {
    if (weight.elements == 0) continue;
    float last = 0;
    nybble::dequantize_4bit(weight.view(), nybble::DType::kFloat32, weight.elements - 1, 1, &last);
  }
  nybble::verify_store(scratch_path());
  return 0;
}
