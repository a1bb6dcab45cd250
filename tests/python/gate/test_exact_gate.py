"""The exact gate: its cells hold every pair, and every exit code on tiny models."""

import itertools

import pytest

from nybble.gate.exact import covering
from nybble.gate.training.needs import missing

if missing() is not None:
    pytest.skip(missing(), allow_module_level=True)

from nybble.gate.__main__ import main
from nybble.gate.exact import command, gate
from nybble.gate.runner import Verdict, one_thread, run_gate
from nybble.gate.training.store import Shape

TINY = gate.Sizes(
    {"a": Shape(64, 64, 3, 2, 1, 32), "b": Shape(64, 128, 4, 2, 1, 32)}, (3, 4), (2,), command.ON_CPU, command.ON_CPU
)


@pytest.mark.parametrize(("device", "full"), itertools.product(("cpu", "cuda"), (False, True)))
def test_every_pair_is_in_a_cell(device, full):
    sizes = command.sizes_of(device, full)
    cells = gate.cells_of(sizes)
    factors = gate.factors(sizes)
    for (a, a_values), (b, b_values) in itertools.combinations(factors.items(), 2):
        for x, y in itertools.product(a_values, b_values):
            assert any(getattr(cell, a) == x and getattr(cell, b) == y for cell in cells if not cell.late), (a, x, b, y)
    assert len(cells) <= 20
    assert {cell.shape for cell in cells if cell.late} == set(sizes.shapes)


def test_what_shares_models_lies_together():
    cells = [(cell.shape, cell.targets) for cell in gate.cells_of(command.sizes_of("cuda", True))]
    assert len([key for key, _ in itertools.groupby(cells)]) == len(set(cells)) == 4


def test_a_missing_cell_is_seen_as_a_missing_pair():
    factors = gate.factors(command.sizes_of("cuda", True))
    cells = covering.covering(factors)
    held = [set().union(*map(covering.pairs_of, cells[:i] + cells[i + 1 :])) for i in range(len(cells))]
    assert any(covering.all_pairs(factors) - pairs for pairs in held)
    assert covering.all_pairs(factors) == set().union(*map(covering.pairs_of, cells))


@pytest.fixture(scope="module")
def report():
    with one_thread():
        made = gate.ExactGate("cpu", TINY)
        try:
            yield run_gate(made, repeats=2, algorithms="warn")
        finally:
            made.close()


def test_every_cell_is_exact_and_its_controls_are_wrong(report):
    assert report.verdict == Verdict.OK
    product = [r for r in report.results if r.role == "product"]
    assert len(product) == len(gate.cells_of(TINY))
    assert all(not r.forward_wrong and not r.backward_wrong for r in product)
    wrong = [r.backward_wrong for r in report.results if r.arm == "repair disabled"]
    assert wrong == [frozenset({0}), frozenset({0, 1})]
    assert [r.stale for r in report.results if r.arm == "repair disabled, checked"] == [True, True]


def test_forward_and_every_gradient_are_counted(report):
    for result in report.results:
        if result.raised is None:
            adapters = 2 if " qv " in result.cell else 7
            assert (result.forward_compared, result.backward_compared) == (
                result.parts + 2,
                2 * adapters * result.parts,
            )


@pytest.mark.parametrize(
    ("sabotage", "code"), [("unrepaired-product", 1), ("repaired-controls", 2), ("zero-adapters", 3)]
)
def test_exit_code_of_every_sabotage(monkeypatch, capsys, sabotage, code):
    monkeypatch.setattr(command, "sizes_of", lambda device, full: TINY)
    assert main(["exact", "--device", "cpu", "--repeats", "1", "--sabotage", sabotage]) == code
    assert f"(exit {code}, " in capsys.readouterr().out
