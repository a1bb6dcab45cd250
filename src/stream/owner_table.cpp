// The process-wide table behind verify_owner(): address ranges -> slots -> owners. Readers take no lock: they announce themselves in a
// counter and read an immutable snapshot; a writer publishes a new snapshot and frees old ones only when it has seen no reader.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "nybble/stream.h"

namespace nybble {
namespace {

struct Slot {
  std::atomic<int64_t> owner{kNobody};
  std::atomic<uint64_t> generation{0};
  std::atomic<bool> read_after_release{false};
};

struct Entry {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  int64_t id = 0;
  std::shared_ptr<Slot> slot;
};

// Ranges by ascending address, none overlapping.
struct Snapshot {
  std::vector<Entry> entries;

  const Entry* find(const void* pointer) const {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const auto after = std::upper_bound(entries.begin(), entries.end(), address, [](uintptr_t a, const Entry& e) { return a < e.begin; });
    if (after == entries.begin()) return nullptr;
    const Entry& entry = *(after - 1);
    return address < entry.end ? &entry : nullptr;
  }
};

class OwnerTable {
 public:
  int64_t add(std::span<const ByteRange> ranges);
  void remove(int64_t id) noexcept;
  std::shared_ptr<Slot> slot(int64_t id) const;
  void verify(int64_t uid, const void* const* pointers, int count);

 private:
  void publish(std::unique_ptr<Snapshot> next);

  mutable std::mutex mutex_;  // writers
  std::map<int64_t, std::shared_ptr<Slot>> slots_;
  int64_t next_id_ = 0;
  std::vector<std::unique_ptr<const Snapshot>> retired_;
  std::unique_ptr<const Snapshot> owned_ = std::make_unique<Snapshot>();
  std::atomic<const Snapshot*> current_{owned_.get()};
  std::atomic<int64_t> readers_{0};
};

class Names {
 public:
  int64_t add(const std::string& owner, std::span<const std::string> weights) {
    if (static_cast<int64_t>(weights.size()) > kWeightsPerOwner)
      fail(ErrorKind::kValue, "owner ", owner, " has ", weights.size(), " weights, at most ", kWeightsPerOwner, " are allowed");
    const std::lock_guard lock(mutex_);
    const int64_t uid = next_++ * kWeightsPerOwner;
    names_[uid] = {owner, {weights.begin(), weights.end()}};
    return uid;
  }
  void remove(int64_t uid) noexcept {
    const std::lock_guard lock(mutex_);
    names_.erase(uid);
  }
  std::string owner(int64_t uid) const {
    const std::lock_guard lock(mutex_);
    const auto found = names_.find(uid);
    return found == names_.end() ? "uid " + std::to_string(uid) + " (not registered)" : found->second.first;
  }
  std::string weight(int64_t uid) const {
    const std::lock_guard lock(mutex_);
    const auto found = uid < 0 ? names_.end() : names_.find(uid - uid % kWeightsPerOwner);
    if (found == names_.end()) return "uid " + std::to_string(uid) + " (not registered)";
    const auto& [name, weights] = found->second;
    const int64_t index = uid % kWeightsPerOwner;
    return index < static_cast<int64_t>(weights.size()) ? name + "." + weights[index] : name;
  }

 private:
  mutable std::mutex mutex_;
  int64_t next_ = 1;  // uid 0 names nothing: a zeroed uid tensor never passes
  std::map<int64_t, std::pair<std::string, std::vector<std::string>>> names_;
};

// Never destroyed: streams and threads of an embedding interpreter may outlive static destructors.
OwnerTable& table() {
  static auto* const instance = new OwnerTable;
  return *instance;
}
Names& names() {
  static auto* const instance = new Names;
  return *instance;
}

class Reading {
 public:
  explicit Reading(std::atomic<int64_t>& readers) : readers_(readers) { readers_.fetch_add(1); }
  ~Reading() { readers_.fetch_sub(1); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  std::atomic<int64_t>& readers_;
};

void OwnerTable::publish(std::unique_ptr<Snapshot> next) {
  retired_.push_back(std::move(owned_));
  owned_ = std::move(next);
  current_.store(owned_.get());
  // Whoever enters after this load sees the new snapshot (all operations are sequentially consistent).
  if (readers_.load() == 0) retired_.clear();
}

int64_t OwnerTable::add(std::span<const ByteRange> ranges) {
  if (ranges.empty()) fail(ErrorKind::kValue, "a slot needs at least one range of bytes, found none");
  const std::lock_guard lock(mutex_);
  auto next = std::make_unique<Snapshot>(*owned_);
  const auto slot = std::make_shared<Slot>();
  const int64_t id = next_id_;
  for (const ByteRange& range : ranges) {
    const auto begin = reinterpret_cast<uintptr_t>(range.base);
    if (begin == 0 || range.bytes <= 0)
      fail(ErrorKind::kValue, "slot range at ", range.base, " has ", range.bytes,
           " bytes, expected a non-null address and at least one byte");
    const uintptr_t end = begin + static_cast<uintptr_t>(range.bytes);
    for (const Entry& entry : next->entries) {
      if (begin < entry.end && entry.begin < end)
        fail(ErrorKind::kValue, "slot range at ", range.base, " (", range.bytes, " bytes) overlaps a range of slot ", entry.id,
             "; unregister that slot first, or register the storage once and name its weights");
    }
    next->entries.push_back({begin, end, id, slot});
  }
  std::sort(next->entries.begin(), next->entries.end(), [](const Entry& a, const Entry& b) { return a.begin < b.begin; });
  slots_[id] = slot;
  next_id_++;
  publish(std::move(next));
  return id;
}

void OwnerTable::remove(int64_t id) noexcept {
  const std::lock_guard lock(mutex_);
  if (slots_.erase(id) == 0) return;
  auto next = std::make_unique<Snapshot>(*owned_);
  std::erase_if(next->entries, [id](const Entry& entry) { return entry.id == id; });
  publish(std::move(next));
}

std::shared_ptr<Slot> OwnerTable::slot(int64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = slots_.find(id);
  if (found == slots_.end()) fail(ErrorKind::kValue, "slot ", id, " is not registered; expected an id from register_slot()");
  return found->second;
}

constexpr const char* kAdvice =
    "enable gradient checkpointing on every layer, or use a larger window (window >= the number of layers keeps every layer)";

[[noreturn]] void fail_stale(int64_t uid, const Entry& entry, int64_t owner, const char* when) {
  const std::string holds = owner == kNobody ? "nothing (empty, or a refill has been issued and not been acquired)" : names().owner(owner);
  fail(ErrorKind::kStaleWeight, "weight ", names().weight(uid), " expected, slot holds ", holds, " (slot ", entry.id, ", generation ",
       entry.slot->generation.load(), when, "). Remedy: ", kAdvice);
}

void OwnerTable::verify(int64_t uid, const void* const* pointers, int count) {
  const Reading reading(readers_);
  const Snapshot& snapshot = *current_.load();
  const int64_t wanted = uid - uid % kWeightsPerOwner;
  for (int i = 0; i < count; i++) {
    if (pointers[i] == nullptr) continue;
    const Entry* const entry = snapshot.find(pointers[i]);
    if (entry == nullptr)
      fail(
          ErrorKind::kStaleWeight, "weight ", names().weight(uid), " left the ring: address ", pointers[i],
          " lies in no registered slot. Expected bytes of the slot that holds it. Merging, deepcopy, .to(), load_state_dict and unstream() "
          "take weights out of their slots; use the module of a streamed model as it is, or drop its uid");
    if (!entry->slot->read_after_release.load(std::memory_order_relaxed)) entry->slot->read_after_release.store(true);
    const int64_t owner = entry->slot->owner.load(std::memory_order_acquire);
    if (owner != wanted || wanted <= 0) fail_stale(uid, *entry, owner, "");
  }
}

}  // namespace

int64_t register_owner(const std::string& name, std::span<const std::string> weights) { return names().add(name, weights); }
void forget_owner(int64_t uid) noexcept { names().remove(uid); }
std::string weight_name(int64_t uid) { return names().weight(uid); }

int64_t register_slot(std::span<const ByteRange> ranges) { return table().add(ranges); }
void unregister_slot(int64_t slot) noexcept { table().remove(slot); }

bool begin_fill(int64_t slot) {
  const auto entry = table().slot(slot);
  entry->owner.store(kNobody);
  entry->generation.fetch_add(1);
  return entry->read_after_release.exchange(false);
}

void set_owner(int64_t slot, int64_t uid) { table().slot(slot)->owner.store(uid - uid % kWeightsPerOwner, std::memory_order_release); }
void release_slot(int64_t slot) { table().slot(slot)->read_after_release.store(false); }

SlotOwner slot_owner(int64_t slot) {
  const auto entry = table().slot(slot);
  return {entry->owner.load(), entry->generation.load(), entry->read_after_release.load()};
}

void verify_owner(int64_t uid, const void* const* pointers, int count) { table().verify(uid, pointers, count); }

}  // namespace nybble
