// Finds the layers of a store and checks that each is one aligned run of bytes (layout.h).
#include <algorithm>
#include <map>

#include "nybble/store.h"
#include "store/layout.h"
#include "store/names.h"
#include "store/quantized_keys.h"

namespace nybble {
namespace {

constexpr const char* kRemedy = "; lay the checkpoint out with `nybble quantize SRC DST`, which keeps 4-bit weights as they are";

struct NaturalOrder {
  bool operator()(const std::string& a, const std::string& b) const { return natural_less(a, b); }
};

// Walks the views of a layer in the order in which they must lie.
class LayerWalk {
 public:
  LayerWalk(const Checkpoint& checkpoint, std::string name, const TensorView& first) : checkpoint_(checkpoint) {
    layer_.name = std::move(name);
    layer_.file = checkpoint.file_of(first).path();
    layer_.offset = first.file_offset;
    if (layer_.offset % kLayerAlignment != 0) {
      fail(ErrorKind::kFormat, layer_.file.string(), ": layer \"", layer_.name, "\" begins at byte ", layer_.offset,
           ", expected a multiple of ", kLayerAlignment, kRemedy);
    }
  }

  // Returns where the view lies, from the start of the layer.
  int64_t next(const std::string& tensor_name) {
    const TensorView& view = *checkpoint_.find(tensor_name);
    const int64_t expected = (layer_.bytes + kViewAlignment - 1) / kViewAlignment * kViewAlignment;
    const auto& file = checkpoint_.file_of(view).path();
    if (file != layer_.file || view.file_offset - layer_.offset != expected) {
      fail(ErrorKind::kFormat, file.string(), ": ", tensor_name, " lies at byte ", view.file_offset, ", expected byte ",
           layer_.offset + expected, " of ", layer_.file.string(), kRemedy);
    }
    layer_.bytes = expected + static_cast<int64_t>(view.bytes.size());
    return expected;
  }

  StoredLayer layer_;

 private:
  const Checkpoint& checkpoint_;
};

}  // namespace

std::vector<StoredLayer> stored_layers(const Checkpoint& checkpoint, const std::vector<QuantizedTensor>& weights) {
  std::map<std::string, std::vector<size_t>, NaturalOrder> by_layer;
  for (size_t i = 0; i < weights.size(); i++) by_layer[std::string(layer_of(weights[i].name))].push_back(i);
  std::vector<StoredLayer> layers;
  for (auto& [name, members] : by_layer) {
    const auto place = [&](size_t i) { return checkpoint.find(weights[i].name)->file_offset; };
    std::sort(members.begin(), members.end(), [&](size_t a, size_t b) { return place(a) < place(b); });
    LayerWalk walk(checkpoint, name, *checkpoint.find(weights[members[0]].name));
    for (const size_t i : members) {
      StoredWeight stored{weights[i].name, walk.next(weights[i].name), walk.next(weights[i].name + kAbsmax), -1, i};
      if (weights[i].nested) stored.nested_absmax_offset = walk.next(weights[i].name + kNestedAbsmax);
      walk.layer_.weights.push_back(std::move(stored));
    }
    layers.push_back(std::move(walk.layer_));
  }
  return layers;
}

}  // namespace nybble
