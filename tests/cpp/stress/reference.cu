#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cuda_check.h"
#include "format/tables.h"
#include "stress/reference.h"

namespace nybble::stress {
namespace {

__device__ uint64_t hash(uint64_t i, uint64_t seed) {
  uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u ^ seed * 0xD1342543DE82EF95u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

template <typename T>
__device__ T to_16_bit(float v) {
  if constexpr (sizeof(T) == 2 && __is_same(T, __half)) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}
template <typename T>
__device__ double to_double(T v) {
  return static_cast<double>(static_cast<float>(v));
}

__global__ void random_bytes(uint8_t* out, int64_t count, uint64_t seed) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
  const uint64_t bits = hash(i, seed);
  for (int j = 0; j < 8 && i + j < count; j++) out[i + j] = static_cast<uint8_t>(bits >> 8 * j);
}

// The sum of four uniform numbers is close enough to a normal one.
template <typename T>
__global__ void random_activations(T* out, int64_t count, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint64_t bits = hash(i, seed);
  float sum = -2.0f;
  for (int j = 0; j < 4; j++) sum += static_cast<float>(bits >> 16 * j & 0xFFFF) * 0x1p-16f;
  out[i] = to_16_bit<T>(sum * 0.87f);
}

__global__ void random_scales(float* out, int64_t count, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = 0.01f + 0.09f * static_cast<float>(hash(i, seed) >> 40) * 0x1p-24f;
}

// 1 at one column of every row, zeros elsewhere, NaN between rows: the product is a column of the weight, to the bit.
template <typename T>
__global__ void one_hot_rows(T* out, int64_t count, int reduction, int64_t stride, int shift) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int64_t row = i / stride, column = i % stride;
  const float inside = column == (row * 37 + shift) % reduction ? 1.0f : 0.0f;
  out[i] = to_16_bit<T>(column < reduction ? inside : __int_as_float(0x7FFFFFFF));
}

__device__ float through(float v, DType dtype) {
  if (dtype == DType::kBFloat16) return __bfloat162float(__float2bfloat16_rn(v));
  if (dtype == DType::kFloat16) return __half2float(__float2half_rn(v));
  return v;
}

struct DecodeParams {
  const uint8_t* packed;
  Scales scales;
  int64_t count;
  int block_size;
  float values[16];
};

__device__ float flushed_product(float a, float b) {
  const float product = __fmul_rn(a, b);
  return fabsf(product) < 0x1p-126f ? copysignf(0.0f, product) : product;
}

// Weight i of the flattened tensor; the high nibble of a byte comes first.
template <typename T>
__global__ void decode_weights(const DecodeParams p, T* out) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const int code = p.packed[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15;
  const int64_t block = i / p.block_size;
  float scale;
  if (p.scales.nested()) {
    const float value = p.scales.nested_code[p.scales.absmax_codes[block]];
    const DType dtype = p.scales.nested_dtype;
    const float product = through(flushed_product(value, p.scales.nested_absmax[block / kNestedBlockSize]), dtype);
    scale = through(__fadd_rn(product, through(*p.scales.offset, dtype)), dtype);
  } else {
    scale = p.scales.absmax[block];
  }
  float value = p.values[0];
  for (int v = 1; v < 16; v++) value = code == v ? p.values[v] : value;
  out[i] = to_16_bit<T>(flushed_product(value, scale));
}

struct CheckParams {
  const void* in;
  const void* dense;
  const void* bias;
  const void* out;
  int64_t stride;        // of the rows of in
  int64_t step, column;  // elements of the dense weight between neighbours along the reduction, between columns
  int m, columns, reduction;
  int index;
  bool exact;
  double half_ulp;
  Report* report;
};

__device__ void report_wrong(Report* report, int index, long long element, double found, double expected, double tolerance) {
  if (atomicAdd(&report->count, 1ull) != 0) return;
  report->index = index;
  report->element = element;
  report->found = found;
  report->expected = expected;
  report->tolerance = tolerance;
}

// A CTA checks 16 ROWS tokens by 64 columns, a thread ROWS by 4.
template <typename T, int ROWS>
__global__ void __launch_bounds__(256) check_outputs(const CheckParams p) {
  constexpr int kStep = 16, kTokens = 16 * ROWS, kColumns = 64;
  __shared__ double x[kStep][kTokens + 1], w[kStep][kColumns + 1];
  const int thread = static_cast<int>(threadIdx.x), tx = thread % 16, ty = thread / 16;
  const int token0 = static_cast<int>(blockIdx.y) * kTokens, column0 = static_cast<int>(blockIdx.x) * kColumns;
  const T* in = static_cast<const T*>(p.in);
  const T* dense = static_cast<const T*>(p.dense);
  double sum[ROWS][4] = {}, size[ROWS][4] = {};
  for (int begin = 0; begin < p.reduction; begin += kStep) {
    for (int i = thread; i < kStep * kTokens; i += 256) {
      const int token = token0 + i / kStep, at = begin + i % kStep;
      x[i % kStep][i / kStep] = token < p.m && at < p.reduction ? to_double(in[token * p.stride + at]) : 0.0;
    }
    for (int i = thread; i < kStep * kColumns; i += 256) {
      const bool along = p.step == 1;  // neighbouring threads read neighbouring weights
      const int s = along ? i % kStep : i / kColumns, c = along ? i / kStep : i % kColumns;
      const int column = column0 + c, at = begin + s;
      w[s][c] = column < p.columns && at < p.reduction ? to_double(dense[column * p.column + at * p.step]) : 0.0;
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kStep; s++) {
      double xs[ROWS], ws[4];
      for (int r = 0; r < ROWS; r++) xs[r] = x[s][ty + 16 * r];
      for (int c = 0; c < 4; c++) ws[c] = w[s][tx + 16 * c];
      for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < 4; c++) {
          sum[r][c] = fma(xs[r], ws[c], sum[r][c]);
          size[r][c] = fma(fabs(xs[r]), fabs(ws[c]), size[r][c]);
        }
      }
    }
    __syncthreads();
  }
  for (int r = 0; r < ROWS; r++) {
    for (int c = 0; c < 4; c++) {
      const int token = token0 + ty + 16 * r, column = column0 + tx + 16 * c;
      if (token >= p.m || column >= p.columns) continue;
      const double expected = sum[r][c] + (p.bias ? to_double(static_cast<const T*>(p.bias)[column]) : 0.0);
      const int64_t element = int64_t{token} * p.columns + column;
      const double found = to_double(static_cast<const T*>(p.out)[element]);
      const double tolerance = p.exact ? 0.0 : fabs(expected) * p.half_ulp + size[r][c] * 0x1p-17 + 1e-7;
      if (!(fabs(found - expected) <= tolerance)) report_wrong(p.report, p.index, element, found, expected, tolerance);
    }
  }
}

__global__ void check_guard_bytes(const uint8_t* out, int64_t bytes, int index, Report* report) {
  const int64_t at = threadIdx.x < kGuardBytes ? static_cast<int64_t>(threadIdx.x) - kGuardBytes : bytes + threadIdx.x - kGuardBytes;
  if (out[at] != kPoison) report_wrong(report, index, -1, out[at], kPoison, 0);
}

__global__ void check_equal_words(const uint32_t* first, const uint32_t* second, int64_t words, Report* report) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < words && first[i] != second[i]) report_wrong(report, -1, -2, first[i], second[i], 4.0 * static_cast<double>(i));
}

unsigned blocks_for(int64_t count) { return static_cast<unsigned>((count + 255) / 256); }

template <typename T>
void check_typed(const Case& c, CheckParams p, const DecodeParams& weight, void* dense, cudaStream_t stream) {
  decode_weights<T><<<blocks_for(weight.count), 256, 0, stream>>>(weight, static_cast<T*>(dense));
  check_launch();
  p.half_ulp = __is_same(T, __half) ? 0x1p-11 : 0x1p-8;
  const unsigned columns = static_cast<unsigned>((p.columns + 63) / 64);
  if (c.problem.m <= 16) {
    check_outputs<T, 1><<<dim3(columns, (p.m + 15) / 16), 256, 0, stream>>>(p);
  } else {
    check_outputs<T, 4><<<dim3(columns, (p.m + 63) / 64), 256, 0, stream>>>(p);
  }
  check_launch();
}

}  // namespace

void fill_bytes(uint8_t* out, int64_t count, uint64_t seed, cudaStream_t stream) {
  random_bytes<<<blocks_for((count + 7) / 8), 256, 0, stream>>>(out, count, seed);
  check_launch();
}

void fill_activations(void* out, DType dtype, int64_t count, uint64_t seed, cudaStream_t stream) {
  if (dtype == DType::kFloat16) {
    random_activations<<<blocks_for(count), 256, 0, stream>>>(static_cast<__half*>(out), count, seed);
  } else {
    random_activations<<<blocks_for(count), 256, 0, stream>>>(static_cast<__nv_bfloat16*>(out), count, seed);
  }
  check_launch();
}

void fill_one_hot(void* out, DType dtype, int64_t rows, int64_t reduction, int64_t stride, int shift, cudaStream_t stream) {
  const int64_t count = (rows - 1) * stride + reduction;
  if (dtype == DType::kFloat16) {
    one_hot_rows<<<blocks_for(count), 256, 0, stream>>>(static_cast<__half*>(out), count, static_cast<int>(reduction), stride, shift);
  } else {
    one_hot_rows<<<blocks_for(count), 256, 0, stream>>>(static_cast<__nv_bfloat16*>(out), count, static_cast<int>(reduction), stride,
                                                        shift);
  }
  check_launch();
}

void fill_scales(float* out, int64_t count, uint64_t seed, cudaStream_t stream) {
  random_scales<<<blocks_for(count), 256, 0, stream>>>(out, count, seed);
  check_launch();
}

void check_case(const Case& c, int index, bool exact, const LinearArgs& args, void* dense, Report* report, cudaStream_t stream) {
  const LinearProblem& q = c.problem;
  const bool forward = q.direction == Direction::kForward;
  DecodeParams weight{args.weight.packed, args.weight.scales, q.n * q.k, q.block_size, {}};
  const auto& values = q.quant_type == QuantType::kNf4 ? format::kNf4Values : format::kFp4Values;
  for (int i = 0; i < 16; i++) weight.values[i] = values[i];
  CheckParams p{};
  p.in = args.in;
  p.dense = dense;
  p.bias = args.bias;
  p.out = args.out;
  p.stride = args.in_row_stride ? args.in_row_stride : c.reduction();
  p.step = forward ? 1 : q.k;
  p.column = forward ? q.k : 1;
  p.m = static_cast<int>(q.m);
  p.columns = static_cast<int>(c.columns());
  p.reduction = static_cast<int>(c.reduction());
  p.index = index;
  p.exact = exact;
  p.report = report;
  q.dtype == DType::kFloat16 ? check_typed<__half>(c, p, weight, dense, stream) : check_typed<__nv_bfloat16>(c, p, weight, dense, stream);
}

void check_guards(const uint8_t* out, int64_t bytes, int index, Report* report, cudaStream_t stream) {
  check_guard_bytes<<<1, 2 * kGuardBytes, 0, stream>>>(out, bytes, index, report);
  check_launch();
}

void check_equal(const void* first, const void* second, int64_t bytes, Report* report, cudaStream_t stream) {
  check_equal_words<<<blocks_for(bytes / 4), 256, 0, stream>>>(static_cast<const uint32_t*>(first), static_cast<const uint32_t*>(second),
                                                               bytes / 4, report);
  check_launch();
}

}  // namespace nybble::stress
