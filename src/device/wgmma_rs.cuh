// wgmma of one warpgroup with A in registers, sm_90a: D[64][TOKENS] += A[64][16] * B[TOKENS][16]^T, fp32 accumulators, B 16-bit in shared
// memory, K-major with 128-byte swizzle. TOKENS = 8, 16, 32, 64, 96, 128, 160, 192 or 256; d has TOKENS / 2 elements.
#pragma once

#include "device/wgmma.cuh"

namespace nybble::device {

#define NYBBLE_REGS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NYBBLE_REGS_16(i) NYBBLE_REGS_4(i), NYBBLE_REGS_4(i + 4), NYBBLE_REGS_4(i + 8), NYBBLE_REGS_4(i + 12)
#define NYBBLE_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NYBBLE_NAMES_16 NYBBLE_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NYBBLE_NAMES_32 NYBBLE_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NYBBLE_NAMES_48 NYBBLE_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NYBBLE_NAMES_64 NYBBLE_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NYBBLE_NAMES_80 NYBBLE_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NYBBLE_NAMES_96                                                                                               \
  NYBBLE_NAMES_64                                                                                                     \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
  "%92,%93,%94,%95"
#define NYBBLE_NAMES_128                                                                                              \
  NYBBLE_NAMES_64                                                                                                     \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
  "%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,"  \
  "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define NYBBLE_WGMMA_RS_TYPED(tokens, type, names, a_names, b_name, ...)                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." type "." type " {" names "}, {" a_names "}, " b_name \
               ", 1, 1, 1, 0;\n"                                                                                           \
               : __VA_ARGS__                                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor_b))
// names: the accumulators; a_names, b_name: the operands behind them.
#define NYBBLE_WGMMA_RS(tokens, names, a_names, b_name, ...)                                                      \
  template <typename T>                                                                                           \
  __device__ __forceinline__ void wgmma_rs(float(&d)[tokens / 2], const uint32_t(&a)[4], uint64_t descriptor_b) { \
    if constexpr (__is_same(T, __half)) {                                                                         \
      NYBBLE_WGMMA_RS_TYPED(tokens, "f16", names, a_names, b_name, __VA_ARGS__);                                  \
    } else {                                                                                                      \
      NYBBLE_WGMMA_RS_TYPED(tokens, "bf16", names, a_names, b_name, __VA_ARGS__);                                 \
    }                                                                                                             \
  }

NYBBLE_WGMMA_RS(8, "%0,%1,%2,%3", "%4,%5,%6,%7", "%8", NYBBLE_REGS_4(0))
NYBBLE_WGMMA_RS(16, NYBBLE_NAMES_8, "%8,%9,%10,%11", "%12", NYBBLE_REGS_4(0), NYBBLE_REGS_4(4))
NYBBLE_WGMMA_RS(32, NYBBLE_NAMES_16, "%16,%17,%18,%19", "%20", NYBBLE_REGS_16(0))
NYBBLE_WGMMA_RS(64, NYBBLE_NAMES_32, "%32,%33,%34,%35", "%36", NYBBLE_REGS_16(0), NYBBLE_REGS_16(16))
NYBBLE_WGMMA_RS(96, NYBBLE_NAMES_48, "%48,%49,%50,%51", "%52", NYBBLE_REGS_16(0), NYBBLE_REGS_16(16), NYBBLE_REGS_16(32))
NYBBLE_WGMMA_RS(128, NYBBLE_NAMES_64, "%64,%65,%66,%67", "%68", NYBBLE_REGS_16(0), NYBBLE_REGS_16(16), NYBBLE_REGS_16(32),
                NYBBLE_REGS_16(48))
NYBBLE_WGMMA_RS(160, NYBBLE_NAMES_80, "%80,%81,%82,%83", "%84", NYBBLE_REGS_16(0), NYBBLE_REGS_16(16), NYBBLE_REGS_16(32),
                NYBBLE_REGS_16(48), NYBBLE_REGS_16(64))
NYBBLE_WGMMA_RS(192, NYBBLE_NAMES_96, "%96,%97,%98,%99", "%100", NYBBLE_REGS_16(0), NYBBLE_REGS_16(16), NYBBLE_REGS_16(32),
                NYBBLE_REGS_16(48), NYBBLE_REGS_16(64), NYBBLE_REGS_16(80))
NYBBLE_WGMMA_RS(256, NYBBLE_NAMES_128, "%128,%129,%130,%131", "%132", NYBBLE_REGS_16(0), NYBBLE_REGS_16(16), NYBBLE_REGS_16(32),
                NYBBLE_REGS_16(48), NYBBLE_REGS_16(64), NYBBLE_REGS_16(80), NYBBLE_REGS_16(96), NYBBLE_REGS_16(112))

#undef NYBBLE_WGMMA_RS
#undef NYBBLE_WGMMA_RS_TYPED
#undef NYBBLE_NAMES_128
#undef NYBBLE_NAMES_96
#undef NYBBLE_NAMES_80
#undef NYBBLE_NAMES_64
#undef NYBBLE_NAMES_48
#undef NYBBLE_NAMES_32
#undef NYBBLE_NAMES_16
#undef NYBBLE_NAMES_8
#undef NYBBLE_REGS_16
#undef NYBBLE_REGS_4

}  // namespace nybble::device
