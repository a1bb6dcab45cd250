"""The equality gate on a tiny model: every exit code, and forward and backward apart."""

import pytest

from nybble.gate.__main__ import main
from nybble.gate.training.needs import missing

if missing() is not None:
    pytest.skip(missing(), allow_module_level=True)

import torch

from nybble.gate.equality import command
from nybble.gate.equality.gate import EqualityGate
from nybble.gate.runner import Verdict, one_thread, run_gate
from nybble.gate.training.store import Shape

SHAPE = Shape(64, 64, 3, 2, 1, 32)


@pytest.fixture(scope="module")
def gate():
    with one_thread():
        made = EqualityGate("cpu", SHAPE, 4, (2,))
        yield made
        made.close()


@pytest.fixture(scope="module")
def report(gate):
    with one_thread():
        return run_gate(gate, algorithms="warn")


def test_streamed_equals_resident_on_both_paths_and_the_unrepaired_is_wrong(report):
    assert report.verdict == Verdict.OK
    found = {(r.arm, r.backward_wrong) for r in report.results}
    assert ("repair disabled", frozenset({0})) in found and not any(r.forward_wrong for r in report.results)


def test_the_arms_ran_the_paths_that_they_name(report):
    paths = {r.arm: {name.split(".")[0] for name in r.launches} for r in report.results if r.launches}
    assert paths["streamed"] == {"cpu"} and paths["streamed, dequant"] == {"dequant"}


def test_forward_and_backward_are_counted_apart(report):
    result = next(r for r in report.results if r.arm == "streamed")
    assert result.forward_compared == SHAPE.layers + 2 and result.backward_compared == 4 * SHAPE.layers


def test_a_gradient_that_is_off_by_a_bit_is_wrong(gate, monkeypatch):
    step = gate.step

    def spoiled(model):
        outcome = step(model)
        if model is not gate.resident and outcome.raised is None:
            next(iter(outcome.backward[1].values())).view(torch.int16)[0, 0] ^= 1
        return outcome

    monkeypatch.setattr(gate, "step", spoiled)
    monkeypatch.setattr(gate, "cells", gate.cells[:1])
    monkeypatch.setattr(gate, "arms", gate.arms[:1])
    with one_thread():
        assert run_gate(gate, algorithms="warn").verdict == Verdict.PRODUCT_WRONG


@pytest.mark.parametrize(
    ("sabotage", "code"),
    [("unrepaired-product", 1), ("repaired-controls", 2), ("zero-adapters", 3), ("layers-not-switched", 3)],
)
def test_exit_code_of_every_sabotage(monkeypatch, capsys, sabotage, code):
    monkeypatch.setitem(command.SHAPES, ("cpu", False), (SHAPE, 4, (2,)))
    assert main(["equality", "--device", "cpu", "--sabotage", sabotage]) == code
    assert f"(exit {code}, " in capsys.readouterr().out
