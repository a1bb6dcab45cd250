"""A step that repeats its bits is told from one that does not, and ours from torch's."""

import pathlib
import sys

import pytest
import torch

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import step_repeats  # noqa: E402
from step_repeats import ARMS, Repeats, verdict  # noqa: E402

OURS = next(arm for arm in ARMS if arm.multiply == "resident")
OTHER = [{"a.lora_A": 1}]


@pytest.mark.parametrize(
    ("differing", "too_few", "code"),
    [
        ([], [], 0),
        ([OURS], [], 1),
        ([OURS, OURS.control], [], 3),
        ([OURS.control], [], 3),
        ([], [OURS], 3),
        ([OURS], [OURS.control], 3),
    ],
)
def test_only_what_bitsandbytes_repeats_is_held_against_us(differing, too_few, code):
    repeats = {arm: Repeats(19 if arm in too_few else 20, OTHER if arm in differing else []) for arm in ARMS}
    assert verdict(repeats) == code


@pytest.fixture
def three_arms_once(monkeypatch):
    monkeypatch.setattr(step_repeats, "STEADY_RUNS", 1)
    monkeypatch.setattr(step_repeats, "ARMS", ARMS[:3])


@pytest.mark.usefixtures("three_arms_once")
def test_every_arm_repeats_on_a_cpu_and_an_element_that_changes_is_found(tmp_path, monkeypatch, capsys):
    arguments = ["--shape", "tiny", "--tokens", "32", "--device", "cpu", "--runs", "1"]
    assert step_repeats.main([*arguments, "--json", str(tmp_path / "right.json")]) == 0
    assert capsys.readouterr().out.count("1 repeats, 0 with other bits") == 3
    honest, calls = step_repeats.gradients, []

    def spoilt(model, arm, ids):
        found = honest(model, arm, ids)
        calls.append(arm)
        if arm == OURS and calls.count(arm) == 2:
            name = next(name for name in found if "layers.0" in name)
            found[name].view(-1)[3].add_(1.0)
        return found

    monkeypatch.setattr(step_repeats, "gradients", spoilt)
    assert step_repeats.main(arguments) == 1
    out = capsys.readouterr().out
    assert "1 repeats, 1 with other bits" in out and "(1 tensors)" in out and "layers.0" in out


def test_torch_keeps_its_setting():
    before = torch.are_deterministic_algorithms_enabled()
    with step_repeats.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before
