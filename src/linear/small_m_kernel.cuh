// The small-M kernel: what its roles share. y = x W^T and grad_x = gy W are out[token][row] = sum over the reduction of A[row] *
// act[token], with A = W (forward) or W^T (grad_x); W is the A operand of wgmma in both, decoded straight into registers and stored
// nowhere.
//
// A unit is 256 rows x 256 columns of W (32 KB packed) in both directions. CTAs of 20 warps, one an SM, take runs of units
// (small_m_work.h):
//
//   warp 16       copies: packed unit, scale codes and nested scales -> stage; activations -> slots
//   warps 17-19   forward, up to 32 tokens: put an activation slot into the order of the k16 steps
//   warps 0-15    decode (a table of byte -> two fp32 values, one copy a lane; one product and one rounding a weight), wgmma
//                 m64 n TOKENS k16, fp32 sums in registers; at the end of a tile: partial sum -> workspace
//
// Partial sums are added in CTA order by a kernel behind: same bits every time.
//
// Forward: thread (g, t) of a warp decodes rows g, g + 8, block t of each 64-block quadruple, so a k16 step holds 4 elements of each of 4
// blocks and x is permuted to match. grad_x: the two nibbles of a byte are rows g and g + 8 of the m64 tile, each byte of a word its own
// tile.
//
// Order between launches: activations are read, and anything is written, only after all earlier kernels are complete. The weight is read
// before: only kernels of the multiply let others start early, and they write outputs and workspace; every other kernel is complete before
// the first multiply behind it starts.
//
// What bounds it on an H200: decoding, not memory. Per unit and SM at 8 tokens about 3000 clocks forward (ALU and shared memory carry 2100
// each) and 3450 for grad_x (shared memory); reading 32 KB from DRAM takes about 2000.
#pragma once

#include "device/async.cuh"
#include "device/wgmma_rs.cuh"
#include "linear/sm90.h"
#include "linear/small_m_work.h"
#include "nybble/linear.h"

namespace nybble::small_m {

using namespace nybble::device;

constexpr int kConsumerWarps = 16, kCopyWarp = 16, kPermuteWarps = 3;
constexpr int kConsumers = kConsumerWarps * 32, kThreads = 640;
constexpr int kConsumerRegisters = 112, kProducerRegisters = 32;  // 16 x 112 + 4 x 32 = 20 x 96, what the launch gets
constexpr int kAllBarrier = 1, kConsumerBarrier = 2;              // named barriers
constexpr uint32_t kPackedBytes = 32768;                          // of a unit: 256 rows x 128 bytes, swizzled
constexpr uint32_t kCodeBytes = 4096;    // 256 rows x 16 bytes: codes of this unit and its three neighbours, or 4 fp32 scales
constexpr uint32_t kNestedBytes = 1792;  // of 256 rows: k / 64 fp32
constexpr uint32_t kTableBytes = 65536;  // also its alignment: a byte of W is byte 1 of the address
constexpr uint32_t kMaxTokenGroups = 16;

// GROUPS: token groups of 8, a power of two.
template <int GROUPS_, Direction DIRECTION>
struct Layout {
  static constexpr int GROUPS = GROUPS_;
  static constexpr bool FORWARD = DIRECTION == Direction::kForward;
  // grad_x: packed bytes of a row that a thread decodes, and warpgroups that share the reduction: few accumulators allow 4 m64 tiles.
  static constexpr int BYTES = GROUPS <= 4 ? 4 : GROUPS == 8 ? 2 : 1;
  static constexpr int TOGETHER = BYTES == 1 ? 2 : BYTES;  // side by side in memory: two warps of one byte share words of two
  static constexpr int STAGES = GROUPS == 16 ? 2 : 3;
  // Slots of 64 of the reduction, in final order; else of 256, put in order here.
  static constexpr bool PERMUTE_HERE = FORWARD && GROUPS < 8, PERMUTED_BEFORE = FORWARD && !PERMUTE_HERE;
  // grad_x: a multiple of 4 where warpgroups share the reduction, so that each has slots of its own.
  static constexpr int X_SLOTS = !FORWARD      ? (GROUPS == 16  ? 3
                                                  : GROUPS == 8 ? 4
                                                                : 8)
                                 : GROUPS <= 2 ? 4
                                 : GROUPS == 4 ? 2
                                 : GROUPS == 8 ? 5
                                               : 3;
  static constexpr uint32_t X_BYTES = GROUPS * 1024;  // all tokens x 64 of the reduction
  static constexpr uint32_t X_SLOT_BYTES = PERMUTE_HERE ? 4 * X_BYTES : X_BYTES;
  static constexpr uint32_t EXCHANGE_BYTES = FORWARD || BYTES == 1 ? 0 : GROUPS == 8 ? 4096 : GROUPS == 4 ? 8192 : 16384;
  static constexpr uint32_t WARP_SCALE_BYTES = FORWARD ? 0 : 256 * (4 / BYTES);

  // Low region | table (64 KB aligned) | packed stages. The small things end the low region, for 128 tokens the memory.
  static constexpr bool SMALL_HIGH = GROUPS == 16;
  static constexpr uint32_t EXCHANGE = X_SLOTS * X_SLOT_BYTES, SMALL = EXCHANGE + EXCHANGE_BYTES;
  // In the region of small things:
  static constexpr uint32_t CODES = 0, NESTED = CODES + STAGES * kCodeBytes, WARP_SCALES = NESTED + STAGES * kNestedBytes;
  static constexpr uint32_t CODE_VALUES = WARP_SCALES + kConsumerWarps * WARP_SCALE_BYTES, OFFSET = CODE_VALUES + 1024,
                            BARRIERS = OFFSET + 16;
  static constexpr uint32_t SMALL_BYTES = BARRIERS + 8 * (2 * STAGES + 3 * X_SLOTS);
  static constexpr uint32_t LOW_BYTES = SMALL + (SMALL_HIGH ? 0 : SMALL_BYTES);
  static constexpr uint32_t HIGH_BYTES = STAGES * kPackedBytes + (SMALL_HIGH ? SMALL_BYTES : 0);
  static_assert(LOW_BYTES <= kTableBytes - 1024, "dynamic shared memory starts at 1 KB, the table at 64 KB");
  static constexpr uint32_t SHARED_BYTES = 2 * kTableBytes - 1024 + HIGH_BYTES;
  static_assert(SHARED_BYTES <= kSm90SharedBytes, "shared memory of a CTA");
};

struct Params {
  CUtensorMap packed;      // [n][k / 2] bytes, box 256 x 128
  CUtensorMap activation;  // see launch
  CUtensorMap scales;      // [n][k / 64]: codes, box 256 x 16, or fp32, box 256 x 4
  float values[16];        // of the 4-bit codes
  Work work;
  bool nested;
  int m, n, k;
  const float* nested_absmax;  // [n * k / 64 / 256]
  const float* nested_code;    // [256]
  const float* offset;         // [1]
  const void* bias;            // [n] or null
  float* partials;             // float4 [slots][16][GROUPS][32]
  void* out;                   // [m][n] or [m][k]
};

// Shared memory by address.
template <typename L>
struct Smem {
  uint32_t base, table;
  __device__ __forceinline__ explicit Smem(uint32_t start) : base(start), table((start + kTableBytes - 1) & ~(kTableBytes - 1)) {
    if ((base & 1023) != 0 || table - base < L::LOW_BYTES || table + kTableBytes + L::HIGH_BYTES > base + kSm90SharedBytes) __trap();
  }
  __device__ __forceinline__ uint32_t packed(int stage) const { return table + kTableBytes + stage * kPackedBytes; }
  __device__ __forceinline__ uint32_t x(int slot) const { return base + slot * L::X_SLOT_BYTES; }
  __device__ __forceinline__ uint32_t exchange() const { return base + L::EXCHANGE; }
  __device__ __forceinline__ uint32_t small() const { return L::SMALL_HIGH ? packed(L::STAGES) : base + L::SMALL; }
  __device__ __forceinline__ uint32_t codes(int buffer) const { return small() + L::CODES + buffer * kCodeBytes; }
  __device__ __forceinline__ uint32_t nested(int stage) const { return small() + L::NESTED + stage * kNestedBytes; }
  __device__ __forceinline__ uint32_t warp_scales(int warp) const { return small() + L::WARP_SCALES + warp * L::WARP_SCALE_BYTES; }
  __device__ __forceinline__ uint32_t code_values() const { return small() + L::CODE_VALUES; }
  __device__ __forceinline__ uint32_t offset() const { return small() + L::OFFSET; }  // of nested scales
  // Barriers. full_x: in final order; raw_x: landed, to be permuted.
  __device__ __forceinline__ uint32_t full_stage(int i) const { return small() + L::BARRIERS + 8 * i; }
  __device__ __forceinline__ uint32_t empty_stage(int i) const { return full_stage(L::STAGES + i); }
  __device__ __forceinline__ uint32_t full_x(int i) const { return full_stage(2 * L::STAGES + i); }
  __device__ __forceinline__ uint32_t empty_x(int i) const { return full_x(L::X_SLOTS + i); }
  __device__ __forceinline__ uint32_t raw_x(int i) const { return full_x(2 * L::X_SLOTS + i); }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < L::STAGES; i++) {
      barrier_init(full_stage(i), 1);
      barrier_init(empty_stage(i), kConsumerWarps);
    }
    for (int i = 0; i < L::X_SLOTS; i++) {
      barrier_init(full_x(i), L::PERMUTE_HERE ? kPermuteWarps : 1);
      barrier_init(empty_x(i), L::FORWARD ? kConsumerWarps : kConsumerWarps / L::BYTES);
      barrier_init(raw_x(i), 1);
    }
    barrier_init_fence();
  }
};

// A place in a ring and the parity of its current round.
template <int SLOTS>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int slots) {  // at most SLOTS
    slot += slots;
    if (slot >= SLOTS) {
      slot -= SLOTS;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ Ring next() const {
    Ring r = *this;
    r.advance();
    return r;
  }
};

}  // namespace nybble::small_m
