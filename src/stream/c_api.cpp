// The streaming half of the C ABI, see c_api_stream.h for its contracts.
#include <string>
#include <utility>
#include <vector>

#include "core/last_error.h"
#include "nybble/c_api_stream.h"
#include "nybble/store.h"
#include "nybble/stream.h"

struct nybble_arena {
  std::shared_ptr<nybble::HostArena> arena;
};

struct nybble_checkpoint {
  nybble::Checkpoint checkpoint;
};

struct nybble_ring {
  std::shared_ptr<nybble::HostArena> arena;
  std::unique_ptr<nybble::SlotRing> ring;
};

namespace {

using namespace nybble;

template <typename T>
T& require(T* pointer, const char* name) {
  if (pointer == nullptr) fail(ErrorKind::kValue, name, " is null, expected a pointer");
  return *pointer;
}

// A handle is made once its place is known to be there: `*place = new T` would make it before it looks.
template <typename T, typename MAKE>
void hand_over(T** place, const char* name, MAKE make) {
  require(place, name);
  *place = new T(make());
}

void require_count(int32_t count, const char* name) {
  if (count < 0) fail(ErrorKind::kValue, name, " is ", count, ", expected none below 0");
}

CopyOptions copy_options(const nybble_ring_options& from) {
  CopyOptions options;
  options.land_at_wait = from.land_at_wait != 0;
  options.delay = std::chrono::microseconds(from.delay_us);
  options.chunk_bytes = from.chunk_bytes;
  if (from.observer != nullptr) {
    options.observer = [observer = from.observer, context = from.context](int layer, int slot, int64_t begin, int64_t end) {
      if (observer(context, layer, slot, begin, end) != 0)
        fail(ErrorKind::kIo, "the refill of slot ", slot, " with layer ", layer, " was stopped at byte ", begin, " by its observer");
    };
  }
  return options;
}

void fill_from(HostArena& arena, int layer, int part, const Checkpoint& checkpoint, const char* name) {
  const TensorView* const tensor = checkpoint.find(name);
  if (tensor == nullptr)
    fail(ErrorKind::kValue, "checkpoint ", checkpoint.folder().string(), " has no tensor ", name, "; is it one of this model?");
  const auto room = static_cast<int64_t>(arena.part(layer, part).size());
  if (static_cast<int64_t>(tensor->bytes.size()) != room)
    fail(ErrorKind::kFormat, "tensor ", name, " of ", checkpoint.folder().string(), " has ", tensor->bytes.size(), " bytes, expected ",
         room, " by its weight's shape and block size; `nybble verify` lists every fault");
  arena.fill(layer, part, 0, tensor->bytes);
  checkpoint.file_of(*tensor).release(tensor->bytes);
}

std::unique_ptr<SlotRing> make_ring(const HostArena& arena, const int64_t* uids, void* const* slots, int32_t window, int64_t slot_bytes,
                                    const nybble_ring_options& options) {
  std::vector<RingLayer> layers;
  for (int layer = 0; layer < arena.layers(); layer++) {
    arena.require_complete(layer);
    layers.push_back({uids[layer], arena.blob(layer)});
  }
  std::vector<std::byte*> bases;
  for (int32_t slot = 0; slot < window; slot++) bases.push_back(static_cast<std::byte*>(slots[slot]));
  auto engine = options.on_cuda != 0 ? make_cuda_copy_engine(options.device, window, copy_options(options))
                                     : make_cpu_copy_engine(window, copy_options(options));
  return std::make_unique<SlotRing>(std::move(layers), std::move(bases), slot_bytes, std::move(engine),
                                    RingOptions{options.prefetch != 0, options.poison != 0});
}

}  // namespace

int nybble_register_owner(const char* name, const char* const* weights, int32_t count, int64_t* uid) {
  return run_recorded([&] {
    require(name, "name");
    require_count(count, "count");
    if (count > 0) require(weights, "weights");
    require(uid, "uid") = register_owner(name, std::vector<std::string>(weights, weights + count));
  });
}
void nybble_forget_owner(int64_t uid) { forget_owner(uid); }

int nybble_register_slot(const void* const* bases, const int64_t* bytes, int32_t count, int64_t* slot) {
  return run_recorded([&] {
    require_count(count, "count");
    std::vector<ByteRange> ranges;
    for (int32_t i = 0; i < count; i++) ranges.push_back({(&require(bases, "bases"))[i], (&require(bytes, "bytes"))[i]});
    require(slot, "slot") = register_slot(ranges);
  });
}
void nybble_unregister_slot(int64_t slot) { unregister_slot(slot); }

int nybble_begin_fill(int64_t slot, int32_t* read_after_release) {
  return run_recorded([&] { require(read_after_release, "read_after_release") = begin_fill(slot) ? 1 : 0; });
}
int nybble_set_owner(int64_t slot, int64_t uid) {
  return run_recorded([&] { set_owner(slot, uid); });
}
int nybble_release_slot(int64_t slot) {
  return run_recorded([&] { release_slot(slot); });
}
int nybble_slot_owner(int64_t slot, int64_t* owner, uint64_t* generation, int32_t* read_after_release) {
  return run_recorded([&] {
    const SlotOwner found = slot_owner(slot);
    require(owner, "owner") = found.owner;
    require(generation, "generation") = found.generation;
    require(read_after_release, "read_after_release") = found.read_after_release ? 1 : 0;
  });
}
int nybble_verify_owner(int64_t uid, const void* const* pointers, int32_t count) {
  return run_recorded([&] {
    require_count(count, "count");
    if (count > 0) require(pointers, "pointers");
    verify_owner(uid, pointers, count);
  });
}

int nybble_arena_new(nybble_arena** arena) {
  return run_recorded([&] { hand_over(arena, "arena", [] { return nybble_arena{std::make_shared<HostArena>()}; }); });
}
int nybble_arena_new_shared(nybble_arena** arena, int32_t* file) {
  return run_recorded([&] {
    require(file, "file");
    hand_over(arena, "arena", [] { return nybble_arena{HostArena::shared()}; });
    *file = (*arena)->arena->shared_file();
  });
}
int nybble_arena_attach(int32_t file, nybble_arena** arena) {
  return run_recorded([&] {
    if (file < 0) fail(ErrorKind::kValue, "file is ", file, ", expected an open descriptor");
    hand_over(arena, "arena", [&] { return nybble_arena{HostArena::attach(file)}; });
  });
}
void nybble_arena_free(nybble_arena* arena) { delete arena; }

int nybble_arena_add_layer(nybble_arena* arena, const char* const* names, const int64_t* bytes, int32_t parts, int32_t* layer,
                           int32_t* layout, int64_t* offsets) {
  return run_recorded([&] {
    HostArena& host = *require(arena, "arena").arena;
    require_count(parts, "parts");
    std::vector<ArenaPart> wanted;
    for (int32_t i = 0; i < parts; i++) wanted.push_back({(&require(names, "names"))[i], (&require(bytes, "bytes"))[i], 0});
    require(layer, "layer") = host.add_layer(wanted);
    require(layout, "layout") = host.layout_index(*layer);
    for (int32_t i = 0; i < parts; i++) (&require(offsets, "offsets"))[i] = host.layout(*layout).parts[i].offset;
  });
}
int nybble_arena_fill(nybble_arena* arena, int32_t layer, int32_t part, int64_t offset, const void* data, int64_t bytes) {
  return run_recorded([&] {
    if (bytes < 0) fail(ErrorKind::kValue, "bytes is ", bytes, ", expected none below 0");
    if (bytes > 0 && data == nullptr) fail(ErrorKind::kValue, "data is null, expected ", bytes, " bytes");
    require(arena, "arena").arena->fill(layer, part, offset, {static_cast<const std::byte*>(data), static_cast<size_t>(bytes)});
  });
}
int nybble_checkpoint_open(const char* path, nybble_checkpoint** checkpoint) {
  return run_recorded([&] {
    require(path, "path");
    hand_over(checkpoint, "checkpoint", [&] { return nybble_checkpoint{Checkpoint(path)}; });
  });
}
void nybble_checkpoint_close(nybble_checkpoint* checkpoint) { delete checkpoint; }
int nybble_arena_fill_tensor(nybble_arena* arena, int32_t layer, int32_t part, const nybble_checkpoint* checkpoint, const char* tensor) {
  return run_recorded([&] {
    require(tensor, "tensor");
    fill_from(*require(arena, "arena").arena, layer, part, require(checkpoint, "checkpoint").checkpoint, tensor);
  });
}
int nybble_arena_part(nybble_arena* arena, int32_t layer, int32_t part, void** data, int64_t* bytes) {
  return run_recorded([&] {
    const std::span<std::byte> found = require(arena, "arena").arena->part(layer, part);
    require(data, "data") = found.data();
    require(bytes, "bytes") = static_cast<int64_t>(found.size());
  });
}
int nybble_arena_size(nybble_arena* arena, int32_t* layers, int64_t* bytes, int64_t* largest_layer_bytes) {
  return run_recorded([&] {
    const HostArena& host = *require(arena, "arena").arena;
    require(layers, "layers") = host.layers();
    require(bytes, "bytes") = host.bytes();
    require(largest_layer_bytes, "largest_layer_bytes") = host.largest_layer_bytes();
  });
}

int nybble_arena_require_memory(nybble_arena* arena) {
  return run_recorded([&] { require(arena, "arena").arena->require_memory(); });
}
int nybble_arena_pin(nybble_arena* arena, int64_t* pinned_bytes, const char** reason) {
  static thread_local std::string kept;
  return run_recorded([&] {
    PinReport report = require(arena, "arena").arena->pin(make_cuda_host_locker());
    kept = std::move(report.reason);
    require(pinned_bytes, "pinned_bytes") = report.bytes;
    require(reason, "reason") = kept.c_str();
  });
}

int nybble_ring_new(nybble_arena* arena, const int64_t* uids, void* const* slots, int32_t window, int64_t slot_bytes,
                    const nybble_ring_options* options, nybble_ring** ring) {
  return run_recorded([&] {
    const auto& host = require(arena, "arena").arena;
    require_count(window, "window");
    require(uids, "uids");
    require(slots, "slots");
    hand_over(ring, "ring", [&] {
      return nybble_ring{host, make_ring(*host, uids, slots, window, slot_bytes, require(options, "options"))};
    });
  });
}
void nybble_ring_free(nybble_ring* ring) { delete ring; }

int nybble_ring_acquire(nybble_ring* ring, int32_t layer, int32_t order, void* compute_stream, int64_t timeout_ms, int32_t* landed,
                        uint64_t* refilled) {
  return run_recorded([&] {
    if (order < 0 || order > 2) fail(ErrorKind::kValue, "order ", order, ", expected 0 (forward), 1 (backward) or 2 (repeat)");
    const std::chrono::milliseconds timeout(timeout_ms);
    require(landed, "landed") =
        require(ring, "ring").ring->acquire(layer, static_cast<Order>(order), compute_stream, timeout, refilled) ? 1 : 0;
  });
}
int nybble_ring_release(nybble_ring* ring, int32_t layer, void* compute_stream) {
  return run_recorded([&] { require(ring, "ring").ring->release(layer, compute_stream); });
}
int nybble_ring_reset(nybble_ring* ring) {
  return run_recorded([&] { require(ring, "ring").ring->reset(); });
}
int nybble_ring_copy_stream(nybble_ring* ring, void** copy_stream) {
  return run_recorded([&] { require(copy_stream, "copy_stream") = require(ring, "ring").ring->copy_stream(); });
}
int nybble_ring_status(nybble_ring* ring, int32_t slot, nybble_slot_status* status) {
  return run_recorded([&] {
    const SlotStatus found = require(ring, "ring").ring->status(slot);
    require(status, "status") = {static_cast<int32_t>(found.state), found.layer, found.owner.owner, found.owner.generation};
  });
}
int nybble_ring_get_stats(nybble_ring* ring, nybble_ring_stats* stats) {
  return run_recorded([&] {
    const RingStats found = require(ring, "ring").ring->stats();
    require(stats, "stats") = {found.visits, found.hits, found.refills, found.refill_bytes, found.cancelled, found.failed};
  });
}
