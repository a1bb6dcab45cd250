// Which tensors of a checkpoint a store keeps in 4 bits.
#pragma once

#include <vector>

#include "nybble/convert.h"
#include "nybble/store.h"
#include "store/layout.h"

namespace nybble {

// The files of the store, laid out: first what is outside numbered layers, then one file a layer, in natural order.
// Throws kValue when a pattern matches nothing or names a tensor that cannot be quantised.
std::vector<FilePlan> plan_files(const Checkpoint& source, const std::vector<QuantizedTensor>& prequantized,
                                 const QuantizeOptions& options);

}  // namespace nybble
