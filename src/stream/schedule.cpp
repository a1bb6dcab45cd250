#include "nybble/stream.h"

namespace nybble {

int next_layer(int layer, int layers, Order order) {
  switch (order) {
    case Order::kForward:
      return layer + 1 < layers ? layer + 1 : -1;
    case Order::kBackward:
      return layer - 1;
    case Order::kRepeat:
      return (layer + 1) % layers;
  }
  fail(ErrorKind::kValue, "order ", static_cast<int>(order), ", expected 0 (forward), 1 (backward) or 2 (repeat)");
}

}  // namespace nybble
