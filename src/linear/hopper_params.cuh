// What a launch of either Hopper kernel passes, and the launch itself.
#pragma once

#include <bit>

#include "format/tables.h"
#include "linear/hopper_kernel.cuh"
#include "linear/hopper_launch.h"
#include "linear/kernel_shared_memory.h"
#include "linear/overlapping_launch.h"
#include "linear/tensor_map.h"

namespace nybble::hopper {

// Rows of codes or plain scales of which `box` neighbours, 16 bytes, can be fetched at once.
inline bool aligned_rows(const ScaleSource& s, int box) { return s.blocks % box == 0 && reinterpret_cast<uintptr_t>(s.absmax) % 16 == 0; }

inline ScaleWay scale_way(const LinearProblem& q, const ScaleSource& s, HopperScales scales) {
  if (scales == HopperScales::kExpanded) return ScaleWay::kReady;
  if (!s.nested || s.nested_dtype != DType::kFloat32) return ScaleWay::kAny;
  const bool runs = q.direction == Direction::kForward && q.block_size == kStep && aligned_rows(s, kCodeBox);
  return runs ? ScaleWay::kRuns : ScaleWay::kNested;
}

// Where codes or plain scales come as boxes, as make_scales_of_boxes() expects them. Forward, a thread's own words serve four steps, and
// boxes were no faster.
inline bool takes_boxes(const LinearProblem& q, const ScaleSource& s) {
  if (q.direction != Direction::kGradInput || q.block_size != kStep) return false;
  if (!s.nested) return aligned_rows(s, kScaleBox);
  return s.nested_dtype == DType::kFloat32 && aligned_rows(s, kCodeBox) && s.blocks <= kMostBoxedBlocks;
}

inline ScaleSource make_source(const Launch& l, bool row_pairs) {
  const Scales& s = l.args.weight.scales;
  const LinearProblem& q = l.problem;
  ScaleSource source{};
  source.nested = s.nested();
  source.nested_dtype = s.nested_dtype;
  source.block_shift = std::countr_zero(static_cast<unsigned>(q.block_size)) - std::countr_zero(static_cast<unsigned>(kStep));
  source.n = static_cast<uint32_t>(q.n);
  source.blocks = static_cast<uint32_t>(q.k / q.block_size);
  source.absmax = s.nested() ? static_cast<const void*>(s.absmax_codes) : s.absmax;
  source.nested_absmax = s.nested_absmax;
  source.nested_code = s.nested_code;
  source.offset = s.offset;
  source.way = scale_way(q, source, hopper_scales(l.plan.variant));
  source.boxes = row_pairs && takes_boxes(q, source);
  return source;
}

template <typename T, typename TILE>
Params make_params(const Launch& l) {
  const LinearProblem& q = l.problem;
  const bool forward = q.direction == Direction::kForward;
  const int64_t rows = forward ? q.n : q.k, reduction = forward ? q.k : q.n;
  const int64_t stride = l.args.in_row_stride == 0 ? reduction : l.args.in_row_stride;
  const HopperWorkspace layout = hopper_workspace(q, l.plan);
  uint8_t* workspace = static_cast<uint8_t*>(l.args.workspace);
  Params p;
  p.activation = tensor_map({kMapType<T>, static_cast<const T*>(l.args.in) + l.first * stride, reduction, l.count, stride * 2, kStep,
                             TILE::X_BOX, CU_TENSOR_MAP_SWIZZLE_128B});
  p.packed = tensor_map(
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, l.args.weight.packed, q.k / 2, q.n, q.k / 2, 32, TILE::JOB_ROWS, CU_TENSOR_MAP_SWIZZLE_32B});
  p.source = make_source(l, TILE::ROW_PAIRS);
  if (p.source.way == ScaleWay::kReady) {
    p.scales = tensor_map({CU_TENSOR_MAP_DATA_TYPE_FLOAT32, workspace + layout.scales, q.n, q.k / q.block_size, q.n * 4, TILE::JOB_ROWS, 1,
                           CU_TENSOR_MAP_SWIZZLE_NONE});
  }
  if (p.source.boxes) {
    const ScaleSource& s = p.source;
    p.scales =
        s.nested ? tensor_map({CU_TENSOR_MAP_DATA_TYPE_UINT8, s.absmax, s.blocks, q.n, s.blocks, kCodeBox, 128, CU_TENSOR_MAP_SWIZZLE_NONE})
                 : tensor_map({CU_TENSOR_MAP_DATA_TYPE_FLOAT32, s.absmax, s.blocks, q.n, int64_t{4} * s.blocks, kScaleBox, 128,
                               CU_TENSOR_MAP_SWIZZLE_NONE});
  }
  p.output = tensor_map(
      {kMapType<T>, static_cast<T*>(l.args.out) + l.first * rows, rows, l.count, rows * 2, 64, kChunkTokens, CU_TENSOR_MAP_SWIZZLE_128B});
  const auto& values = q.quant_type == QuantType::kNf4 ? format::kNf4Values : format::kFp4Values;
  for (int i = 0; i < 16; i++) p.values[i] = values[i];
  p.work = hopper_work(q, l.plan, l.count);
  p.bias = l.args.bias;
  p.rows = static_cast<int>(rows);
  p.partials = reinterpret_cast<float*>(workspace + layout.partials);
  p.flags = reinterpret_cast<uint64_t*>(workspace + layout.flags);
  p.nonce = next_nonce();
  for (int c = 0; c < p.work.clusters; c++) {
    const Segment s = segment_of(p.work, share_of(p.work, c), 0);
    p.first[c] = make_uint2(static_cast<uint32_t>(s.begin | s.end << 16), static_cast<uint32_t>(s.row_tile | s.token_tile << 16));
  }
  return p;
}

// KERNEL: multiply or multiply_rows of T and TILE.
template <auto KERNEL, typename T, typename TILE>
void launch_kernel(const Launch& l) {
  static SharedMemoryAllowance allowance;
  allowance.allow(reinterpret_cast<const void*>(KERNEL), TILE::SHARED_BYTES);
  const Params params = make_params<T, TILE>(l);
  const LaunchShape shape{static_cast<unsigned>(2 * params.work.clusters), 1, TILE::THREADS, TILE::SHARED_BYTES};
  launch_overlapping(l.overlap, l.stream, shape, KERNEL, params);
}

}  // namespace nybble::hopper
