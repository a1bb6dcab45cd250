// Streaming: owner table, host arena, slot ring, schedule. No Python, no torch: the CPU engine and a CUDA engine drive one state machine.
// Pictures and ordering rules: docs/streaming.md.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nybble/error.h"
#include "nybble/host_arena.h"

namespace nybble {

// ---- Who owns which bytes -------------------------------------------------------------------------------------------------------

constexpr int64_t kNobody = -1;              // owner of a slot that holds no weight
constexpr int64_t kWeightsPerOwner = 65536;  // uids of one owner: uid of weight j = owner uid + j

// Names an owner (a decoder layer, or one weight of a trainer's own pool) and its weights; returns the owner's uid, a multiple of
// kWeightsPerOwner, never given out twice in a process. A single weight may use the owner's uid itself.
int64_t register_owner(const std::string& name, std::span<const std::string> weights);
void forget_owner(int64_t uid) noexcept;
std::string weight_name(int64_t uid);  // "<owner>.<weight>", or the number when it was never registered or is forgotten

struct ByteRange {
  const void* base = nullptr;
  int64_t bytes = 0;
};

// What a slot is at one moment. Copies of atomics: consistent only when no other thread changes the slot.
struct SlotOwner {
  int64_t owner = kNobody;
  uint64_t generation = 0;          // refills begun
  bool read_after_release = false;  // a verified read since the last release_slot()
};

// A recycled buffer (one range, or several that are refilled together). Starts owned by nobody. Throws kValue when a range is empty or
// overlaps a registered one. Ids are never reused.
int64_t register_slot(std::span<const ByteRange> ranges);
void unregister_slot(int64_t slot) noexcept;

// The refill protocol of a slot, in this order. begin_fill() comes before the refill's first byte: owner = nobody, generation + 1; true
// when the slot was read after its last release (the copy must then wait for everything enqueued now, not only for what was enqueued at
// release). set_owner() comes after the reader's stream has been told to wait for the copy. release_slot() says that what was enqueued so
// far is the last use; the owner stays, reads after it stay legal until the next begin_fill().
bool begin_fill(int64_t slot);
void set_owner(int64_t slot, int64_t uid);
void release_slot(int64_t slot);
SlotOwner slot_owner(int64_t slot);

// Checks before every launch that each pointer of a weight (null ones are skipped) lies in a slot whose owner is that of `uid`. A pointer
// outside every registered slot is an error of its own (the weight left the ring). Throws kStaleWeight. Thread safe, lock free to readers.
void verify_owner(int64_t uid, const void* const* pointers, int count);

// ---- Copy engine ----------------------------------------------------------------------------------------------------------------

using ComputeStream = void*;  // a cudaStream_t, or null on the CPU, where work is done when a call returns

struct CopyRequest {
  int slot = 0;
  int layer = 0;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t bytes = 0;
  bool wait_for_now = true;  // wait for all that compute holds now; false: for record_free() only
  bool poison = false;       // overwrite the slot with 0xFF first
};

// Moves layers into slots and orders the moves against compute. At most one refill a slot is under way. Called under the ring's lock.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;
  virtual void enter(ComputeStream) {}                            // first in every visit and release; throws when the stream can't take one
  virtual void record_free(int slot, ComputeStream compute) = 0;  // the "free" event
  virtual void start(const CopyRequest& request, ComputeStream compute) = 0;
  // Makes what follows on compute see the refill (the "ready" event). False: not landed within the timeout (engines that wait on the host).
  // Throws what made the copy fail; the slot's bytes are then undefined and no copy is under way.
  virtual bool wait_ready(int slot, ComputeStream compute, std::chrono::milliseconds timeout) = 0;
  virtual void cancel(int slot) noexcept = 0;  // nothing writes to the slot once this returns
  virtual ComputeStream copy_stream() const { return nullptr; }
};

struct CopyOptions {
  bool land_at_wait = false;           // start only when acquire waits: the latest legal moment
  std::chrono::microseconds delay{0};  // before each refill
  int64_t chunk_bytes = 0;             // of one copy; 0: the engine's default (CPU: 4 MiB, CUDA: a whole layer)
  // Called before bytes [begin, end) of a layer are copied (CUDA: enqueued, under the ring's lock); what it throws fails the refill there.
  std::function<void(int layer, int slot, int64_t begin, int64_t end)> observer;
};
// Plain memcpy on one background thread, chunk by chunk.
std::unique_ptr<CopyEngine> make_cpu_copy_engine(int slots, CopyOptions options = {});
// Slots are memory of CUDA device `device`; one asynchronous copy a refill on a stream of the engine's own, ordered by events, never by the
// host. Streams that visits run on must outlive the engine. Throws kUnsupported in a build without CUDA.
std::unique_ptr<CopyEngine> make_cuda_copy_engine(int device, int slots, CopyOptions options = {});

// ---- Schedule and ring ----------------------------------------------------------------------------------------------------------

// kRepeat is a forward that starts over after the last layer (evaluation, generation).
enum class Order : uint8_t { kForward = 0, kBackward = 1, kRepeat = 2 };
int next_layer(int layer, int layers, Order order);  // pure; -1: none

enum class SlotState : uint8_t { kEmpty = 0, kLoading, kHeld, kReleased };
const char* name(SlotState state);

struct RingLayer {
  int64_t uid = kNobody;  // the owner's
  std::span<const std::byte> bytes;
};

struct RingOptions {
  bool prefetch = true;
  bool poison = false;
};

struct SlotStatus {
  SlotState state = SlotState::kEmpty;
  int layer = -1;
  SlotOwner owner;
};

struct RingStats {
  int64_t visits = 0;   // acquires that succeeded
  int64_t hits = 0;     // of them, those whose layer was still in its slot
  int64_t refills = 0;  // issued
  int64_t refill_bytes = 0;
  int64_t cancelled = 0;  // refills given up before they were used
  int64_t failed = 0;
};

// Layer i lives in slot i mod slots. Thread safe; one visit at a time per slot. Correctness never depends on release().
class SlotRing {
 public:
  // slots: one buffer each of slot_bytes >= every layer. Layers' and slots' memory must outlive the ring.
  SlotRing(std::vector<RingLayer> layers, std::vector<std::byte*> slots, int64_t slot_bytes, std::unique_ptr<CopyEngine> engine,
           RingOptions options = {});
  ~SlotRing();
  SlotRing(const SlotRing&) = delete;
  SlotRing& operator=(const SlotRing&) = delete;

  // After true: what follows on compute reads `layer`, and the next layers of `order` are on their way into the other slots. False: the
  // bytes have not landed within the timeout, call again. Throws what made the refill fail (also when it was issued as a prefetch); the
  // slot is then empty and the next acquire tries again. refilled (may be null): |= bit s for each slot whose refill this call issued.
  bool acquire(int layer, Order order, ComputeStream compute, std::chrono::milliseconds timeout, uint64_t* refilled);
  void release(int layer, ComputeStream compute);
  void reset();  // stops refills and empties every slot
  SlotStatus status(int slot) const;
  RingStats stats() const;
  int slots() const;
  ComputeStream copy_stream() const;  // null on the CPU

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nybble
