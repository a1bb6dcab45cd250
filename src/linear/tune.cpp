#include "nybble/tune.h"

#include <algorithm>
#include <tuple>

#include "nybble/error.h"

namespace nybble {
namespace {

auto key(const TuneEntry& e) { return std::tie(e.device, e.direction, e.dtype, e.n, e.k, e.m_min, e.m_max, e.path); }

bool same_shape(const TuneEntry& a, const TuneEntry& b) {
  return std::tie(a.device, a.direction, a.dtype, a.n, a.k) == std::tie(b.device, b.direction, b.dtype, b.n, b.k);
}

std::string text(const TuneEntry& e) {
  std::string out = e.device;
  for (const int64_t value : {int64_t(e.direction), int64_t(e.dtype), e.n, e.k, e.m_min, e.m_max, int64_t(e.path)}) {
    out += '|';
    out += std::to_string(value);
  }
  return out + '\n';
}

}  // namespace

void TuneTable::add(const TuneEntry& entry) {
  if (entry.device.empty()) fail(ErrorKind::kValue, "a tune entry without a device name; name the card that was measured");
  if (entry.n < 1 || entry.k < 1 || entry.m_min < 1 || entry.m_max < entry.m_min) {
    fail(ErrorKind::kValue, "tune entry for n ", entry.n, ", k ", entry.k, ", m ", entry.m_min, "..", entry.m_max,
         ", expected n, k >= 1 and 1 <= m_min <= m_max");
  }
  if (entry.path == LinearPath::kNone || entry.path == LinearPath::kCpu) {
    fail(ErrorKind::kValue, "tune entry names the path ", name(entry.path), ", expected dequant, row, portable, small_m or hopper");
  }
  for (const TuneEntry& other : entries_) {
    if (same_shape(entry, other) && entry.m_min <= other.m_max && other.m_min <= entry.m_max) {
      fail(ErrorKind::kValue, "tune entry for m ", entry.m_min, "..", entry.m_max, " overlaps the one for m ", other.m_min, "..",
           other.m_max, " of the same shape; remove one of them");
    }
  }
  entries_.insert(std::upper_bound(entries_.begin(), entries_.end(), entry, [](const auto& a, const auto& b) { return key(a) < key(b); }),
                  entry);
}

const TuneEntry* TuneTable::find(const LinearProblem& problem, const DeviceModel& device) const {
  for (const TuneEntry& e : entries_) {
    if (e.device == device.name && e.direction == problem.direction && e.dtype == problem.dtype && e.n == problem.n && e.k == problem.k &&
        e.m_min <= problem.m && problem.m <= e.m_max) {
      return &e;
    }
  }
  return nullptr;
}

uint64_t TuneTable::hash() const {
  if (entries_.empty()) return 0;
  uint64_t h = 0xcbf29ce484222325u;
  for (const TuneEntry& e : entries_) {
    for (const unsigned char c : text(e)) h = (h ^ c) * 0x100000001b3u;
  }
  return h;
}

}  // namespace nybble
