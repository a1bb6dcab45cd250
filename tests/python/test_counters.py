import torch
from torch.utils.checkpoint import checkpoint

import nybble

from .reference import quantised


def counts(path):
    return nybble.path_counters()[path]


def test_counters_name_the_path_that_ran():
    packed, state = quantised(32, 64)
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    nybble.reset_path_counters()
    nybble.linear(x, packed, state).sum().backward()
    nybble.linear(x, packed, state, mode="fused")
    nybble.linear(x, packed, state, mode="dequant").sum().backward()
    assert counts("cpu") == {"forward": 2, "grad_input": 1}
    assert counts("dequant") == {"forward": 1, "grad_input": 1}
    assert all(
        n == 0 for path, row in nybble.path_counters().items() if path not in ("cpu", "dequant") for n in row.values()
    )
    nybble.reset_path_counters()
    assert all(n == 0 for row in nybble.path_counters().values() for n in row.values())


def test_a_checkpointed_multiply_counts_two_forwards_and_one_gradient():
    packed, state = quantised(32, 64)
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    nybble.reset_path_counters()
    checkpoint(lambda x: nybble.linear(x, packed, state), x, use_reentrant=False).sum().backward()
    assert counts("cpu") == {"forward": 2, "grad_input": 1}


def test_no_gradient_of_x_means_no_launch_for_it():
    packed, state = quantised(32, 64)
    x = torch.randn(3, 64).bfloat16()
    bias = torch.zeros(32, requires_grad=True)
    nybble.reset_path_counters()
    nybble.linear(x, packed, state, bias).sum().backward()
    assert counts("cpu") == {"forward": 1, "grad_input": 0}


def test_an_empty_input_launches_nothing():
    packed, state = quantised(32, 64)
    nybble.reset_path_counters()
    nybble.linear(torch.empty(0, 64, dtype=torch.bfloat16), packed, state)
    assert counts("cpu") == {"forward": 0, "grad_input": 0}
