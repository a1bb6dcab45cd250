#include <map>

#include "core/posix.h"
#include "nybble/store.h"
#include "store/safetensors_header.h"

namespace nybble {

struct SafetensorsFile::Impl {
  std::filesystem::path path;
  posix::FileMap map;
  std::vector<TensorView> tensors;
  std::map<std::string_view, size_t> by_name;  // keys view into tensors
  std::map<std::string, std::string> metadata;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : impl_(new Impl{path, posix::FileMap(path), {}, {}, {}}) {
  const auto bytes = impl_->map.bytes();
  SafetensorsHeader header = parse_safetensors_header(bytes, path.string());
  impl_->metadata = std::move(header.metadata);
  impl_->tensors.reserve(header.tensors.size());
  for (auto& tensor : header.tensors) {
    const int64_t offset = header.data_start + tensor.begin;
    const auto view = bytes.subspan(static_cast<size_t>(offset), static_cast<size_t>(tensor.end - tensor.begin));
    impl_->tensors.push_back({std::move(tensor.name), std::move(tensor.dtype), std::move(tensor.shape), view, offset});
  }
  for (size_t i = 0; i < impl_->tensors.size(); i++) impl_->by_name[impl_->tensors[i].name] = i;
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::filesystem::path& SafetensorsFile::path() const { return impl_->path; }
const std::vector<TensorView>& SafetensorsFile::tensors() const { return impl_->tensors; }
const std::map<std::string, std::string>& SafetensorsFile::metadata() const { return impl_->metadata; }
void SafetensorsFile::release(std::span<const std::byte> bytes) const { impl_->map.release(bytes); }

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto found = impl_->by_name.find(name);
  return found == impl_->by_name.end() ? nullptr : &impl_->tensors[found->second];
}

}  // namespace nybble
