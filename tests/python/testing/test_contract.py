import pytest
import torch

import nybble
from nybble.testing import CHECKS, ContractViolation, checkpoint_contract
from nybble.testing.contract import findings

from . import twins

MEMORY = {"saved_only", "freed_after_checkpoint", "recomputation_is_read", "writes_are_noticed"}

# Each twin with the checks that must notice it; every other check must pass.
BROKEN = {
    "weight_on_ctx": MEMORY | {"unpacked_before_launch"},
    "scales_on_ctx": MEMORY,
    "weight_in_closure": MEMORY | {"unpacked_before_launch"},
    "launches_first": {"freed_after_checkpoint", "recomputation_is_read", "unpacked_before_launch"},
    "flipped_nibble": {"gradients_are_right"},
    "short_bias_sum": {"gradients_are_right"},
    "wrong_second_derivative": {"double_backward_is_right"},
}


@pytest.mark.parametrize(
    ("op", "dtype", "nested"),
    [
        (nybble.linear, torch.bfloat16, True),
        (nybble.linear, torch.float16, False),
        (nybble.linear, torch.float32, True),
        (nybble.matmul_4bit, torch.bfloat16, False),
    ],
    ids=["linear-bf16-nested", "linear-fp16-plain", "linear-fp32-nested", "matmul_4bit-bf16-plain"],
)
def test_our_ops_keep_the_contract(op, dtype, nested, device):
    checkpoint_contract(op, device=device, dtype=dtype, nested=nested)


def test_an_op_written_out_in_the_open_keeps_the_contract(device):
    checkpoint_contract(twins.right, device=device)


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_twin_fails_exactly_the_checks_it_breaks(name, device):
    found = findings(getattr(twins, name), device=device)
    assert found.keys() == CHECKS.keys()
    assert {check for check, reason in found.items() if reason} == BROKEN[name], found


def test_every_check_is_failed_by_some_twin():
    assert set().union(*BROKEN.values()) == set(CHECKS)


def test_bitsandbytes_matmul_4bit_violates_the_contract(device):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    with pytest.raises(ContractViolation, match="ctx") as caught:
        checkpoint_contract(bitsandbytes.matmul_4bit, device=device)
    assert {check for check, reason in caught.value.findings.items() if reason} == MEMORY | {"unpacked_before_launch"}


def test_an_op_that_raises_is_reported_with_its_error():
    def broken(x, packed, state, bias=None):
        raise KeyError("no kernel")

    with pytest.raises(ContractViolation, match="KeyError: 'no kernel'"):
        checkpoint_contract(broken)
