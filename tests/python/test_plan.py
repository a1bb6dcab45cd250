import pytest
import torch

import nybble

from .reference import quantised


@pytest.fixture
def case(device):
    packed, state = quantised(64, 128, device=device)
    return torch.randn(3, 128, device=device).bfloat16(), packed, state


def test_supports_says_nothing_where_the_fused_path_runs(case):
    x, packed, state = case
    nybble.reset_path_counters()
    reason = nybble.supports(x, packed, state)
    assert nybble.path_counters()["dequant"]["forward"] == 0, "asking launches nothing"
    nybble.linear(x, packed, state)
    dequantised = nybble.path_counters()["dequant"]["forward"]
    if x.device.type == "cpu":
        assert reason is None and dequantised == 0
    elif reason is not None:
        assert isinstance(reason, str) and dequantised == 1


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
def test_explain_names_the_path_that_runs(direction, case):
    x, packed, state = case
    y = nybble.linear(x.requires_grad_(), packed, state)
    text = nybble.explain(x if direction == "forward" else y, packed, state, direction=direction)
    nybble.reset_path_counters()
    y = nybble.linear(x, packed, state)
    if direction == "grad_input":
        y.sum().backward()
    ran = {path for path, counts in nybble.path_counters().items() if counts[direction]}
    assert len(ran) == 1 and text.startswith(ran.pop()) and "tune " in text, text


def test_questions_that_make_no_sense_are_refused(case):
    x, packed, state = case
    with pytest.raises(ValueError, match="direction is 'sideways', expected one of forward, grad_input"):
        nybble.supports(x, packed, state, direction="sideways")
    with pytest.raises(ValueError, match="expected its last dimension to be 64 for grad_input"):
        nybble.supports(x, packed, state, direction="grad_input")
    with pytest.raises(ValueError, match=r"x\.dtype is torch\.float64"):
        nybble.supports(x.double(), packed, state)
