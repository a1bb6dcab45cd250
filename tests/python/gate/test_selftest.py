"""The table mutation x gate: red cells of a few rows here; `make gate-selftest`, which CI runs too, has all of it."""

import pathlib
import types

import kernel_selftest
import pytest
import selftest
from kernel_mutations import KERNEL_MUTATIONS, has_switches
from mutations import MUTATIONS

from nybble.gate import GATES
from nybble.gate.training.needs import missing


@pytest.mark.parametrize(
    "name",
    [
        "nibbles swapped",
        "scales off by one",
        "one saved tensor dropped",
        "owner kept at issue",
        "acquire skipped in backward",
    ],
)
def test_a_mutation_turns_its_gates_red(name, capsys):
    assert selftest.main(["--only", name, "--red"]) == 0, capsys.readouterr().out


def test_a_mutation_leaves_the_other_gates_green(capsys):
    assert selftest.main(["--only", "scales off by one"]) == 0, capsys.readouterr().out


def test_every_gate_is_turned_red_by_some_mutation_and_names_are_known():
    expected = {gate for mutation in MUTATIONS for gate in mutation.expected}
    assert expected == set(selftest.GATES)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 10
    assert MUTATIONS[0].expected == {}


def test_every_gate_is_a_column():
    assert set(selftest.GATES) == set(GATES) - {"all"}


def test_several_codes_allow_each_of_them_and_no_other(monkeypatch, capsys):
    monkeypatch.setattr(MUTATIONS[1], "expected", {"numerics": (1, 3)})
    for code, failed in ((1, 0), (3, 0), (0, 1), (2, 1)):
        monkeypatch.setattr(selftest, "GATES", {"numerics": lambda: types.SimpleNamespace(verdict=code)})  # noqa: B023
        assert selftest.main(["--only", MUTATIONS[1].name]) == failed
    assert "2 not 1/3" in capsys.readouterr().out


def test_a_mutation_that_does_not_exist_is_an_error(capsys):
    with pytest.raises(SystemExit):
        selftest.main(["--only", "no such row"])
    assert "no such row: no such mutation" in capsys.readouterr().err


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_slot_that_is_owned_at_issue_passes_the_check_on_bytes_in_flight():
    with planted("owner set at issue"):
        wrong = {result.arm: result.backward_wrong for result in selftest.equality().results if not result.raised}
    assert wrong["streamed"] == frozenset()
    assert wrong["repair disabled, checked"] == wrong["repair disabled"] == {0}


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_an_acquire_that_does_not_wait_gives_wrong_numbers_and_no_error():
    with planted("acquire does not wait"):
        streamed = next(result for result in selftest.equality().results if result.arm == "streamed")
    assert streamed.raised is None and not streamed.faults
    assert streamed.forward_wrong == streamed.backward_wrong == {0, 1, 2}


def planted(name):
    return next(mutation for mutation in MUTATIONS if mutation.name == name).plant()


def test_a_cell_that_is_not_as_predicted_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "GATES", {"numerics": selftest.numerics})
    monkeypatch.setattr(MUTATIONS[1], "expected", {})
    assert selftest.main(["--only", MUTATIONS[1].name]) == 1
    assert "1 not 0" in capsys.readouterr().out


def test_faults_of_the_kernel_table_exist_and_the_product_has_none(capsys):
    source = (pathlib.Path(__file__).parents[3] / "src/device/fault.h").read_text()
    names = {fault for mutation in KERNEL_MUTATIONS for fault in mutation.faults}
    assert len(names) >= 3 and all(f'"{name}"' in source for name in names)
    assert KERNEL_MUTATIONS[0].expected == {} and not KERNEL_MUTATIONS[0].faults
    assert not has_switches() and kernel_selftest.main([]) == 1
    assert "NYBBLE_FAULT_SWITCHES" in capsys.readouterr().err


def test_a_cell_of_the_kernel_table_that_is_not_as_predicted_is_an_error(monkeypatch, capsys, tmp_path):
    found = {mutation.name: dict.fromkeys(kernel_selftest.GATES, 0) for mutation in KERNEL_MUTATIONS}
    for mutation in KERNEL_MUTATIONS:
        found[mutation.name] |= {gate: min(codes) for gate, codes in mutation.expected.items()}
    monkeypatch.setattr(kernel_selftest, "has_switches", lambda: True)
    monkeypatch.setattr(kernel_selftest, "row", found.get)
    assert kernel_selftest.main(["--record", str(tmp_path / "right")]) == 0
    found["missing fence"]["numerics"] = 0
    found["none but delays"]["memory"] = None
    assert kernel_selftest.main(["--record", str(tmp_path / "wrong")]) == 1
    text = capsys.readouterr().out
    assert "0 not 1" in text and "- not 0" in text and "2 cells are not as predicted" in text
    right, wrong = ((tmp_path / f"{name}.md").read_text() for name in ("right", "wrong"))
    assert "Every cell as predicted" in right and "predicted [" not in right and "make gate-selftest" in right
    assert "| **0**, predicted [1] |" in wrong and "| **None**, predicted [0] |" in wrong
    assert kernel_selftest.main(["--only", "barrier released early", "--record", str(tmp_path / "part")]) == 0
    part = (tmp_path / "part.md").read_text()
    assert "--only 'barrier released early'" in part and "missing fence" not in part
