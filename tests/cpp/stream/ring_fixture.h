// A streamed model of patterned bytes: every byte of layer i tells which layer and offset it belongs to.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nybble/stream.h"

namespace nybble {

constexpr std::chrono::milliseconds kPatience{10000};
constexpr std::byte kUntouched{0x5A};  // of guard bytes and of slots before their first refill

inline std::byte pattern(int layer, int64_t offset) { return static_cast<std::byte>((layer * 37 + offset * 11 + offset / 251) & 0xFF); }

// `layers` layers of layer_bytes in host memory, `window` slots with guard bytes behind each.
class Streamed {
 public:
  Streamed(int layers, int window, CopyOptions copy = {}, RingOptions options = {}, int64_t layer_bytes = 4096)
      : Streamed(layers, window, make_cpu_copy_engine(window, std::move(copy)), options, layer_bytes) {}

  Streamed(int layers, int window, std::unique_ptr<CopyEngine> engine, RingOptions options = {}, int64_t layer_bytes = 4096)
      : layer_bytes_(layer_bytes) {
    const std::vector<std::string> weights = {"q", "k"};
    std::vector<RingLayer> ring_layers;
    for (int layer = 0; layer < layers; layer++) {
      const ArenaPart part{"all", layer_bytes, 0};
      arena_.add_layer({&part, 1});
      std::vector<std::byte> bytes(layer_bytes);
      for (int64_t i = 0; i < layer_bytes; i++) bytes[i] = pattern(layer, i);
      arena_.fill(layer, 0, 0, bytes);
      uids_.push_back(register_owner("L" + std::to_string(layer), weights));
      ring_layers.push_back({uids_.back(), arena_.blob(layer).first(layer_bytes)});
    }
    std::vector<std::byte*> bases;
    for (int slot = 0; slot < window; slot++) {
      slots_.emplace_back(layer_bytes + 64, kUntouched);
      bases.push_back(slots_.back().data());
    }
    ring_ = std::make_unique<SlotRing>(ring_layers, bases, layer_bytes, std::move(engine), options);
  }
  ~Streamed() {
    ring_.reset();
    for (const int64_t uid : uids_) forget_owner(uid);
  }

  SlotRing& ring() { return *ring_; }
  int64_t uid(int layer) const { return uids_[layer]; }
  std::byte* slot(int layer) { return slots_[layer % slots_.size()].data(); }
  int slot_index(int layer) const { return layer % static_cast<int>(slots_.size()); }

  uint64_t acquire(int layer, Order order = Order::kForward) {
    uint64_t refilled = 0;
    EXPECT_TRUE(ring_->acquire(layer, order, nullptr, kPatience, &refilled));
    return refilled;
  }
  void verify(int layer) {
    const void* const pointers[] = {slot(layer), slot(layer) + layer_bytes_ / 2};
    verify_owner(uid(layer) + 1, pointers, 2);
  }
  // The kernel's view: the check, then the bytes.
  bool reads_exactly(int layer) {
    verify(layer);
    for (int64_t i = 0; i < layer_bytes_; i++) {
      if (slot(layer)[i] != pattern(layer, i)) return false;
    }
    for (int64_t i = layer_bytes_; i < layer_bytes_ + 64; i++) {
      if (slot(layer)[i] != kUntouched) return false;
    }
    return true;
  }

 private:
  int64_t layer_bytes_;
  HostArena arena_;
  std::vector<int64_t> uids_;
  std::vector<std::vector<std::byte>> slots_;
  std::unique_ptr<SlotRing> ring_;
};

// What the call threw, "" when it threw nothing. The kind must be the one expected.
template <typename Call>
std::string error_of(ErrorKind kind, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    return error.what();
  }
  return "";
}

}  // namespace nybble
