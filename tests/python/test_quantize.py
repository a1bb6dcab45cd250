import pytest
import torch

import nybble
from nybble.quant_state import BLOCK_SIZES, nested_table, table

from .reference import DTYPES, dequantised, quantised

functional = pytest.importorskip("bitsandbytes").functional


def same_bits(a, b):
    a_bytes, b_bytes = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a_bytes, b_bytes)


@pytest.mark.parametrize("blocksize", BLOCK_SIZES)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_nf4_bytes_of_bfloat16_equal_bitsandbytes(blocksize, nested, device):
    dense = (torch.randn(48, 512) * 3).bfloat16().to(device)
    theirs, state = functional.quantize_4bit(dense, blocksize=blocksize, quant_type="nf4", compress_statistics=nested)
    offset = state.offset if nested else None
    ours, our_state = nybble.quantize_4bit(
        dense, blocksize=blocksize, quant_type="nf4", compress_statistics=nested, offset=offset
    )
    assert same_bits(ours, theirs)
    assert same_bits(nybble.dequantize_4bit(ours, our_state), nybble.dequantize_4bit(theirs, state))
    if not nested:
        assert same_bits(our_state.absmax, state.absmax)
    elif device.type == "cuda":  # on the CPU bitsandbytes looks nested codes up in a coarse table
        assert same_bits(our_state.absmax, state.absmax) and same_bits(our_state.state2.absmax, state.state2.absmax)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("shape", [(48, 64), (33, 65), (5,), (2, 3, 4, 16)], ids=str)
def test_dequantize_equals_the_definition(shape, nested, quant_type, dtype, device):
    dense = torch.randn(*shape, device=device).to(dtype)
    packed, state = nybble.quantize_4bit(dense, quant_type=quant_type, compress_statistics=nested)
    back = nybble.dequantize_4bit(packed, state)
    assert back.shape == dense.shape and back.dtype == dtype
    assert torch.equal(back.double(), dequantised(packed, state))
    error = (back.double() - dense.double()).abs().mean() / dense.double().abs().mean()
    assert error < {"nf4": 0.12, "fp4": 0.16}[quant_type]


def test_one_flipped_nibble_changes_one_value(device):
    packed, state = quantised(48, 64, device=device)
    before = nybble.dequantize_4bit(packed, state)
    packed.view(-1)[100] ^= 0x0F
    assert (nybble.dequantize_4bit(packed, state) != before).nonzero().tolist() == [[201 // 64, 201 % 64]]


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_dequantize_equals_bitsandbytes_on_its_own_weight(nested, device):
    dense = torch.randn(64, 128, device=device).bfloat16()
    packed, state = functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=nested)
    assert same_bits(nybble.dequantize_4bit(packed, state), functional.dequantize_4bit(packed, state))
    assert same_bits(nybble.dequantize_4bit(packed.t(), state), functional.dequantize_4bit(packed.t(), state))


def test_offset_reproduces_stored_nested_bytes_and_matters(device):
    dense = torch.randn(256, 256, device=device).bfloat16()
    packed, state = nybble.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
    again, other = nybble.quantize_4bit(dense, quant_type="nf4", compress_statistics=True, offset=float(state.offset))
    assert same_bits(again, packed) and same_bits(other.absmax, state.absmax)
    _, moved = nybble.quantize_4bit(dense, quant_type="nf4", compress_statistics=True, offset=state.offset * 1.5)
    assert not torch.equal(moved.absmax, state.absmax) and torch.equal(moved.offset, state.offset * 1.5)


def test_the_mean_of_scales_does_not_depend_on_threads_or_device(device):
    dense = torch.randn(1024, 640).bfloat16()
    _, state = nybble.quantize_4bit(dense.to(device), quant_type="nf4")
    offsets = set()
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        _, nested = nybble.quantize_4bit(dense.to(device), quant_type="nf4", compress_statistics=True)
        offsets.add(float(nested.offset))
    torch.set_num_threads(threads)
    assert offsets == {float(torch.tensor(float(state.absmax.double().mean())).float())}


def test_defaults_are_those_of_bitsandbytes():
    dense = torch.randn(4, 64).bfloat16()
    packed, state = nybble.quantize_4bit(dense)
    assert (state.quant_type, state.blocksize, state.nested, packed.dtype) == ("fp4", 64, False, torch.uint8)
    assert packed.shape == (128, 1) and state.shape == dense.shape and state.dtype == torch.bfloat16


def test_out_and_absmax_receive_the_results(device):
    dense = torch.randn(4, 64, device=device).bfloat16()
    expected, expected_state = nybble.quantize_4bit(dense, quant_type="nf4")
    out, absmax = torch.zeros_like(expected), torch.zeros(4, device=device)
    packed, state = nybble.quantize_4bit(dense, absmax=absmax, out=out, quant_type="nf4")
    assert packed is out and state.absmax is absmax
    assert same_bits(out, expected) and same_bits(absmax, expected_state.absmax)
    buffer = torch.full_like(dense, float("nan"))
    assert nybble.dequantize_4bit(packed, absmax=absmax, out=buffer, quant_type="nf4") is buffer
    assert same_bits(buffer, nybble.dequantize_4bit(expected, expected_state))


def test_empty_tensors_and_strided_ones(device):
    packed, state = nybble.quantize_4bit(torch.empty(0, 64, device=device), quant_type="nf4", compress_statistics=True)
    assert packed.numel() == 0 and nybble.dequantize_4bit(packed, state).shape == (0, 64)
    dense = torch.randn(64, 8, device=device)
    assert same_bits(nybble.quantize_4bit(dense.t())[0], nybble.quantize_4bit(dense.t().contiguous())[0])


def test_tables_are_bitsandbytes_tables(device):
    for name in ("nf4", "fp4"):
        assert torch.equal(table(name, device), functional.get_4bit_type(name, device=device))
    assert torch.equal(nested_table(device), functional.create_dynamic_map().to(device))
