"""`python -m nybble.gate all`: which gates run, and what their exit codes add up to."""

import argparse
import json
import types

import pytest
from test_schema import SCHEMA, faults

from nybble.gate import GATES, command, every
from nybble.gate.__main__ import main


def gate_with(code, seen):
    def run(options):
        seen.append(options)
        if code is None:
            raise KeyError("broken")
        return code

    def add_arguments(parser):
        parser.add_argument("--device")
        parser.add_argument("--record")

    return types.SimpleNamespace(add_arguments=add_arguments, run=run)


@pytest.mark.parametrize(
    ("codes", "worst"), [([0, 0], 0), ([0, 3], 3), ([3, 2], 2), ([2, 1, 3], 1), ([None, 0], 3), ([], 3)]
)
def test_the_exit_code_is_the_worst(monkeypatch, capsys, codes, worst):
    for name in [name for name in GATES if name != "all"]:
        monkeypatch.delitem(GATES, name)
    for index, code in enumerate(codes):
        monkeypatch.setitem(GATES, f"gate{index}", gate_with(code, []))
    assert main(["all", "--device", "cpu"]) == worst
    assert f"(exit {worst}, " in capsys.readouterr().out


def test_what_does_not_fit_is_listed_and_records_are_named_by_card(monkeypatch, capsys, tmp_path):
    seen = []
    for name in ("speed", "numerics"):
        monkeypatch.setitem(GATES, name, gate_with(0, seen))
    assert main(["all", "--device", "cpu", "--only", "numerics,speed", "--records", str(tmp_path)]) == 0
    assert [options.record for options in seen] == [str(tmp_path / "cpu-gate-numerics")]
    assert seen[0].arguments[0] == "numerics"
    assert "speed        - not run: times of a CPU step" in capsys.readouterr().out
    whole = json.loads((tmp_path / "cpu-gates-all.json").read_text())
    assert faults(whole, SCHEMA) == []
    assert whole["results"][0]["gate"] == "numerics" and whole["verdict"] == 0 and "speed" in whole["not_run"]
    page = (tmp_path / "cpu-gates-all.md").read_text()
    assert "python -m nybble.gate all" in page and str(tmp_path) not in page


def test_card_names(monkeypatch):
    for name, short in (("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx-4090")):
        monkeypatch.setattr(every.torch.cuda, "get_device_name", lambda name=name: name)
        assert every.card("cuda") == short
    assert every.card("cpu") == "cpu"


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(("usable", "device"), [(True, "cuda"), (False, "cpu")])
def test_every_gate_takes_a_gpu_that_can_be_used(monkeypatch, name, usable, device):
    monkeypatch.setattr(command, "cuda_is_usable", lambda: usable)
    parser = argparse.ArgumentParser()
    GATES[name].add_arguments(parser)
    assert parser.parse_args([]).device == device
