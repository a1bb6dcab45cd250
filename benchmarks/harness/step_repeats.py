#!/usr/bin/env python3
"""Does a training step repeat its gradients to the bit, and if not, whose doing is it?

    python benchmarks/harness/step_repeats.py [--shape 8b-16] [--tokens 8192] [--runs 20] [--device cuda]
        [--multiply resident_bnb,resident,streamed] [--attention sdpa,eager] [--checkpoint plain,reentrant]
        [--lenient] [--trace] [--record h200-step-repeats]

One model, the same step again and again: multiply (bitsandbytes' own, ours) x attention (SDPA, eager) x checkpoint
(plain, reentrant), then streamed. Every arm is compared with its own first run. bitsandbytes' arms hold none of our
code: where they do not repeat, torch does not, and nothing is said about ours.
Torch has to repeat where it can: a mode that only warns leaves the backward of SDPA as it is (--lenient does that, and
leaves cuBLAS its usual workspaces). An arm counts as steady after STEADY_RUNS repeats without a difference. --trace
names the operation of a step whose result is the first to differ (step_trace.py); all that was made before is equal.
Exit: 0 every arm is steady; 1 an arm of ours is not while bitsandbytes' with the same attention and checkpoint is;
3 a bitsandbytes arm is not steady, or too few repeats fitted into the time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time

import torch
from step_trace import Trace, first_difference
from stream_arms import Resident, Streamed, canonical, with_adapters
from stream_store import SHAPES, write_store

import nybble

TOKENS_A_ROW = 2048
STEADY_RUNS = 20  # what happens in one step of seven is missed with a chance of 5%


@dataclasses.dataclass(frozen=True)
class Arm:
    multiply: str  # resident_bnb, resident or streamed
    attention: str
    reentrant: bool

    @property
    def name(self) -> str:
        return f"{self.multiply}, {self.attention}, {'reentrant' if self.reentrant else 'plain'}"

    @property
    def control(self) -> Arm:
        return dataclasses.replace(self, multiply="resident_bnb")


ARMS = [
    Arm(multiply, attention, reentrant)
    for attention in ("sdpa", "eager")
    for reentrant in (False, True)
    for multiply in ("resident_bnb", "resident", "streamed")
]


@dataclasses.dataclass
class Repeats:
    """runs: comparisons with the first run. differing: of each run that differs, {tensor: elements that differ}. first:
    of each run whose trace differs, the first value that does.
    """

    runs: int = 0
    differing: list[dict[str, int]] = dataclasses.field(default_factory=list)
    first: list[str] = dataclasses.field(default_factory=list)


def gradients(model, arm: Arm, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and every adapter's gradient of one step, in the order of the backward: last layer first."""
    model.switch("streamed" if arm.multiply == "streamed" else arm.multiply)
    model.checkpoint(True, reentrant=arm.reentrant)
    model.model.get_base_model().set_attn_implementation(arm.attention)
    model.optimiser.zero_grad(set_to_none=True)
    loss = model.gradients(ids)
    named = [(canonical(name), p) for name, p in model.model.named_parameters() if p.requires_grad]
    found = {"loss": loss} | {name: p.grad.clone() for name, p in reversed(named)}
    model.optimiser.zero_grad(set_to_none=True)
    return found


def differences(found: dict, expected: dict) -> dict[str, int]:
    return {n: int((found[n] != t).sum()) for n, t in expected.items() if not torch.equal(found[n], t)}


def verdict(repeats: dict[Arm, Repeats]) -> int:
    """0, 1 or 3 as the module's text says."""
    steady = {arm for arm, found in repeats.items() if found.runs >= STEADY_RUNS and not found.differing}
    if any(found.differing and arm.control in steady for arm, found in repeats.items()):
        return 1
    return 0 if steady == set(repeats) else 3


def line(arm: Arm, found: Repeats) -> str:
    text = f"{arm.name:32s} {found.runs:3d} repeats, {len(found.differing)} with other bits"
    if found.differing:
        first = [f"{next(iter(each))} ({len(each)} tensors)" for each in found.differing]
        text += ", the first tensor of the backward that differs: " + "; ".join(first)
    if found.first:
        text += ". First in order of computation: " + "; ".join(found.first)
    return text


@contextlib.contextmanager
def deterministic(lenient: bool = False):
    """Torch takes its repeatable algorithms, and raises where it has none; lenient: warns, and leaves SDPA alone."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=lenient)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclasses.dataclass
class Models:
    """The two models of one store and their traces, or None."""

    streamed: Streamed
    resident: Resident
    traces: dict[str, Trace] | None

    def run(self, arm: Arm, ids: torch.Tensor) -> tuple[dict[str, torch.Tensor], list[tuple[str, int]]]:
        """What a step gives, on the CPU, and its trace."""
        kind = "streamed" if arm.multiply == "streamed" else "resident"
        found = gradients(getattr(self, kind), arm, ids)
        return {name: tensor.cpu() for name, tensor in found.items()}, self.traces[kind].take() if self.traces else []


def make_models(shape: dict, device: torch.device, trace: bool) -> Models:
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(pathlib.Path(folder) / "store", shape, device)
        streamed = Streamed(with_adapters(nybble.stream(None, store, device=device, window=2), 16))
        resident = Resident(with_adapters(nybble.unstream(nybble.stream(None, store, device=device)), 16))
    traces = {"streamed": Trace(streamed.model), "resident": Trace(resident.model)} if trace else None
    return Models(streamed, resident, traces)


def measure(models: Models, arms: list[Arm], ids: torch.Tensor, options, end: float) -> dict[Arm, Repeats]:
    """Arms in turn: what is rare gets the same chance in every arm. No step is started after `end`."""
    repeats = {arm: Repeats() for arm in arms}
    expected = {}
    with deterministic(options.lenient):
        for turn in range(options.runs + 1):
            for arm in arms:
                if time.monotonic() > end:
                    return repeats
                found, trace = models.run(arm, ids)
                if arm not in expected:
                    expected[arm] = found, trace
                    continue
                note(repeats[arm], found, trace, *expected[arm])
            print(f"turn {turn}: {sum(len(each.differing) for each in repeats.values())} with other bits", flush=True)
    return repeats


def note(repeats: Repeats, found: dict, trace: list, expected: dict, expected_trace: list) -> None:
    repeats.runs += 1
    if other := differences(found, expected):
        repeats.differing.append(other)
    if (first := first_difference(trace, expected_trace)) is not None:
        repeats.first.append(first)


WORDS = {0: "every arm repeats its bits", 1: "OURS does not repeat where bitsandbytes' does", 3: "no verdict"}


def write_record(options, repeats: dict[Arm, Repeats], code: int) -> None:
    """Beside the JSON a page with a line an arm."""
    info = nybble.build_info()
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    words = [a for a in sys.argv[1:] if a not in ("--record", str(options.record), "--commit", options.commit)]
    command = " ".join(["step_repeats.py", *words])
    record = {"device": device, "command": command, "commit": options.commit, "torch": info["torch"], "verdict": code}
    record |= {"shape": options.shape, "layers": options.layers or SHAPES[options.shape]["layers"]}
    record |= {"tokens": options.tokens, "steady_runs": STEADY_RUNS, "lenient": options.lenient}
    record |= {"cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}
    record["rows"] = [dataclasses.asdict(arm) | dataclasses.asdict(found) for arm, found in repeats.items()]
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    lines = "\n".join(line(arm, found) for arm, found in repeats.items())
    options.record.with_suffix(".md").write_text(
        f"# Whether a training step repeats its bits, {device}\n\n`{command}`, commit {options.commit}; torch "
        f"{info['torch']}.\n\n```\n{lines}\n```\n\n{WORDS[code].capitalize()}.\n"
    )


def names(text: str) -> list[str]:
    return text.split(",")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b-16", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="of the shape; all of it when left out")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=STEADY_RUNS, help="repeats of each arm after its first run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=200, help="no step is started after")
    parser.add_argument("--multiply", type=names, default=["resident_bnb", "resident", "streamed"])
    parser.add_argument("--attention", type=names, default=["sdpa", "eager"])
    parser.add_argument("--checkpoint", type=names, default=["plain", "reentrant"])
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--record", type=pathlib.Path, help="writes this name with .json and .md")
    parser.add_argument("--commit", help="of the code that is measured, for the record")
    options = parser.parse_args(argv)
    if options.tokens < 1 or options.runs < 1:
        parser.error(f"--tokens {options.tokens} --runs {options.runs}: at least 1 of each is needed")
    return options


def main(argv: list[str] | None = None) -> int:
    end = time.monotonic()
    options = parse(argv)
    end += options.seconds
    if not options.lenient:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    arms = [
        arm
        for arm in ARMS
        if arm.multiply in options.multiply
        and arm.attention in options.attention
        and ("reentrant" if arm.reentrant else "plain") in options.checkpoint
    ]
    shape, device = dict(SHAPES[options.shape]), torch.device(options.device)
    shape["layers"] = options.layers or shape["layers"]
    models = make_models(shape, device, options.trace)
    print(f"models after {time.monotonic() - end + options.seconds:.0f} s", flush=True)
    rows = max(1, options.tokens // TOKENS_A_ROW)
    generator = torch.Generator().manual_seed(options.tokens)
    ids = torch.randint(3, shape["vocab"], (rows, options.tokens // rows), generator=generator).to(device)
    repeats = measure(models, arms, ids, options, end)
    print("\n".join(line(arm, found) for arm, found in repeats.items()))
    code = verdict(repeats)
    if options.record:
        write_record(options, repeats, code)
    print(WORDS[code])
    return code


if __name__ == "__main__":
    sys.exit(main())
