"""The arm that chooses by measure: one choice a length, of what its model alone holds, and exact; pairs give ratios."""

import pathlib
import sys
import types

import pytest
import torch

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import h200_stream  # noqa: E402
import stream_times  # noqa: E402
from stream_arms import AUTO, ShareMeter, Streamed, with_adapters  # noqa: E402
from stream_store import SHAPES, write_store  # noqa: E402

import nybble  # noqa: E402
from nybble.streaming.activations import MARGIN, AutoKeep, CudaMeter  # noqa: E402


class Meter:
    """A recomputation raises what is allocated from 1000 to 1100 bytes; a step's peak is 1500."""

    limit_bytes, recomputed = (1500 + 100 * 2.5) / (1 - MARGIN), False

    def allocated(self):
        return 1100 if self.recomputed else 1000

    def limit(self):
        return self.limit_bytes

    def start(self):
        pass

    def peaks(self):
        return 1500, 1500

    def failures(self):
        return 0


@pytest.fixture
def streamed(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    store = write_store(tmp_path / "store", SHAPES["tiny"], cpu)
    arms = Streamed(with_adapters(nybble.stream(None, store, device=cpu), 4))
    arms.meter, ends = Meter(), AutoKeep.recomputation_ends

    def recomputed(auto, layer):
        arms.meter.recomputed = True
        ends(auto, layer)
        arms.meter.recomputed = False

    monkeypatch.setattr(AutoKeep, "recomputation_ends", recomputed)
    return arms


def test_a_case_has_options_of_its_own_and_others_are_refused():
    common = types.SimpleNamespace(arms=None, stack=[128, 512], steps=1, rounds=5, length_seconds=0.0, window=2)
    found = h200_stream.with_own(common, ["steps=10", "arms=resident,streamed", "stack=", "length-seconds=7"])
    assert vars(found) == vars(common) | dict(steps=10, arms=["resident", "streamed"], stack=[], length_seconds=7.0)
    assert common.steps == 1
    with pytest.raises(ValueError, match="found window, expected one of arms, stack, steps, rounds, length_seconds"):
        h200_stream.with_own(common, ["window=3"])


def gradients(arms, ids):
    arms.optimiser.zero_grad(set_to_none=True)
    arms.gradients(ids)
    return [p.grad.clone() for p in arms.adapters]


def test_auto_measures_once_a_length_and_its_gradients_are_those_of_recompute(streamed):
    ids = {tokens: torch.randint(3, 256, (1, tokens)) for tokens in (16, 32)}
    expected = {}
    streamed.switch("streamed")
    for tokens in ids:
        expected[tokens] = gradients(streamed, ids[tokens])
    streamed.switch(AUTO)
    for tokens in (16, 32, 16, 32):
        assert all(map(torch.equal, gradients(streamed, ids[tokens]), expected[tokens]))
    assert {tokens: auto.keeps for tokens, auto in streamed.auto.autos.items()} == {16: 2, 32: 2}
    streamed.switch("streamed")
    assert not any(visit.keep or visit.auto for visit in streamed.streamed.visits)
    streamed.meter.limit_bytes = 0
    streamed.switch(AUTO)
    assert all(map(torch.equal, gradients(streamed, ids[16]), expected[16]))
    assert streamed.auto.now.keeps == 0


def test_what_other_models_hold_is_not_charged_to_the_arm(monkeypatch):
    monkeypatch.setattr(CudaMeter, "allocated", lambda meter: 700)
    monkeypatch.setattr(CudaMeter, "limit", lambda meter: 1000)
    meter = ShareMeter(torch.device("cuda"))
    assert (meter.allocated(), meter.limit()) == (700, 1000)
    meter.others = 300
    assert (meter.allocated(), meter.limit()) == (400, 700)
    meter.limit_bytes = 500
    assert meter.limit() == 500


def test_pairs_of_one_round_give_the_ratios_and_the_savings():
    rows = {}
    case = types.SimpleNamespace(row=lambda arm, tokens: rows.setdefault((arm, tokens), {}), record={"savings": {}})
    base = [1.0, 2.0, 3.0, 4.0, 5.0]  # rounds differ a lot, pairs do not
    times = {"streamed": base, "peer": [2 * t for t in base], "streamed_keep": [0.75 * t for t in base]}
    stream_times.compare(case, 512, times)
    assert rows["streamed", 512] == {"ratio_peer": [0.5, 0.5, 0.5]}
    assert case.record["savings"] == {"512": {"keep takes off": [0.25, 0.25, 0.25]}}


def test_the_time_of_the_resident_model_is_compared_too():
    rows = {}
    case = types.SimpleNamespace(row=lambda arm, tokens: rows.setdefault((arm, tokens), {}), record={"savings": {}})
    stream_times.compare(case, 512, {"streamed": [2.0, 4.0, 8.0], "resident": [1.0, 2.0, 4.0]})
    assert rows["streamed", 512] == {"time_of_resident": [2.0, 2.0, 2.0]}


def test_a_fingerprint_changes_with_an_adapter(streamed):
    arms, before = streamed, streamed.fingerprint()
    assert arms.fingerprint() == before
    with torch.no_grad():
        arms.adapters[0].view(-1)[0].add_(1)
    assert arms.fingerprint() != before


def test_the_host_is_quiet_while_times_are_taken_and_as_it_was_afterwards():
    import gc
    import os

    cores, options = os.sched_getaffinity(0), types.SimpleNamespace(pin=True, calling_thread=True)
    with stream_times.quiet_host(options):
        assert not gc.isenabled() and len(os.sched_getaffinity(0)) == 1
        assert not torch.autograd.is_multithreading_enabled()
    assert gc.isenabled() and os.sched_getaffinity(0) == cores and torch.autograd.is_multithreading_enabled()
