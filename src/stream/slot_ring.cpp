#include <exception>
#include <mutex>
#include <utility>

#include "nybble/stream.h"

namespace nybble {
namespace {

struct RingSlot {
  int64_t id = -1;  // in the owner table
  std::byte* bytes = nullptr;
  SlotState state = SlotState::kEmpty;
  int layer = -1;
  std::exception_ptr start_error;  // a prefetch that could not even start; raised by the acquire that needs the layer
};

}  // namespace

const char* name(SlotState state) {
  switch (state) {
    case SlotState::kEmpty:
      return "empty";
    case SlotState::kLoading:
      return "loading";
    case SlotState::kHeld:
      return "held";
    case SlotState::kReleased:
      return "released";
  }
  return "unknown";
}

struct SlotRing::Impl {
  std::vector<RingLayer> layers;
  std::vector<RingSlot> slots;
  std::unique_ptr<CopyEngine> engine;
  RingOptions options;
  RingStats stats;
  mutable std::mutex mutex;

  int slot_of(int layer) const { return layer % static_cast<int>(slots.size()); }
  void require_layer(int layer) const {
    if (layer < 0 || layer >= static_cast<int>(layers.size()))
      fail(ErrorKind::kValue, "layer ", layer, " of the ring, expected 0 to ", layers.size() - 1);
  }
  static void empty(RingSlot& slot) { slot = {slot.id, slot.bytes, SlotState::kEmpty, -1, nullptr}; }
  void issue(int layer, ComputeStream compute);
  bool load(int layer, ComputeStream compute, std::chrono::milliseconds timeout, uint64_t& refilled);
  void give_up(int index);
  void prefetch(int layer, Order order, ComputeStream compute, uint64_t& refilled);
};

// Stops the refill under way, if any. The slot is left empty and owned by nobody.
void SlotRing::Impl::give_up(int index) {
  RingSlot& slot = slots[index];
  if (slot.state != SlotState::kLoading) return;
  engine->cancel(index);
  stats.cancelled++;
  empty(slot);
}

// Nobody owns the slot from before the refill's first byte until acquire() has waited for the last one.
void SlotRing::Impl::issue(int layer, ComputeStream compute) {
  const int index = slot_of(layer);
  RingSlot& slot = slots[index];
  give_up(index);
  const bool released = slot.state == SlotState::kReleased;
  const bool read_since = begin_fill(slot.id);
  empty(slot);
  CopyRequest request;
  request.slot = index;
  request.layer = layer;
  request.from = layers[layer].bytes.data();
  request.to = slot.bytes;
  request.bytes = static_cast<int64_t>(layers[layer].bytes.size());
  request.wait_for_now = !released || read_since;
  request.poison = options.poison;
  engine->start(request, compute);
  slot.state = SlotState::kLoading;
  slot.layer = layer;
  stats.refills++;
  stats.refill_bytes += request.bytes;
}

void SlotRing::Impl::prefetch(int layer, Order order, ComputeStream compute, uint64_t& refilled) {
  uint64_t busy = uint64_t{1} << slot_of(layer);
  int next = layer;
  for (size_t ahead = 1; ahead < slots.size(); ahead++) {
    next = next_layer(next, static_cast<int>(layers.size()), order);
    if (next < 0) return;
    const int index = slot_of(next);
    const uint64_t bit = uint64_t{1} << index;
    if ((busy & bit) != 0) continue;  // a nearer layer of a schedule that wraps needs this slot
    busy |= bit;
    if (slots[index].layer == next) continue;
    refilled |= bit;
    try {
      issue(next, compute);
    } catch (...) {
      slots[index].layer = next;
      slots[index].start_error = std::current_exception();
    }
  }
}

SlotRing::SlotRing(std::vector<RingLayer> layers, std::vector<std::byte*> slots, int64_t slot_bytes, std::unique_ptr<CopyEngine> engine,
                   RingOptions options)
    : impl_(std::make_unique<Impl>()) {
  if (layers.empty()) fail(ErrorKind::kValue, "a ring needs at least one layer, found none");
  if (slots.empty() || slots.size() > 64) fail(ErrorKind::kValue, "a ring of ", slots.size(), " slots, expected 1 to 64");
  for (size_t i = 0; i < layers.size(); i++) {
    if (static_cast<int64_t>(layers[i].bytes.size()) > slot_bytes)
      fail(ErrorKind::kValue, "layer ", i, " has ", layers[i].bytes.size(), " bytes, a slot holds ", slot_bytes,
           "; expected slots as large as the largest layer");
  }
  impl_->layers = std::move(layers);
  impl_->engine = std::move(engine);
  impl_->options = options;
  impl_->slots.resize(slots.size());
  try {
    for (size_t i = 0; i < slots.size(); i++) {
      const ByteRange range{slots[i], slot_bytes};
      impl_->slots[i].bytes = slots[i];
      impl_->slots[i].id = register_slot({&range, 1});
    }
  } catch (...) {
    for (const RingSlot& slot : impl_->slots) unregister_slot(slot.id);
    throw;
  }
}

SlotRing::~SlotRing() {
  for (size_t i = 0; i < impl_->slots.size(); i++) {
    impl_->engine->cancel(static_cast<int>(i));
    unregister_slot(impl_->slots[i].id);
  }
}

bool SlotRing::Impl::load(int layer, ComputeStream compute, std::chrono::milliseconds timeout, uint64_t& refilled) {
  const int index = slot_of(layer);
  RingSlot& slot = slots[index];
  try {
    if (slot.layer == layer && slot.start_error) std::rethrow_exception(slot.start_error);
    if (slot.layer != layer) {
      refilled |= uint64_t{1} << index;
      issue(layer, compute);
    }
    return engine->wait_ready(index, compute, timeout);
  } catch (...) {
    stats.failed++;
    empty(slot);
    throw;
  }
}

bool SlotRing::acquire(int layer, Order order, ComputeStream compute, std::chrono::milliseconds timeout, uint64_t* refilled) {
  uint64_t ignored = 0;
  uint64_t& mask = refilled == nullptr ? ignored : *refilled;
  const std::lock_guard lock(impl_->mutex);
  impl_->require_layer(layer);
  impl_->engine->enter(compute);
  RingSlot& slot = impl_->slots[impl_->slot_of(layer)];
  if (slot.layer == layer && (slot.state == SlotState::kHeld || slot.state == SlotState::kReleased)) {
    impl_->stats.hits++;
  } else {
    if (!impl_->load(layer, compute, timeout, mask)) return false;
    set_owner(slot.id, impl_->layers[layer].uid);
  }
  slot.state = SlotState::kHeld;
  impl_->stats.visits++;
  if (impl_->options.prefetch) impl_->prefetch(layer, order, compute, mask);
  return true;
}

void SlotRing::release(int layer, ComputeStream compute) {
  const std::lock_guard lock(impl_->mutex);
  impl_->require_layer(layer);
  const int index = impl_->slot_of(layer);
  RingSlot& slot = impl_->slots[index];
  if (slot.layer != layer || (slot.state != SlotState::kHeld && slot.state != SlotState::kReleased))
    return;  // refilled since: nothing is held
  impl_->engine->enter(compute);
  impl_->engine->record_free(index, compute);
  release_slot(slot.id);
  slot.state = SlotState::kReleased;
}

void SlotRing::reset() {
  const std::lock_guard lock(impl_->mutex);
  for (size_t i = 0; i < impl_->slots.size(); i++) {
    RingSlot& slot = impl_->slots[i];
    impl_->give_up(static_cast<int>(i));
    begin_fill(slot.id);
    Impl::empty(slot);
  }
}

SlotStatus SlotRing::status(int slot) const {
  const std::lock_guard lock(impl_->mutex);
  if (slot < 0 || slot >= slots()) fail(ErrorKind::kValue, "slot ", slot, " of the ring, expected 0 to ", slots() - 1);
  const RingSlot& found = impl_->slots[slot];
  return {found.state, found.layer, slot_owner(found.id)};
}

RingStats SlotRing::stats() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

ComputeStream SlotRing::copy_stream() const { return impl_->engine->copy_stream(); }
int SlotRing::slots() const { return static_cast<int>(impl_->slots.size()); }

}  // namespace nybble
