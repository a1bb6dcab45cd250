#include "simt/simt.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

SimtIndex threadIdx, blockIdx, gridDim;

namespace simt {
namespace {

struct Copy {
  uint32_t destination;
  const void* source;
  int total, valid;
};

constexpr size_t kStack = 256 << 10;

struct Fiber {
  jmp_buf resume;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false, blocked = false;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Warp {
  void* operands[32];
  int arrived = 0;
  const char* kind = nullptr;
};

struct Range {
  const char *begin, *end;
  bool write;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<Range> ranges;
std::vector<uint8_t> shared_written;
uint8_t* shared_memory;
size_t shared_size;
int current, at_barrier, alive;
jmp_buf scheduler;
ucontext_t first_context;
const std::function<void()>* kernel;
std::string failure;

void yield() {
  if (_setjmp(fibers[current].resume) == 0) _longjmp(scheduler, 1);
}

void entry() {
  (*kernel)();
  fibers[current].done = true;
  alive--;
  _longjmp(scheduler, 1);
}

void release_barrier_if_full() {
  if (alive == 0 || at_barrier < alive) return;
  at_barrier = 0;
  for (Fiber& fiber : fibers) fiber.blocked = false;
}

// Runs fiber `index` until it blocks or ends.
void run(int index) {
  current = index;
  threadIdx.x = static_cast<unsigned>(index);
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = fibers[index];
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  getcontext(&first_context);
  first_context.uc_stack.ss_sp = fiber.stack.get();
  first_context.uc_stack.ss_size = kStack;
  first_context.uc_link = nullptr;
  makecontext(&first_context, entry, 0);
  setcontext(&first_context);
}

void run_cta(int threads, std::mt19937_64& random) {
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
    fiber.started = fiber.done = fiber.blocked = false;
    fiber.open.clear();
    fiber.groups.clear();
  }
  warps.assign(threads / 32, Warp{});
  alive = threads;
  at_barrier = 0;
  std::vector<int> order(threads);
  for (int i = 0; i < threads; i++) order[i] = i;
  while (alive > 0) {
    std::shuffle(order.begin(), order.end(), random);
    bool progress = false;
    for (const int index : order) {
      if (fibers[index].done || fibers[index].blocked) continue;
      progress = true;
      run(index);
      if (!failure.empty()) throw std::runtime_error(failure);
      if (fibers[index].done) release_barrier_if_full();
    }
    if (!progress) throw std::runtime_error("deadlock: some threads wait at a barrier or collective that others never reach");
  }
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

void fail(const char* what) {
  failure = std::string(what) + " (thread " + std::to_string(current) + ", CTA " + std::to_string(blockIdx.x) + ")";
  _longjmp(scheduler, 1);
}

void launch(int grid, int threads, void* shared, size_t shared_bytes, uint64_t seed, const std::function<void()>& body) {
  std::mt19937_64 random(seed);
  kernel = &body;
  shared_memory = static_cast<uint8_t*>(shared);
  shared_size = shared_bytes;
  gridDim.x = static_cast<unsigned>(grid);
  failure.clear();
  for (int block = 0; block < grid; block++) {
    blockIdx.x = static_cast<unsigned>(block);
    std::memset(shared, 0xFF, shared_bytes);
    run_cta(threads, random);
  }
}

void allow(const void* begin, size_t bytes, bool write) {
  ranges.push_back({static_cast<const char*>(begin), static_cast<const char*>(begin) + bytes, write});
}

void clear_buffers() { ranges.clear(); }

void check_access(const void* pointer, size_t bytes, bool write) {
  const char* p = static_cast<const char*>(pointer);
  for (const Range& range : ranges) {
    if (range.begin <= p && p + bytes <= range.end && (range.write || !write)) return;
  }
  fail(write ? "a write outside every buffer" : "a read outside every buffer");
}

uint8_t* at_shared(uint32_t address, size_t bytes, size_t alignment) {
  if (address + bytes > shared_size) fail("a shared-memory access beyond the CTA's memory");
  if (address % alignment) fail("a misaligned shared-memory access");
  return shared_memory + address;
}

uint32_t shared_offset(const void* pointer) { return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - shared_memory); }

void barrier() {
  fibers[current].blocked = true;
  at_barrier++;
  release_barrier_if_full();
  yield();
}

void collective(const char* kind, void* operand, const std::function<void(void* const*)>& combine) {
  Warp& warp = warps[current / 32];
  if (warp.arrived && warp.kind != kind && std::strcmp(warp.kind, kind) != 0) fail("lanes of a warp at different collectives");
  warp.kind = kind;
  warp.operands[current % 32] = operand;
  if (++warp.arrived < 32) {
    fibers[current].blocked = true;
    return yield();
  }
  combine(warp.operands);
  warp.arrived = 0;
  for (int lane = 0; lane < 32; lane++) fibers[current / 32 * 32 + lane].blocked = false;
}

void copy_async(uint32_t destination, const void* source, int total, int valid) {
  uint8_t* to = at_shared(destination, total, total);
  if (valid) check_access(source, valid, false);
  if (valid && reinterpret_cast<uintptr_t>(source) % total) fail("a misaligned source of an asynchronous copy");
  std::memset(to, 0xFF, total);
  fibers[current].open.push_back({destination, source, total, valid});
}

void commit_copies() {
  fibers[current].groups.push_back(std::move(fibers[current].open));
  fibers[current].open.clear();
}

void wait_copies(int pending) {
  auto& groups = fibers[current].groups;
  while (static_cast<int>(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) {
      std::memset(shared_memory + copy.destination, 0, copy.total);
      if (copy.valid) std::memcpy(shared_memory + copy.destination, copy.source, copy.valid);
    }
    groups.pop_front();
  }
}

float round_16(float value, bool half) {
  if (half) return static_cast<float>(static_cast<_Float16>(value));
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7F800000) == 0x7F800000) return (bits & 0x007FFFFF) ? float_of(bits | 0x00400000) : value;
  return float_of((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000);
}

template <>
Float16<true>::Float16(float value) {
  const _Float16 rounded = static_cast<_Float16>(value);
  std::memcpy(&bits, &rounded, 2);
}
template <>
Float16<true>::operator float() const {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
template <>
Float16<false>::Float16(float value) : bits(static_cast<uint16_t>(bits_of(round_16(value, false)) >> 16)) {}
template <>
Float16<false>::operator float() const {
  return float_of(static_cast<uint32_t>(bits) << 16);
}

}  // namespace simt
