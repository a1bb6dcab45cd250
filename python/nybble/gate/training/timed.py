"""What `share` and `speed` have in common: a model trained by arms that take turns, each with proof that it trains."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import nybble
from nybble.gate.checks import Check, CheckArm, CheckGate
from nybble.gate.dispatch import plan_of
from nybble.gate.multiply import FORWARD, GRAD_INPUT, Weight, moved
from nybble.gate.runner import Role
from nybble.gate.training import telemetry, timing
from nybble.gate.training.store import Shape, write_store
from nybble.gate.training.trainee import Proof, Trainee

TRAINED, LAUNCHES = "trained", "launches"
VISITS = {FORWARD: 2, GRAD_INPUT: 1}  # of a linear in a step: the forward is run again in the backward
PROOF_STEPS = 2  # beside one that does not count towards peaks
MOST = 2  # times the rounds, before times that will not settle give no verdict
LARGEST_HOST_SHARE = 0.9  # above it a cell is left out, unless it is the last


@dataclass(frozen=True)
class Sizes:
    """tokens: of one step, one cell each. round_seconds: how long an arm runs at a time."""

    shape: Shape
    tokens: tuple[int, ...]
    rounds: int = 7
    round_seconds: float = 0.2
    attention: str = "sdpa"
    window: int = 2


@dataclass(frozen=True)
class TokensCell:
    """Tokens of one step."""

    tokens: int

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens"


@dataclass
class Timed:
    """What a cell's turns gave."""

    turns: timing.Turns
    steps: dict[str, int]  # of a round, by arm
    samples: dict[str, dict[str, float | None]]
    proofs: dict[str, Proof]
    peaks: dict[str, dict[str, int]]
    launches: dict[str, dict[str, int]]  # path counters that PROOF_STEPS steps moved, by arm

    def step_seconds(self, arm: str) -> list[float]:
        return [seconds / self.steps[arm] for seconds in self.turns.seconds[arm]]


def batch_of(tokens: int) -> tuple[int, int]:
    """(rows, tokens of a row) of a step: rows of at most 2048 tokens where that divides it."""
    rows = max(1, tokens // 2048)
    return rows, tokens // rows


class TimedGate(CheckGate):
    """A gate whose arms train in turns. An arm's act(trainee, name, steps) takes the steps."""

    algorithms = "default"
    judged: tuple[str, ...] = ()  # arms whose times carry the verdict

    def __init__(self, device: str, sizes: Sizes, seed: int = 0):
        self.device, self.sizes, self.seed = torch.device(device), sizes, seed
        self.left_out: dict[str, str] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="nybble-gate-")
        self.store = write_store(Path(self.folder.name) / "store", sizes.shape, self.device, seed)
        self.cells = [TokensCell(tokens) for tokens in sizes.tokens]
        self.skipped: set[str] = set()
        self.ceilings = telemetry.ceilings() if device == "cuda" else {}

    def close(self) -> None:
        self.folder.cleanup()

    def select(self, arm: CheckArm) -> torch.nn.Module:
        """The model of an arm, switched to it."""
        raise NotImplementedError

    def runs(self, arm: CheckArm, cell: TokensCell) -> bool:
        return cell.name not in self.skipped

    def ids(self, tokens: int) -> torch.Tensor:
        """One batch."""
        generator = torch.Generator().manual_seed(self.seed + tokens)
        return torch.randint(0, self.sizes.shape.vocab, batch_of(tokens), generator=generator).to(self.device)

    def prepare(self, cell: TokensCell) -> Timed:
        """Proof steps and peaks of every arm, then the turns."""
        arms = [arm for arm in self.arms if arm.not_run is None]
        host = self.host_share(cell)
        if host > LARGEST_HOST_SHARE and len(self.skipped) + 1 < len(self.cells):
            self.skipped.add(cell.name)
            self.left_out[cell.name] = (
                f"enqueueing takes {host:.0%} of a step here: the time is the host's, not the card's"
            )
            return Timed(timing.Turns({}, {}, {}), {}, {}, {}, {}, {})
        trainees: dict[int, Trainee] = {}
        calls: dict[str, Callable[[], None]] = {}
        warm: dict[str, Callable[[], None]] = {}
        peaks, steps, proofs, launches = {}, {}, {}, {}
        for arm in arms:
            model = self.select(arm)
            trainee = trainees.setdefault(id(model), Trainee(model, self.ids(cell.tokens)))
            trainee.prove(arm.name, arm.act, 1)
            before, start = nybble.path_counters(), time.perf_counter()
            peaks[arm.name] = self.peak(model, lambda t=trainee, a=arm: t.prove(a.name, a.act, PROOF_STEPS))
            seconds = (time.perf_counter() - start) / PROOF_STEPS
            launches[arm.name] = moved(before, nybble.path_counters())
            proofs[arm.name] = trainee.proofs[arm.name]
            steps[arm.name] = max(1, math.ceil(self.sizes.round_seconds / seconds))
            calls[arm.name] = lambda a=arm, t=trainee: (self.select(a), a.act(t, a.name, steps[a.name]))
            warm[arm.name] = lambda a=arm, t=trainee: (self.select(a), a.act(t, a.name, 1))
        samples = telemetry.Samples() if self.device.type == "cuda" else None
        try:
            rounds = timing.Rounds(self.sizes.rounds, MOST * self.sizes.rounds, self.judged)
            turns = timing.take_turns(calls, rounds, self.device, self.seed, warm)
        finally:
            if samples is not None:
                samples.stop()
        seen = {name: samples.during(turns.spans[name]) if samples else {} for name in calls}
        if samples is not None and any(None in seen[name].values() for name in self.judged):
            self.left_out[f"clock, power, memory controller at {cell.name}"] = "nvidia-smi gave no sample under load"
        return Timed(turns, steps, seen, proofs, peaks, launches)

    def host_share(self, cell: TokensCell) -> float:
        """Share of a step that the host needs to enqueue it, of the first arm; 0 on the CPU."""
        if self.device.type != "cuda":
            return 0.0
        trainee = Trainee(self.select(self.arms[0]), self.ids(cell.tokens))
        shares = []
        for _ in range(3):
            timing.synchronize(self.device)
            start = time.perf_counter()
            trainee.steps("host", 1)
            enqueued = time.perf_counter() - start
            timing.synchronize(self.device)
            shares.append(enqueued / (time.perf_counter() - start))
        return sorted(shares)[1]

    def peak(self, model: torch.nn.Module, call: Callable[[], Any]) -> dict[str, int]:
        """Peak bytes of the call, with what belongs to the model and without other models; reserved by all."""
        if self.device.type != "cuda":
            call()
            return {}
        timing.synchronize(self.device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        timing.synchronize(self.device)
        own = torch.cuda.max_memory_allocated() - before + self.model_bytes(model)
        return {"peak_bytes": own, "reserved_bytes": torch.cuda.max_memory_reserved()}

    def model_bytes(self, model: torch.nn.Module) -> int:
        """Of its parameters and the slots behind them, each storage once."""
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return sum(storages.values())

    def trained(self, proof: Proof) -> Check:
        fault = proof.fault()
        norms = [float(norm) for norm in proof.norms]
        found = fault or (
            f"{len(norms)} steps, gradient norm {min(norms):.3g} .. {max(norms):.3g}, "
            f"loss {float(proof.losses[0]):.4f} to {float(proof.losses[-1]):.4f}, "
            f"largest change of an adapter {proof.change:.2g}"
        )
        return Check(TRAINED, fault is None, found)

    def linears(self) -> list[torch.nn.Module]:
        """Resident linears of one of the models, which have the weights of all."""
        raise NotImplementedError

    def mode(self, arm: CheckArm) -> str | None:
        """Of nybble's multiply in this arm; None: it has none."""
        raise NotImplementedError

    def launched(self, arm: CheckArm, cell: TokensCell, timed: Timed) -> list[Check]:
        """Did the arm run the code that it is named for? The plan tells the paths, the counters what ran; controls are
        no training and are not asked.
        """
        if arm.role == Role.CONTROL.value:
            return []
        found, expected = timed.launches[arm.name], self.expected_launches(self.mode(arm), cell.tokens)
        return [Check(LAUNCHES, found == expected, f"{found} in {PROOF_STEPS} steps, expected {expected}")]

    def expected_launches(self, mode: str | None, tokens: int) -> dict[str, int]:
        """Of PROOF_STEPS steps, as the counters are named."""
        counts: dict[str, int] = {}
        for module in self.linears() if mode is not None else ():
            weight = Weight(module.weight, module.weight.quant_state)
            for way, visits in VISITS.items():
                path = "dequant" if mode == "dequant" else plan_of(weight, tokens, way).path
                counts[f"{path}.{way}"] = counts.get(f"{path}.{way}", 0) + visits * PROOF_STEPS
        return counts

    def values(self, arm: str, cell: TokensCell, timed: Timed) -> dict[str, Any]:
        """What a record shows of an arm."""
        seconds = sorted(timed.step_seconds(arm))
        middle = seconds[len(seconds) // 2]
        host = sum(timed.turns.host_seconds[arm]) / sum(timed.turns.seconds[arm])
        found = {
            "step_ms": 1e3 * middle,
            "tokens_per_second": cell.tokens / middle,
            "spread": timing.spread(seconds),
            "rounds": len(seconds),
            "rounds_taken": timed.turns.taken,
            "steps_per_round": timed.steps[arm],
            "host_share": host,
            **timed.samples[arm],
            **timed.peaks[arm],
        }
        return {key: float(f"{v:.5g}") if isinstance(v, float) else v for key, v in found.items()}


def train(trainee: Trainee, name: str, steps: int) -> None:
    """Real training."""
    trainee.steps(name, steps)


def without_gradients(trainee: Trainee, name: str, steps: int) -> None:
    """The whole step, but nothing reaches the adapters: its loss is worth nothing."""
    trainee.steps(name, steps, weight=0.0)


def without_backward(trainee: Trainee, name: str, steps: int) -> None:
    """Only the forward."""
    proof = trainee.proofs.setdefault(name, Proof())
    for _ in range(steps):
        with torch.no_grad():
            loss = trainee.model(input_ids=trainee.ids, labels=trainee.ids, use_cache=False).loss
        proof.norms.append(torch.zeros((), device=loss.device))
        proof.losses.append(loss)


def every_step_twice(trainee: Trainee, name: str, steps: int) -> None:
    """Twice the work for a step."""
    trainee.steps(name, 2 * steps)
