import torch

import nybble


def test_linear_equals_a_float64_product_within_rounding(device):
    dense = torch.randn(96, 130, device=device, dtype=torch.bfloat16)
    packed, state = nybble.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
    x = torch.randn(5, 130, device=device, dtype=torch.bfloat16)
    y = nybble.linear(x, packed, state)
    expected = x.double() @ nybble.dequantize_4bit(packed, state).double().t()
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < 2**-8
