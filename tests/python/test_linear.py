import pytest
import torch

import nybble

from .reference import DTYPES, dequantised, quantised, relative_error

CASES = [  # n, k, leading dimensions of x, block size, quant type, nested, bias
    (96, 128, (1,), 64, "nf4", True, False),
    (96, 128, (), 64, "nf4", True, True),
    (33, 65, (7,), 64, "nf4", True, True),
    (1, 1, (3,), 32, "nf4", False, False),
    (96, 576, (2, 3), 64, "nf4", True, True),
    (40, 4096, (5,), 4096, "nf4", False, True),
    (64, 100, (2, 1, 3), 128, "fp4", True, False),
    (64, 64, (9,), 32, "fp4", False, True),
]


def make(case, dtype, device):
    n, k, lead, blocksize, quant_type, nested, with_bias = case
    packed, state = quantised(
        n, k, dtype=dtype, blocksize=blocksize, quant_type=quant_type, nested=nested, device=device
    )
    x = torch.randn(*lead, k, device=device).to(dtype)
    bias = torch.randn(n, device=device).to(dtype) if with_bias else None
    return x, packed, state, bias


def exact_linear(x, packed, state, bias):
    y = x.double() @ dequantised(packed, state, x.dtype).t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("mode", ["auto", "dequant"])
def test_linear_is_as_exact_as_a_dense_multiply(case, dtype, mode, device):
    x, packed, state, bias = make(case, dtype, device)
    y = nybble.linear(x, packed, state, bias, mode=mode)
    exact = exact_linear(x, packed, state, bias)
    dense = torch.nn.functional.linear(x, dequantised(packed, state).to(dtype), bias)
    assert y.shape == (*x.shape[:-1], case[0]) and y.dtype == dtype and y.is_contiguous()
    # A dense multiply rounds at least its result: 2^-9 or 2^-12 of it; in fp32 the order of the sum counts.
    floor = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float32: 2**-20}[dtype]
    assert relative_error(y, exact) <= 1.05 * max(relative_error(dense, exact), floor)


@pytest.mark.parametrize("part", ["packed", "absmax", "nested_absmax", "offset"])
def test_a_changed_byte_of_the_weight_is_seen_by_the_comparison(part, device):
    x, packed, state, _ = make(CASES[4], torch.bfloat16, device)
    exact = exact_linear(x, packed, state, None)
    if part == "packed":
        packed.view(-1)[11] ^= 0x90
    elif part == "absmax":
        state.absmax[0] ^= 0x40
    elif part == "nested_absmax":
        state.state2.absmax[0] *= 1.5
    else:
        state.offset.mul_(1.1)
    assert not relative_error(nybble.linear(x, packed, state), exact) < 2**-8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("state_dtype", DTYPES, ids=str)
def test_dequant_mode_equals_dequantize_then_torch_linear_bit_for_bit(dtype, state_dtype, device):
    packed, state = quantised(70, 130, dtype=state_dtype, device=device)
    weight = nybble.dequantize_4bit(packed, state).to(dtype)
    bias = torch.randn(70, device=device).to(dtype)
    for shape in ((130,), (3, 130), (2, 3, 130), (2, 2, 3, 130)):
        x = torch.randn(*shape, device=device).to(dtype).requires_grad_()
        for b in (None, bias):
            y = nybble.linear(x, packed, state, b, mode="dequant")
            expected = torch.nn.functional.linear(x, weight, b)
            assert torch.equal(y, expected)
            grad_y = torch.randn_like(y)
            grad = torch.autograd.grad(y, x, grad_y)[0]
            assert torch.equal(grad, torch.matmul(grad_y, weight))


def test_strided_inputs_give_the_bits_of_contiguous_ones(device):
    packed, state = quantised(48, 64, device=device)
    base = torch.randn(6, 4, 130, device=device).bfloat16()
    views = [
        base[..., :64],  # rows further apart than their length
        base[..., 1::2][..., :64],  # elements apart
        base[::2, :, 3:67],  # unaligned rows, a gap between matrices
        base.transpose(0, 1)[..., :64],
        base[:1, :, :64].expand(6, 4, 64),  # stride 0
        base[0, 0, 66:130],
    ]
    for x in views:
        x = x.detach().requires_grad_()
        y = nybble.linear(x, packed, state)
        copy = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        expected = nybble.linear(copy, packed, state)
        assert torch.equal(y, expected)
        grad_y = torch.randn(48, 2, device=device).bfloat16()[:, 0].expand_as(y)  # strided and expanded
        (grad,) = torch.autograd.grad(y, x, grad_y)
        assert torch.equal(grad, torch.autograd.grad(expected, copy, grad_y.contiguous())[0])


def test_a_weight_at_an_odd_byte_offset_gives_the_same_bits(device):
    packed, state = quantised(33, 65, device=device)
    x = torch.randn(5, 65, device=device).bfloat16()
    storage = torch.zeros(packed.numel() + 1, dtype=torch.uint8, device=device)
    storage[1:] = packed.view(-1)
    assert torch.equal(nybble.linear(x, storage[1:], state), nybble.linear(x, packed, state))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_empty_input_gives_empty_output_and_gradients(shape, device):
    packed, state = quantised(48, 64, device=device)
    x = torch.randn(*shape, device=device).bfloat16().requires_grad_()
    bias = torch.randn(48, device=device).bfloat16().requires_grad_()
    y = nybble.linear(x, packed, state, bias)
    assert y.shape == (*shape[:-1], 48)
    y.sum().backward()
    assert x.grad.shape == x.shape and torch.equal(bias.grad, torch.zeros_like(bias))


def test_a_bias_of_another_dtype_is_cast_for_the_call_only(device):
    packed, state = quantised(48, 64, device=device)
    x = torch.randn(3, 64, device=device).bfloat16()
    bias = torch.nn.Parameter(torch.randn(48, device=device))
    y = nybble.linear(x, packed, state, bias)
    assert torch.equal(y, nybble.linear(x, packed, state, bias.detach().bfloat16()))
    assert bias.dtype == torch.float32
    y.float().pow(2).sum().backward()
    assert bias.grad.dtype == torch.float32


def test_batch_invariant_rows_do_not_depend_on_how_many_there_are(device):
    packed, state = quantised(96, 576, device=device)
    x = torch.randn(37, 576, device=device).bfloat16()
    try:
        all_rows = nybble.linear(x, packed, state, batch_invariant=True)
    except NotImplementedError as error:
        pytest.skip(f"no batch-invariant plan here: {error}")
    for i in (0, 17, 36):
        assert torch.equal(nybble.linear(x[i : i + 1], packed, state, batch_invariant=True)[0], all_rows[i])


def test_repeated_calls_give_the_same_bits(device):
    packed, state = quantised(64, 576, device=device)
    x = torch.randn(19, 576, device=device).bfloat16()
    first = nybble.linear(x, packed, state)
    assert all(torch.equal(nybble.linear(x, packed, state), first) for _ in range(20))


def test_nf4_linear_equals_linear(device):
    packed, state = quantised(48, 130, device=device)
    x = torch.randn(3, 130, device=device).bfloat16()
    y = nybble.nf4_linear(
        x,
        packed,
        state.absmax,
        (48, 130),
        nested_absmax=state.state2.absmax,
        nested_code=state.state2.code,
        offset=state.offset,
    )
    assert torch.equal(y, nybble.linear(x, packed, state))


def test_matmul_4bit_takes_the_transposed_view_and_out(device):
    packed, state = quantised(48, 64, device=device)
    x = torch.randn(2, 3, 64, device=device).bfloat16()
    bias = torch.randn(48, device=device).bfloat16()
    expected = nybble.linear(x, packed, state, bias)
    assert torch.equal(nybble.matmul_4bit(x, packed.t(), state, bias=bias), expected)
    out = torch.full_like(expected, float("nan"))
    assert nybble.matmul_4bit(x, packed.t(), state, out=out, bias=bias) is out
    assert torch.equal(out, expected)


def test_matmul_4bit_still_takes_a_weight_quantised_as_k_by_n(device):
    packed, state = quantised(64, 48, device=device)  # [K, N]
    x = torch.randn(3, 64, device=device).bfloat16()
    with pytest.warns(DeprecationWarning, match="quantise it again as"):
        y = nybble.matmul_4bit(x, packed.t(), state)
    assert torch.equal(y, torch.nn.functional.linear(x, nybble.dequantize_4bit(packed, state).t()))
    with pytest.raises(ValueError, match="last dimension to be 48"):
        nybble.linear(x, packed, state)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
def test_linear_takes_bitsandbytes_own_weights(nested, device):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    dense = torch.randn(96, 128, device=device).bfloat16()
    packed, state = bitsandbytes.functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=nested)
    x = torch.randn(5, 128, device=device).bfloat16()
    y = nybble.linear(x, packed, state)
    theirs = bitsandbytes.matmul_4bit(x, packed.t(), state)
    exact = exact_linear(x, packed, state, None)
    assert relative_error(y, exact) <= 1.05 * relative_error(theirs, exact)


def test_linear_takes_a_linear4bit_module(device):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    module = bitsandbytes.nn.Linear4bit(64, 48, compute_dtype=torch.bfloat16, quant_type="nf4").to(device)
    x = torch.randn(3, 64, device=device).bfloat16()
    y = nybble.linear(x, module.weight, module.weight.quant_state, module.bias)
    assert relative_error(y, module(x).detach().double()) < 2**-7


@pytest.mark.parametrize("quant_storage", [torch.bfloat16, torch.float32])
def test_packed_bytes_stored_under_another_dtype_are_read_as_bytes(quant_storage, device):
    dense = torch.randn(48, 64, device=device).bfloat16()
    packed, state = nybble.quantize_4bit(dense, quant_type="nf4")
    other, other_state = nybble.quantize_4bit(dense, quant_type="nf4", quant_storage=quant_storage)
    x = torch.randn(3, 64, device=device).bfloat16()
    assert other.dtype == quant_storage
    assert torch.equal(nybble.linear(x, other, other_state), nybble.linear(x, packed, state))
