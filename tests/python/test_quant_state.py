import pytest
import torch

import nybble

from .reference import quantised

FIELDS = ("absmax", "shape", "code", "dtype", "blocksize", "quant_type", "offset", "state2", "nested")


def test_fields_carry_bitsandbytes_names_and_can_be_assigned():
    _, state = quantised(48, 64)
    for holder in (state, state.state2):
        for field in FIELDS:
            setattr(holder, field, getattr(holder, field))
    functional = pytest.importorskip("bitsandbytes").functional
    _, theirs = functional.quantize_4bit(torch.randn(48, 64), quant_type="nf4", compress_statistics=True)
    for ours, reference in ((state, theirs), (state.state2, theirs.state2)):
        assert set(FIELDS) <= set(vars(reference)) and set(vars(ours)) >= set(FIELDS)
    for tensor in ("absmax", "offset", "code"):
        ours, reference = getattr(state, tensor), getattr(theirs, tensor)
        assert (ours.dtype, ours.shape) == (reference.dtype, reference.shape)


def test_bitsandbytes_accepts_our_state():
    functional = pytest.importorskip("bitsandbytes").functional
    packed, state = quantised(48, 64)
    assert torch.equal(functional.dequantize_4bit(packed, state), nybble.dequantize_4bit(packed, state))


def test_an_assigned_field_is_read_by_the_next_call():
    packed, state = quantised(48, 64, nested=False)
    x = torch.randn(3, 64).bfloat16()
    before = nybble.linear(x, packed, state)
    state.absmax = state.absmax * 2
    assert torch.equal(nybble.linear(x, packed, state), before * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offset_and_tables_loaded_under_a_16_bit_default_dtype_are_taken_as_they_are(dtype, device):
    packed, state = quantised(48, 64, device=device)
    x = torch.randn(3, 64, device=device).bfloat16()
    state.offset = state.offset.to(dtype)
    state.code = state.code.to(dtype)  # not read: quant_type names the table
    y = nybble.linear(x, packed, state)
    state.offset = state.offset.float()
    state.code = None
    assert torch.equal(nybble.linear(x, packed, state), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_a_16_bit_nested_dtype_are_rounded_as_upstream_rounds_them(dtype, device):
    functional = pytest.importorskip("bitsandbytes").functional
    dense = torch.randn(64, 256, device=device).bfloat16()
    packed, state = functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
    state.state2.dtype = dtype
    assert torch.equal(nybble.dequantize_4bit(packed, state), functional.dequantize_4bit(packed, state))


def test_to_moves_every_tensor(device):
    packed, state = quantised(48, 64)
    state.to(device)
    tensors = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    assert all(tensor.device.type == device.type for tensor in tensors)
    assert nybble.dequantize_4bit(packed.to(device), state).device.type == device.type


def test_repr_says_what_it_is():
    assert repr(quantised(48, 64)[1]) == "QuantState(nf4, (48, 64), blocksize=64, nested scales, torch.bfloat16)"
