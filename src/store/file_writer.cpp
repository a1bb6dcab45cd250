#include "store/file_writer.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "core/parallel.h"
#include "core/posix.h"
#include "nybble/error.h"
#include "store/quantized_keys.h"

namespace nybble {
namespace {

constexpr int64_t kPieceWeights = int64_t{16} << 20;  // a multiple of every block size
constexpr int64_t kCopyBytes = int64_t{32} << 20;

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

// The index of the first NaN or Inf of n values, or -1.
int64_t first_non_finite(const std::byte* data, DType dtype, int64_t n) {
  std::atomic<int64_t> first{n};
  const auto scan = [&](auto word, auto exponent_mask, int64_t begin, int64_t end) {
    using Word = decltype(word);
    int64_t bad = 0;
    for (int64_t i = begin; i < end; i++) {
      Word bits;
      std::memcpy(&bits, data + i * sizeof(Word), sizeof(Word));
      bad += (bits & exponent_mask) == exponent_mask;
    }
    for (int64_t i = begin; bad > 0 && i < end; i++) {
      Word bits;
      std::memcpy(&bits, data + i * sizeof(Word), sizeof(Word));
      if ((bits & exponent_mask) != exponent_mask) continue;
      int64_t seen = first.load();
      while (i < seen && !first.compare_exchange_weak(seen, i)) {
      }
      break;
    }
  };
  parallel_for(n, 1 << 18, [&](int64_t begin, int64_t end) {
    if (dtype == DType::kFloat32) scan(uint32_t{}, uint32_t{0x7f800000}, begin, end);
    if (dtype == DType::kFloat16) scan(uint16_t{}, uint16_t{0x7c00}, begin, end);
    if (dtype == DType::kBFloat16) scan(uint16_t{}, uint16_t{0x7f80}, begin, end);
  });
  return first == n ? -1 : first.load();
}

class FileWriter {
 public:
  FileWriter(const std::filesystem::path& path, const FilePlan& plan, const Checkpoint& source,
             const std::function<void(int64_t)>& progress)
      : file_(path), plan_(plan), source_(source), progress_(progress) {}

  void write() {
    std::vector<int64_t> lengths;
    int64_t end = plan_.states_offset;
    for (const auto& weight : plan_.weights) {
      const float offset = weight.prequantized != nullptr ? copy_quantized(weight) : quantize(weight);
      states_.push_back(state_json(weight, offset));
    }
    for (const auto& copy : plan_.dense) write_dense(copy);
    for (const auto& state : states_) {
      put(end, std::as_bytes(std::span(state)));
      lengths.push_back(static_cast<int64_t>(state.size()));
      end += lengths.back();
    }
    for (const auto& padding : plan_.padding) put(padding.begin, bytes_of(std::vector<char>(padding.end - padding.begin)));
    const std::string header = format_safetensors_header(header_tensors(plan_, lengths), plan_.metadata, kLayerAlignment, plan_.data_start);
    file_.write_at(0, std::as_bytes(std::span(header)));
    file_.commit(plan_.data_start + end);
  }

 private:
  void put(int64_t offset, std::span<const std::byte> bytes) { file_.write_at(plan_.data_start + offset, bytes); }

  // Returns the offset of the nested scales.
  float quantize(const WeightPlan& weight) {
    std::vector<float> absmax(static_cast<size_t>(weight.blocks()));
    std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes(std::min(weight.elements, kPieceWeights))));
    const int64_t item = size_of(weight.dtype);
    for (int64_t begin = 0; begin < weight.elements; begin += kPieceWeights) {
      const int64_t count = std::min(kPieceWeights, weight.elements - begin);
      const std::byte* piece = weight.dense->bytes.data() + begin * item;
      const int64_t bad = first_non_finite(piece, weight.dtype, count);
      if (bad >= 0) {
        fail(ErrorKind::kValue, weight.name, ": element ", begin + bad,
             " is NaN or Inf, expected finite weights; repair the checkpoint, or leave ", "this weight as it is with --exclude");
      }
      quantize_4bit(piece, weight.dtype, count, static_cast<int>(weight.block_size), weight.quant_type, packed.data(),
                    absmax.data() + begin / weight.block_size);
      put(weight.packed_offset + begin / 2, bytes_of(packed).first(static_cast<size_t>(packed_bytes(count))));
      source_.file_of(*weight.dense).release({piece, static_cast<size_t>(count * item)});
      progress_(count * item);
    }
    put_table(weight.quant_map_offset, code_table(weight.quant_type));
    if (weight.nested) return quantize_scales_of(weight, absmax);
    put(weight.absmax_offset, bytes_of(absmax));
    return 0;
  }

  float quantize_scales_of(const WeightPlan& weight, const std::vector<float>& absmax) {
    const auto table = nested_code_table();
    const float offset = absmax_mean(absmax.data(), weight.blocks());
    std::vector<uint8_t> codes(absmax.size());
    std::vector<float> nested(static_cast<size_t>(weight.nested_absmax_bytes() / 4));
    quantize_scales(absmax.data(), weight.blocks(), offset, table.data(), codes.data(), nested.data());
    put(weight.absmax_offset, bytes_of(codes));
    put(weight.nested_absmax_offset, bytes_of(nested));
    put_table(weight.nested_quant_map_offset, table);
    return offset;
  }

  // The code table is written anew in fp32, since a source may hold it rounded to 16 bits; the nested one is kept as it was used.
  float copy_quantized(const WeightPlan& weight) {
    const QuantizedTensor& from = *weight.prequantized;
    put(weight.packed_offset, from.packed);
    put(weight.absmax_offset, from.absmax);
    put_table(weight.quant_map_offset, code_table(weight.quant_type));
    if (weight.nested) {
      put(weight.nested_absmax_offset, from.nested_absmax);
      put(weight.nested_quant_map_offset, bytes_of(from.nested_quant_map));
    }
    progress_(weight.source_bytes());
    return from.offset;
  }

  void write_dense(const DensePlan& copy) {
    const auto bytes = copy.tensor->bytes;
    for (size_t begin = 0; begin < bytes.size(); begin += kCopyBytes) {
      const auto piece = bytes.subspan(begin, std::min<size_t>(kCopyBytes, bytes.size() - begin));
      put(copy.offset + static_cast<int64_t>(begin), piece);
      source_.file_of(*copy.tensor).release(piece);
      progress_(static_cast<int64_t>(piece.size()));
    }
  }

  template <size_t N>
  void put_table(int64_t offset, std::span<const float, N> table) {
    put(offset, std::as_bytes(table));
  }

  posix::AtomicFile file_;
  const FilePlan& plan_;
  const Checkpoint& source_;
  const std::function<void(int64_t)>& progress_;
  std::vector<std::string> states_;
};

}  // namespace

void write_planned_file(const std::filesystem::path& path, const FilePlan& plan, const Checkpoint& source,
                        const std::function<void(int64_t bytes)>& progress) {
  FileWriter(path, plan, source, progress).write();
}

}  // namespace nybble
