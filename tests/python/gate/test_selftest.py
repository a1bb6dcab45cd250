"""The table mutation x gate, a few rows of it: `make gate-selftest` runs all."""

import pytest
import selftest
from mutations import MUTATIONS


@pytest.mark.parametrize(
    "name", ["none", "scales off by one", "one saved tensor dropped", "acquire skipped in backward"]
)
def test_a_mutation_turns_exactly_its_gates_red(name, capsys):
    assert selftest.main(["--only", name]) == 0, capsys.readouterr().out


def test_every_gate_is_turned_red_by_some_mutation_and_names_are_known():
    expected = {gate for mutation in MUTATIONS for gate in mutation.expected}
    assert expected == set(selftest.GATES)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 10
    assert MUTATIONS[0].expected == {}


def test_a_cell_that_is_not_as_predicted_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "GATES", {"numerics": selftest.numerics})
    monkeypatch.setattr(MUTATIONS[1], "expected", {})
    assert selftest.main(["--only", MUTATIONS[1].name]) == 1
    assert "1 not 0" in capsys.readouterr().out
