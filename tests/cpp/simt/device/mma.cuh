// The CPU's twin of src/device/mma.cuh: fragments as the PTX manual lays them out, products summed in fp64.
#pragma once

#include "device/ptx.cuh"

namespace nybble::device {

inline void load_tiles(uint32_t (&tiles)[4], uint32_t address, bool transposed) {
  struct Operand {
    uint32_t address, *tiles;
    bool transposed;
  } operand{address, tiles, transposed};
  simt::collective("ldmatrix", &operand, [](void* const* lanes) {
    for (int tile = 0; tile < 4; tile++) {
      uint16_t values[8][8];
      for (int row = 0; row < 8; row++) {
        std::memcpy(values[row], simt::at_shared(static_cast<Operand*>(lanes[tile * 8 + row])->address, 16, 16), 16);
      }
      for (int i = 0; i < 32; i++) {
        auto* lane = static_cast<Operand*>(lanes[i]);
        const int row = i / 4, column = 2 * (i % 4);
        const uint16_t low = lane->transposed ? values[column][row] : values[row][column];
        const uint16_t high = lane->transposed ? values[column + 1][row] : values[row][column + 1];
        lane->tiles[tile] = static_cast<uint32_t>(high) << 16 | low;
      }
    }
  });
}
inline void load_matrices(uint32_t (&tiles)[4], uint32_t address) { load_tiles(tiles, address, false); }
inline void load_matrices_transposed(uint32_t (&tiles)[4], uint32_t address) { load_tiles(tiles, address, true); }

template <typename T>
float half_of(uint32_t pair, int index) {
  T value;
  value.bits = static_cast<uint16_t>(pair >> (16 * index));
  return static_cast<float>(value);
}

template <typename T>
void multiply_accumulate(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Operand {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
  } operand{d, a, {b0, b1}};
  simt::collective("mma", &operand, [](void* const* lanes) {
    float a[16][16], b[16][8];
    for (int i = 0; i < 32; i++) {
      const auto* lane = static_cast<Operand*>(lanes[i]);
      const int row = i / 4, pair = 2 * (i % 4);
      for (int e = 0; e < 2; e++) {
        for (int t = 0; t < 4; t++) a[row + 8 * (t & 1)][pair + e + 8 * (t >> 1)] = half_of<T>(lane->a[t], e);
        for (int t = 0; t < 2; t++) b[pair + e + 8 * t][row] = half_of<T>(lane->b[t], e);
      }
    }
    for (int i = 0; i < 32; i++) {
      auto* lane = static_cast<Operand*>(lanes[i]);
      for (int e = 0; e < 4; e++) {
        const int row = i / 4 + 8 * (e >> 1), column = 2 * (i % 4) + (e & 1);
        double sum = lane->d[e];
        for (int k = 0; k < 16; k++) sum += static_cast<double>(a[row][k]) * b[k][column];
        lane->d[e] = static_cast<float>(sum);
      }
    }
  });
}

}  // namespace nybble::device
