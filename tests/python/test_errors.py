import pytest
import torch

import nybble

from .reference import quantised


@pytest.fixture
def case(device):
    packed, state = quantised(48, 64, device=device)
    return torch.randn(3, 64, device=device).bfloat16(), packed, state


def edited(state, **fields):
    """A copy of a state with other fields; state2__name reaches into the nested part."""
    inner = nybble.QuantState(state.state2.absmax, None, state.state2.code, 256, None, torch.float32)
    copy = nybble.QuantState(
        state.absmax, state.shape, state.code, state.blocksize, state.quant_type, state.dtype, state.offset, inner
    )
    for name, value in fields.items():
        target, _, field = name.rpartition("__")
        setattr(copy.state2 if target else copy, field, value)
    return copy


BAD_STATES = {
    "code of 15 entries": (lambda s: edited(s, code=s.code[:15]), ValueError, "code has 15 entries.*16"),
    "absmax too short": (
        lambda s: edited(s, absmax=s.absmax[:-1]),
        ValueError,
        r"absmax has shape \[47\].*48 elements",
    ),
    "absmax too long": (lambda s: edited(s, absmax=s.absmax.repeat(2)), ValueError, r"absmax has shape \[96\]"),
    "absmax of floats, yet nested": (
        lambda s: edited(s, absmax=s.absmax.float()),
        TypeError,
        "float32.*expected uint8",
    ),
    "absmax of codes, yet plain": (lambda s: plain(s, s.absmax), TypeError, "uint8.*expected float32"),
    "absmax in bfloat16": (lambda s: plain(s, s.absmax.bfloat16()), TypeError, "bfloat16.*expected float32"),
    "blocksize 0": (lambda s: edited(s, blocksize=0), ValueError, "blocksize 0, expected 32"),
    "blocksize 63": (lambda s: edited(s, blocksize=63), ValueError, "blocksize 63, expected 32"),
    "blocksize of another weight": (lambda s: edited(s, blocksize=128), ValueError, "absmax has shape"),
    "nested blocksize 64": (
        lambda s: edited(s, state2__blocksize=64),
        ValueError,
        "state2.blocksize is 64, expected 256",
    ),
    "nested code too short": (lambda s: edited(s, state2__code=s.state2.code[:255]), ValueError, "nested_code.*256"),
    "nested absmax missing": (lambda s: edited(s, state2__absmax=None), ValueError, "found 2 of the three"),
    "offset missing": (lambda s: edited(s, offset=None), ValueError, "found 2 of the three"),
    "offset of two": (lambda s: edited(s, offset=s.offset.repeat(2)), ValueError, r"offset has shape \[2\]"),
    "quant_type int8": (lambda s: edited(s, quant_type="int8"), ValueError, "'int8', expected one of nf4, fp4"),
    "dtype float64": (lambda s: edited(s, dtype=torch.float64), ValueError, "float64, expected one of"),
    "shape missing": (lambda s: edited(s, shape=None), ValueError, "shape is None"),
    "three dimensions": (lambda s: edited(s, shape=torch.Size([2, 24, 64])), ValueError, "two dimensions"),
    "another shape": (
        lambda s: edited(s, shape=torch.Size([49, 64])),
        ValueError,
        r"expected 1568 bytes .* \[49, 64\]",
    ),
    "no state": (lambda s: None, ValueError, "no quant_state"),
    "not a state": (lambda s: {"absmax": s.absmax}, TypeError, "dict without 'absmax'"),
}


def plain(state, absmax):
    return nybble.QuantState(absmax, state.shape, state.code, state.blocksize, state.quant_type, state.dtype)


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_by_every_function(name, case):
    x, packed, state = case
    make, error, message = BAD_STATES[name]
    bad = make(state)
    with pytest.raises(error, match=message):
        nybble.linear(x, packed, bad)
    with pytest.raises(error, match=message):
        nybble.matmul_4bit(x, packed.t(), bad)
    if name not in ("three dimensions", "no state"):
        with pytest.raises(error, match=message):
            nybble.dequantize_4bit(packed, bad)


BAD_CALLS = {
    "K mismatch": (lambda x, p, s: nybble.linear(x[:, :63], p, s), ValueError, r"x has shape \[3, 63\].*64"),
    "0-dim x": (lambda x, p, s: nybble.linear(x[0, 0], p, s), ValueError, r"x has shape \[\]"),
    "float64 x": (lambda x, p, s: nybble.linear(x.double(), p, s), TypeError, "x is float64, expected float32"),
    "integer x": (lambda x, p, s: nybble.linear(x.int(), p, s), TypeError, "x is int32"),
    "packed cut off": (lambda x, p, s: nybble.linear(x, p[:-1], s), ValueError, r"packed has shape \[1535, 1\]"),
    "packed as int32 values": (
        lambda x, p, s: nybble.linear(x, p.int(), s),
        ValueError,
        r"\(6144 bytes\), expected 1536",
    ),
    "bias too long": (lambda x, p, s: nybble.linear(x, p, s, x[0]), ValueError, r"bias has shape \[64\].*\[48\]"),
    "bias of ints": (lambda x, p, s: nybble.linear(x, p, s, torch.ones(48).int()), TypeError, "bias is int32"),
    "unknown mode": (lambda x, p, s: nybble.linear(x, p, s, mode="fast"), ValueError, "'fast', expected one of auto"),
    "guard of another type": (
        lambda x, p, s: nybble.nf4_linear(x, p, s.absmax, (48, 64), guard=3),
        TypeError,
        "guard is a int, expected a uid tensor",
    ),
    "uid of another dtype": (
        lambda x, p, s: nybble.nf4_linear(x, p, plain_absmax(p), (48, 64), guard=torch.tensor(1.0)),
        ValueError,
        "uid is float32",
    ),
    "uint8 given to quantise": (lambda x, p, s: nybble.quantize_4bit(p), TypeError, "uint8, expected float32"),
    "float64 given to quantise": (lambda x, p, s: nybble.quantize_4bit(x.double()), TypeError, "float64, expected"),
    "blocksize 63 given to quantise": (
        lambda x, p, s: nybble.quantize_4bit(x, blocksize=63),
        ValueError,
        "63, expected",
    ),
    "blocksize 0 given to quantise": (lambda x, p, s: nybble.quantize_4bit(x, blocksize=0), ValueError, "0, expected"),
    "quant_type int8": (lambda x, p, s: nybble.quantize_4bit(x, quant_type="int8"), ValueError, "'int8', expected"),
    "storage that does not divide": (
        lambda x, p, s: nybble.quantize_4bit(x[:1, :10], quant_storage=torch.float32),
        ValueError,
        "10 values pack into 5 bytes, expected a multiple of 4",
    ),
    "dequantise without a state": (lambda x, p, s: nybble.dequantize_4bit(p), ValueError, "quant_state is None"),
}


def plain_absmax(packed):
    return torch.ones(48, device=packed.device)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_refused_with_what_was_found_and_expected(name, case):
    make, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        make(*case)


def test_the_right_case_of_these_tests_is_accepted(case):
    x, packed, state = case
    assert torch.equal(nybble.linear(x, packed, edited(state)), nybble.linear(x, packed, state))


def test_nan_in_x_stays_in_its_row(case):
    x, packed, state = case
    expected = nybble.linear(x, packed, state)
    x[1, 5] = float("nan")
    y = nybble.linear(x, packed, state)
    assert y[1].isnan().all() and torch.equal(y[::2], expected[::2])


def test_asking_for_a_fused_path_that_does_not_exist_is_an_error():
    if not torch.cuda.is_available():
        pytest.skip("no GPU: on the CPU every case is fused")
    packed, state = quantised(48, 64, device="cuda")
    with pytest.raises(NotImplementedError, match="fused"):
        nybble.linear(torch.randn(3, 64, device="cuda"), packed, state, mode="fused")


def test_a_weight_on_another_device_than_x_is_refused():
    if not torch.cuda.is_available():
        pytest.skip("needs two devices")
    packed, state = quantised(48, 64, device="cuda")
    with pytest.raises(ValueError, match="is on cuda:0, expected cpu"):
        nybble.linear(torch.randn(3, 64), packed, state)


def test_errors_of_others_pass_through_unchanged():
    from nybble.errors import translate

    with pytest.raises(ValueError, match="expected"):
        nybble.quantize_4bit(torch.ones(4), blocksize=63)
    other = RuntimeError("not ours")
    assert translate(other) is other
