"""What the tests compare with: float64 products of the exact 4-bit weights, written with torch alone."""

from __future__ import annotations

import torch

import nybble

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def quantised(n, k, *, dtype=torch.bfloat16, blocksize=64, quant_type="nf4", nested=True, device="cpu"):
    """A random weight [n, k] as (packed, state)."""
    dense = torch.randn(n, k, dtype=torch.float32).to(device, dtype)
    return nybble.quantize_4bit(dense, blocksize=blocksize, quant_type=quant_type, compress_statistics=nested)


def dequantised(packed, state, dtype=None):
    """The dense weight in float64, rounded to dtype (by default that of the state), from the definition."""
    n = state.shape.numel()
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1)[:n].long()
    scales = state.absmax
    if state.nested:
        blocks = torch.arange(scales.numel(), device=scales.device) // 256
        scales = state.state2.code[scales.long()] * state.state2.absmax[blocks] + state.offset
    scales = scales.repeat_interleave(state.blocksize)[:n]
    return (state.code[codes] * scales).to(dtype or state.dtype).double().view(state.shape)


def relative_error(value, exact):
    """Norm of the difference over the norm of exact; a NaN anywhere makes it NaN, which is below no limit."""
    return float((value.detach().double() - exact).norm() / exact.norm().clamp_min(1e-300))
