"""share and speed: what may be said of times, proof of training, verdicts from times that are made up."""

import copy
import dataclasses
import os
import time
import types

import made_up_times
import pytest
import torch

from nybble.gate.training.needs import missing

if missing() is not None:
    pytest.skip(missing(), allow_module_level=True)

from nybble.gate.checks import run_checks
from nybble.gate.runner import Verdict, one_thread
from nybble.gate.share import command as share_command
from nybble.gate.share.gate import FUSED, Finding, ShareGate
from nybble.gate.speed import command as speed_command
from nybble.gate.speed.gate import SpeedGate
from nybble.gate.training import telemetry, timed, timing
from nybble.gate.training.store import Shape
from nybble.gate.training.timing import Interval, saving, spread, timing_faults
from nybble.gate.training.trainee import Proof, Trainee

SIZES = timed.Sizes(Shape(64, 64, 2, 2, 1, 32), (4,), 5, 1e-12, "eager")
SABOTAGES = {ShareGate: share_command.SABOTAGES, SpeedGate: speed_command.SABOTAGES}


def made_up(gate, monkeypatch, train=False, **ms):
    """The gate's report with these milliseconds; with made-up training too, unless train."""

    def steps(self, arm, count, weight=1.0):
        proof = self.proofs.setdefault(arm, Proof())
        for _ in range(count):
            proof.norms.append(torch.tensor(weight))
            proof.losses.append(torch.tensor(2.0 - 0.1 * len(proof.losses)))

    def prove(self, arm, act, count):
        act(self, arm, count)
        self.proofs[arm].change = 1e-3

    if not train:
        monkeypatch.setattr(timed.TimedGate, "launched", lambda self, arm, cell, shared: [])
        monkeypatch.setattr(Trainee, "steps", steps)
        monkeypatch.setattr(Trainee, "prove", prove)
    with made_up_times.made_up(**ms):
        return run_checks(gate)


@pytest.fixture(scope="module")
def gates():
    with one_thread():
        made = {kind: kind("cpu", SIZES) for kind in (ShareGate, SpeedGate)}
        yield made
        for gate in made.values():
            gate.close()


@pytest.fixture(params=[ShareGate, SpeedGate])
def gate(request, gates):
    return copied(gates[request.param])


@pytest.fixture
def share(gates):
    return copied(gates[ShareGate])


def copied(gate):
    """The same models under arms of its own."""
    twin = copy.copy(gate)
    twin.arms = list(gate.arms)
    return twin


def test_arms_that_really_train_and_save_no_more_than_the_ablation_are_ok(share, monkeypatch):
    report = made_up(share, monkeypatch, train=True)
    assert report.verdict == Verdict.OK
    assert all("gradient norm" in c.found for r in report.results for c in r.checks if c.name == "trained" and c.holds)


def test_arms_launch_what_they_are_named_for(gate, monkeypatch):
    report = made_up(gate, monkeypatch, train=True)
    found = {r.arm: c.found for r in report.results for c in r.checks if c.name == "launches"}
    assert report.verdict == Verdict.OK and found.keys() == {r.arm for r in report.results if r.role != "control"}
    each = "'cpu.forward': 56, 'cpu.grad_input': 28"  # 14 linears, twice forward, two steps
    dequant = each.replace("cpu", "dequant")
    for arm, text in found.items():
        own = "" if "ablation" in arm or "bitsandbytes" in arm else dequant if "deq" in arm else each
        assert text == f"{{{own}}} in 2 steps, expected {{{own}}}"


def test_a_fused_arm_that_dequantises_and_says_nothing_is_wrong(gate, monkeypatch):
    kind = type(gate)
    monkeypatch.setattr(kind, "mode", lambda self, arm, real=kind.mode: real(self, arm) and "dequant")
    planned = kind.expected_launches
    monkeypatch.setattr(kind, "expected_launches", lambda self, mode, m: planned(self, mode and "auto", m))
    report = made_up(gate, monkeypatch, train=True)
    product = [r for r in report.results if r.role == "product"]
    assert report.verdict == Verdict.PRODUCT_WRONG and all(r.red == {"launches"} for r in product)


def test_made_up_training_is_ok_too(gate, monkeypatch):
    assert made_up(gate, monkeypatch).verdict == Verdict.OK


@pytest.mark.parametrize(
    ("kind", "sabotage", "ms", "code"),
    [
        (ShareGate, "no-backward", {FUSED: 30.0}, 1),
        (ShareGate, "no-gradients", {}, 1),
        (ShareGate, "cured-controls", {}, 2),
        (ShareGate, "nothing-compared", {}, 3),
        (SpeedGate, "twice", {"resident": 190.0}, 1),
        (SpeedGate, "no-gradients", {}, 1),
        (SpeedGate, "cured-controls", {"every step twice": 100.0}, 2),
        (SpeedGate, "nothing-compared", {}, 3),
    ],
)
def test_verdict_of_every_sabotage(gates, monkeypatch, kind, sabotage, ms, code):
    gate = copied(gates[kind])
    SABOTAGES[kind][sabotage](gate)
    assert made_up(gate, monkeypatch, **ms).verdict == code


def test_a_spread_of_rounds_is_no_verdict(share, monkeypatch):
    report = made_up(share, monkeypatch)
    assert report.verdict == Verdict.OK
    monkeypatch.setattr(timing, "LARGEST_SPREAD", 0.001)
    assert made_up(share, monkeypatch).verdict == Verdict.NO_VERDICT


def test_a_linear_that_was_not_switched_is_no_verdict(share, monkeypatch):
    import bitsandbytes as bnb

    from nybble.gate.training.models import switched_linears

    monkeypatch.setattr(switched_linears(share.model)[0], "__class__", bnb.nn.Linear4bit)
    report = made_up(share, monkeypatch)
    assert report.verdict == Verdict.NO_VERDICT and "13 linears switched, expected 14" in report.faults[0]


def test_words_of_the_verdict():
    small, large = Interval(0.01, 0.005, 0.015), Interval(0.10, 0.09, 0.11)
    assert "not worth it on this card" in Finding(small, small, 0.0).words
    assert "not worth it" not in Finding(large, large, 0.0).words
    over = Finding(large, Interval(0.2, 0.18, 0.22), 0.01)
    assert not over.explained and "arms differ in more than the dequantisation" in over.words
    by_bytes = dataclasses.replace(over, bytes_share=0.1)
    assert by_bytes.explained and "bytes not read are worth up to 10.0%" in by_bytes.words


def test_times_without_a_verdict():
    assert timing_faults({"a": [1.0] * 5}, ["a"]) == []
    assert "4 rounds" in timing_faults({"a": [1.0] * 4}, ["a"])[0]
    assert "spread over 6.0%" in timing_faults({"a": [1.0, 1.0, 1.06, 1.0, 1.0]}, ["a"])[0]
    assert spread([2.0, 1.0, 4.0]) == 1.5


def test_saving_is_by_pairs_of_one_round():
    drift = [1.0, 1.1, 1.2, 1.3, 1.4]
    found = saving(drift, [0.9 * t for t in drift])
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)
    assert saving(drift, drift[::-1]).high > 0.2
    with pytest.raises(ValueError, match="equally many"):
        saving(drift, drift[:3])


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (Proof(), "no step"),
        (Proof([torch.tensor(0.0)], [torch.tensor(1.0)], 1.0), "gradient norms 0"),
        (Proof([torch.tensor(float("nan"))], [torch.tensor(1.0)], 1.0), "gradient norms nan"),
        (Proof([torch.tensor(1.0)] * 2, [torch.tensor(2.0)] * 2, 1.0), "loss does not move"),
        (Proof([torch.tensor(1.0)] * 2, [torch.tensor(2.0), torch.tensor(1.9)], 0.0), "adapters did not change"),
    ],
)
def test_every_way_not_to_have_trained(proof, words):
    assert words in proof.fault()


def test_proof_of_real_training():
    assert Proof([torch.tensor(1.0)] * 2, [torch.tensor(2.0), torch.tensor(1.9)], 1e-3).fault() is None


def test_every_turn_follows_an_untimed_step_of_its_arm():
    acted = []
    arms, warm = (
        {name: lambda name=name, kind=kind: acted.append((kind, name)) for name in "ab"} for kind in ("timed", "warm")
    )
    turns = timing.take_turns(arms, timing.Rounds(3), torch.device("cpu"), warm=warm)
    assert [len(turns.seconds[name]) for name in "ab"] == [3, 3] and len(acted) == 12
    assert all(acted[i][0] == "warm" and acted[i + 1] == ("timed", acted[i][1]) for i in range(0, 12, 2))
    acted.clear()
    timing.take_turns(arms, timing.Rounds(1), torch.device("cpu"))
    assert sorted(acted[:2]) == [("timed", "a"), ("timed", "b")] and len(acted) == 4


@pytest.mark.parametrize(("noisy", "taken"), [(0, 5), (3, 8), (100, 12)])
def test_rounds_go_on_until_the_last_ones_are_steady_and_no_further(monkeypatch, noisy, taken):
    def take_turn(turns, name, act, device):
        done = len(turns.seconds[name])
        turns.seconds[name].append(1.0 + (0.1 * (done % 2 + 1) if done < noisy and name == "a" else 0.0))

    monkeypatch.setattr(timing, "take_turn", take_turn)
    arms = dict.fromkeys("ab", lambda: None)
    turns = timing.take_turns(arms, timing.Rounds(5, 12, ("a", "b")), torch.device("cpu"), warm=arms)
    assert turns.taken == taken and [len(turns.seconds[name]) for name in "ab"] == [5, 5]
    assert (timing.spread(turns.seconds["a"]) <= timing.LARGEST_SPREAD) == (noisy < 100)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi that writes its arguments down and then gives these lines."""

    def install(*lines):
        script = tmp_path / "nvidia-smi"
        given = "".join(f"echo '{line}'\n" for line in lines)
        script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{given}sleep 5\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        card = types.SimpleNamespace(uuid="0a1b-2c3d")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: card)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        return tmp_path / "arguments"

    return install


def test_the_card_that_is_sampled_is_torchs_whatever_its_number(smi):
    arguments = smi("1980, 512.5, 44", "no number here", "1970, 500.5, 46")
    begin = time.time()
    samples = telemetry.Samples()
    while len(samples.rows) < 2 and time.time() < begin + 20:
        time.sleep(0.01)
    samples.stop()
    assert "-i GPU-0a1b-2c3d" in arguments.read_text()
    found = samples.during([(begin, time.time())])
    assert found == {"clock_mhz": 1975.0, "power_w": 506.5, "memory_controller_percent": 45.0}
    assert set(samples.during([(begin - 2, begin - 1)]).values()) == {None}


def test_the_sampler_is_gone_when_it_has_stopped(smi):
    smi("1980, 512.5, 44")
    samples = telemetry.Samples()
    samples.stop()
    assert samples.process.returncode is not None and not os.path.exists(f"/proc/{samples.process.pid}")
