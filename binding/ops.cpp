// Schemas of the torch ops. They are public: a change of meaning is a new name. Fake kernels and autograd are registered from Python, where
// shapes may be symbolic. Enum codes are those of include/nybble/format.h and linear.h.
#include <torch/csrc/stable/library.h>

#include "codec_op.h"
#include "linear_op.h"

namespace {

// One weight: packed uint8 (or any dtype with these bytes) of [n][k]; absmax float32[blocks], or uint8[blocks] with the three nested
// tensors; code float32[16]; uid: int64 on the CPU, the name under which a slot must hold the weight.
#define WEIGHT "Tensor packed, Tensor absmax, Tensor code, Tensor? nested_absmax, Tensor? nested_code, Tensor? offset, "

STABLE_TORCH_LIBRARY(nybble, m) {
  // y[..., n] = x[..., k] W^T + bias, in the dtype of x.
  m.def("linear_4bit(Tensor x, " WEIGHT
        "Tensor? bias, Tensor? uid, int n, int k, int block_size, int quant_type, int state_dtype, int nested_dtype, int mode, "
        "bool batch_invariant) -> Tensor");
  // grad_x[..., k] = grad_y[..., n] W.
  m.def("linear_4bit_grad_input(Tensor grad_y, " WEIGHT
        "Tensor? uid, int n, int k, int block_size, int quant_type, int state_dtype, int nested_dtype, int mode, bool batch_invariant) -> "
        "Tensor");
  // W as [n, k].
  m.def("dequantize_4bit(" WEIGHT "Tensor? uid, int n, int k, int block_size, int quant_type, int nested_dtype, int out_dtype) -> Tensor");
  m.def("quantize_4bit(Tensor x, int block_size, int quant_type) -> (Tensor packed, Tensor absmax)");
  m.def("quantize_scales(Tensor absmax, Tensor offset, Tensor nested_code) -> (Tensor codes, Tensor nested_absmax)");
  m.def("absmax_mean(Tensor absmax) -> Tensor");
}
#undef WEIGHT

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("linear_4bit", &nybble::binding::linear_4bit);
  m.impl("linear_4bit_grad_input", &nybble::binding::linear_4bit_grad_input);
  m.impl("dequantize_4bit", &nybble::binding::dequantize_4bit_op);
  m.impl("quantize_4bit", &nybble::binding::quantize_4bit_op);
  m.impl("quantize_scales", &nybble::binding::quantize_scales_op);
  m.impl("absmax_mean", &nybble::binding::absmax_mean_op);
}

// The CUDA key is filled in CPU builds too, so that a CUDA tensor gets "built without CUDA" and not a dispatcher's message.
STABLE_TORCH_LIBRARY_IMPL(nybble, CPU, m) { register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(nybble, CUDA, m) { register_kernels(m); }

}  // namespace
