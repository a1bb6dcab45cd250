#include "nybble/host_arena.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "core/parallel.h"
#include "core/posix.h"
#include "nybble/stream.h"
#include "stream/host_pages.h"

namespace nybble {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Written ranges of a part, merged: [begin] -> end.
class Coverage {
 public:
  void add(int64_t begin, int64_t end) {
    auto next = ranges_.upper_bound(begin);
    if (next != ranges_.begin() && std::prev(next)->second >= begin) next = std::prev(next);
    while (next != ranges_.end() && next->first <= end) {
      begin = std::min(begin, next->first);
      end = std::max(end, next->second);
      next = ranges_.erase(next);
    }
    ranges_[begin] = end;
  }
  bool covers(int64_t bytes) const { return ranges_.size() == 1 && ranges_.begin()->first == 0 && ranges_.begin()->second == bytes; }

 private:
  std::map<int64_t, int64_t> ranges_;
};

struct Layer {
  int layout = 0;
  std::unique_ptr<HostPages> blob;
  std::vector<Coverage> written;  // one a part
};

bool same_shape(const LayerLayout& layout, std::span<const ArenaPart> parts) {
  return std::equal(layout.parts.begin(), layout.parts.end(), parts.begin(), parts.end(),
                    [](const ArenaPart& a, const ArenaPart& b) { return a.name == b.name && a.bytes == b.bytes; });
}

LayerLayout make_layout(std::span<const ArenaPart> parts) {
  LayerLayout layout;
  for (const ArenaPart& part : parts) {
    if (part.bytes <= 0) fail(ErrorKind::kValue, "part ", part.name, " of a layer has ", part.bytes, " bytes, expected at least one");
    for (const ArenaPart& before : layout.parts) {
      if (before.name == part.name) fail(ErrorKind::kValue, "part ", part.name, " is named twice in a layer, expected distinct names");
    }
    layout.parts.push_back({part.name, part.bytes, layout.bytes});
    layout.bytes = round_up(layout.bytes + part.bytes, kViewAlignment);
  }
  layout.bytes = round_up(layout.bytes, kLayerAlignment);
  return layout;
}

}  // namespace

struct HostArena::Impl {
  std::unique_ptr<SharedFile> file;  // null: private
  std::vector<std::unique_ptr<LayerLayout>> layouts;
  std::vector<Layer> layers;
  int64_t bytes = 0;

  Layer& at(int layer) {
    if (layer < 0 || layer >= static_cast<int>(layers.size()))
      fail(ErrorKind::kValue, "layer ", layer, " of the host arena, expected 0 to ", layers.size() - 1);
    return layers[layer];
  }
  const ArenaPart& part(int layer, int part) {
    const LayerLayout& layout = *layouts[at(layer).layout];
    if (part < 0 || part >= static_cast<int>(layout.parts.size()))
      fail(ErrorKind::kValue, "part ", part, " of layer ", layer, ", expected 0 to ", layout.parts.size() - 1);
    return layout.parts[part];
  }
};

HostArena::HostArena() : impl_(std::make_unique<Impl>()) {}
HostArena::~HostArena() = default;

std::unique_ptr<HostArena> HostArena::shared() {
  auto arena = std::make_unique<HostArena>();
  arena->impl_->file = std::make_unique<SharedFile>();
  return arena;
}

std::unique_ptr<HostArena> HostArena::attach(int file) {
  auto arena = std::make_unique<HostArena>();
  arena->impl_->file = std::make_unique<SharedFile>(file);
  return arena;
}

int HostArena::shared_file() const { return impl_->file ? impl_->file->file() : -1; }

int HostArena::add_layer(std::span<const ArenaPart> parts) {
  if (parts.empty()) fail(ErrorKind::kValue, "a layer of the host arena needs at least one part, found none");
  auto& layouts = impl_->layouts;
  const auto found = std::find_if(layouts.begin(), layouts.end(), [&](const auto& layout) { return same_shape(*layout, parts); });
  const auto index = static_cast<int>(found - layouts.begin());
  if (found == layouts.end()) layouts.push_back(std::make_unique<LayerLayout>(make_layout(parts)));
  Layer layer;
  layer.layout = index;
  layer.blob = std::make_unique<HostPages>(layouts[index]->bytes, impl_->file.get());
  layer.written.resize(parts.size());
  if (impl_->file && impl_->file->attached()) {
    for (size_t i = 0; i < parts.size(); i++) layer.written[i].add(0, parts[i].bytes);
  }
  impl_->layers.push_back(std::move(layer));
  impl_->bytes += layouts[index]->bytes;
  return layers() - 1;
}

void HostArena::fill(int layer, int part, int64_t offset, std::span<const std::byte> bytes) {
  const ArenaPart& target = impl_->part(layer, part);
  const auto count = static_cast<int64_t>(bytes.size());
  if (offset < 0 || count > target.bytes || offset > target.bytes - count)
    fail(ErrorKind::kValue, "layer ", layer, ", part ", target.name, ": ", count, " bytes at ", offset, " do not fit, the part has ",
         target.bytes);
  if (impl_->file && impl_->file->attached())
    fail(ErrorKind::kValue, "layer ", layer, " belongs to another process's host arena, which alone fills it");
  std::byte* const to = impl_->at(layer).blob->data() + target.offset + offset;
  parallel_for(count, int64_t{8} << 20, [&](int64_t begin, int64_t end) { std::memcpy(to + begin, bytes.data() + begin, end - begin); });
  if (count > 0) impl_->at(layer).written[part].add(offset, offset + count);
}

void HostArena::require_complete(int layer) const {
  const Layer& found = impl_->at(layer);
  const LayerLayout& layout = *impl_->layouts[found.layout];
  for (size_t i = 0; i < layout.parts.size(); i++) {
    if (!found.written[i].covers(layout.parts[i].bytes))
      fail(ErrorKind::kValue, "layer ", layer, ", part ", layout.parts[i].name, ": not all of its ", layout.parts[i].bytes,
           " bytes have been filled; fill every part before streaming");
  }
}

int HostArena::layers() const { return static_cast<int>(impl_->layers.size()); }
int HostArena::layout_index(int layer) const { return impl_->at(layer).layout; }
int HostArena::layouts() const { return static_cast<int>(impl_->layouts.size()); }

const LayerLayout& HostArena::layout(int index) const {
  if (index < 0 || index >= layouts()) fail(ErrorKind::kValue, "layout ", index, " of the host arena, expected 0 to ", layouts() - 1);
  return *impl_->layouts[index];
}

std::span<const std::byte> HostArena::blob(int layer) const {
  const Layer& found = impl_->at(layer);
  return {found.blob->data(), static_cast<size_t>(impl_->layouts[found.layout]->bytes)};
}

std::span<std::byte> HostArena::part(int layer, int part) {
  const ArenaPart& found = impl_->part(layer, part);
  return {impl_->at(layer).blob->data() + found.offset, static_cast<size_t>(found.bytes)};
}

void HostArena::require_memory() const {
  if (impl_->file && impl_->file->attached()) return;  // the bytes are there
  const posix::SystemLimits limits = posix::system_limits();
  const bool group = limits.group_available_bytes >= 0 && limits.group_available_bytes < limits.available_bytes;
  const int64_t available = group ? limits.group_available_bytes : limits.available_bytes;
  if (bytes() > available)
    fail(ErrorKind::kOutOfMemory, "the streamed layers need ", bytes(), " bytes of host memory, ", available, " are available in this ",
         group ? "control group" : "system", "; free memory, raise the limit, or stream a smaller model");
}

PinReport HostArena::pin(std::shared_ptr<HostLocker> locker) {
  PinReport report;
  for (const Layer& layer : impl_->layers) {
    if (!layer.blob->pinned()) report.reason = layer.blob->pin(locker);
    if (!report.reason.empty()) break;
    report.bytes += impl_->layouts[layer.layout]->bytes;
  }
  return report;
}

int64_t HostArena::bytes() const { return impl_->bytes; }

int64_t HostArena::largest_layer_bytes() const {
  int64_t largest = 0;
  for (const auto& layout : impl_->layouts) largest = std::max(largest, layout->bytes);
  return largest;
}

}  // namespace nybble
