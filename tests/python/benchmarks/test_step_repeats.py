"""A step that repeats its bits is told from one that does not, and ours from torch's."""

import json
import pathlib
import sys

import pytest
import torch

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import mm_repeats  # noqa: E402
import step_repeats  # noqa: E402
from step_repeats import ARMS, Repeats, verdict  # noqa: E402
from step_trace import first_difference  # noqa: E402

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


TINY = ["--shape", "tiny", "--tokens", "32", "--device", "cpu", "--runs", "1"]


@pytest.mark.usefixtures("three_arms_once")
def test_every_arm_repeats_on_a_cpu_and_the_record_says_so(tmp_path, capsys):
    assert step_repeats.main([*TINY, "--trace", "--record", str(tmp_path / "right"), "--commit", "abc"]) == 0
    assert capsys.readouterr().out.count("1 repeats, 0 with other bits") == 3
    record, page = (tmp_path / f"right.{end}" for end in ("json", "md"))
    rows = json.loads(record.read_text())["rows"]
    assert [row["multiply"] for row in rows] == ["resident_bnb", "resident", "streamed"]
    assert "commit abc" in page.read_text() and "Every arm repeats its bits." in page.read_text()


@pytest.mark.usefixtures("three_arms_once")
def test_the_operation_is_named_whose_result_is_the_first_to_differ(monkeypatch, capsys):
    """One element of the gradient of LoRA's hidden values changes, in the second step of our resident arm."""
    calls, gradients = [], step_repeats.gradients

    def spoilt(model, arm, ids):
        calls.append(arm)
        if arm != OURS or calls.count(arm) != 2:
            return gradients(model, arm, ids)
        module = model.model.get_submodule("base_model.model.model.layers.1.self_attn.o_proj.lora_A.default")

        def spoil(module, args, out):
            if out.requires_grad:
                out.register_hook(lambda grad: grad.index_fill(-1, torch.tensor([3]), 1.0))

        handle = module.register_forward_hook(spoil, prepend=True)  # the trace sees what the rest of the backward does
        try:
            return gradients(model, arm, ids)
        finally:
            handle.remove()

    monkeypatch.setattr(step_repeats, "gradients", spoilt)
    assert step_repeats.main([*TINY, "--trace"]) == 1
    out = capsys.readouterr().out
    assert "1 repeats, 1 with other bits" in out
    assert "First in order of computation: layers.1.self_attn.o_proj, LoRA's A, gradient of its output" in out


@pytest.mark.parametrize(
    ("found", "expected", "first"),
    [
        ([("a", 1), ("b", 2)], [("a", 1), ("b", 2)], None),
        ([("a", 1), ("b", 3), ("c", 4)], [("a", 1), ("b", 2), ("c", 5)], "b"),
        ([("a", 1), ("c", 4)], [("a", 1), ("b", 2), ("c", 4)], None),
    ],
)
def test_the_first_difference_is_looked_for_among_values_of_both(found, expected, first):
    assert first_difference(found, expected) == first


def test_torchs_own_operations_repeat_on_a_cpu_and_one_that_does_not_is_counted(monkeypatch, capsys):
    arguments = ["--device", "cpu", "--tokens", "32", "--repeats", "10"]
    monkeypatch.setattr(mm_repeats, "SIDES", (64,))
    assert mm_repeats.main(arguments) == 0
    results = iter([torch.zeros(4), torch.tensor([0.0, 1, 1, 0]), *[torch.zeros(4)] * 9])
    monkeypatch.setattr(mm_repeats, "operations", lambda *_: {"spoilt": lambda: next(results)})
    assert mm_repeats.main(arguments) == 1
    assert "spoilt: 1 results differ, 2 elements in the worst" in capsys.readouterr().out


def test_runs_of_both_settings_share_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(mm_repeats, "SIDES", (64,))
    arguments, files = (
        ["--device", "cpu", "--tokens", "32", "--repeats", "10"],
        [tmp_path / "a.json", tmp_path / "b.json"],
    )
    assert mm_repeats.main([*arguments, "--lenient", "--json", str(files[0])]) == 0
    assert mm_repeats.main([*arguments, "--json", str(files[1])]) == 0
    assert mm_repeats.main(["--record", str(tmp_path / "both"), "--merge", *map(str, files)]) == 0
    page = (tmp_path / "both.md").read_text()
    assert "Torch only warns: 7 of 7 operations repeat." in page
    assert "Torch has to repeat: 7 of 7 operations repeat." in page


def test_torch_keeps_its_setting():
    before = torch.are_deterministic_algorithms_enabled()
    with step_repeats.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before
