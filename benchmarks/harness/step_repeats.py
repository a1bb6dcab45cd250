#!/usr/bin/env python3
"""Does a training step repeat its gradients to the bit, and if not, whose doing is it?

    python benchmarks/harness/step_repeats.py [--shape 8b-16] [--tokens 8192] [--runs 20] [--device cuda] [--json FILE]

One model, the same step again and again: multiply (bitsandbytes' own, ours) x attention (SDPA, eager) x checkpoint
(plain, reentrant), then streamed. Every arm is compared with its own first run. bitsandbytes' arms hold none of our
code: where they do not repeat, torch does not, and nothing is said about ours.
Torch has to repeat where it can: a mode that only warns leaves the backward of SDPA as it is. An arm counts as steady
after STEADY_RUNS repeats without a difference.
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

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; without it its sums may vary

import torch
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
    """runs: comparisons with the first run. differing: of each run that differs, {tensor: elements that differ}."""

    runs: int = 0
    differing: list[dict[str, int]] = dataclasses.field(default_factory=list)


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
    return 0 if steady == set(ARMS) else 3


def line(arm: Arm, found: Repeats) -> str:
    text = f"{arm.name:32s} {found.runs:3d} repeats, {len(found.differing)} with other bits"
    if found.differing:
        first = [f"{next(iter(each))} ({len(each)} tensors)" for each in found.differing]
        text += ", the first tensor of the backward that differs: " + "; ".join(first)
    return text


@contextlib.contextmanager
def deterministic():
    """Torch takes its repeatable algorithms, and raises where it has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def measure(shape: dict, tokens: int, runs: int, device: torch.device, seconds: float) -> dict[Arm, Repeats]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(pathlib.Path(folder) / "store", shape, device)
        streamed = Streamed(with_adapters(nybble.stream(None, store, device=device, window=2), 16))
        resident = Resident(with_adapters(nybble.unstream(nybble.stream(None, store, device=device)), 16))
    rows = max(1, tokens // TOKENS_A_ROW)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, shape["vocab"], (rows, tokens // rows), generator=generator).to(device)
    repeats = {arm: Repeats() for arm in ARMS}
    expected = {}
    with deterministic():
        for _ in range(runs + 1):
            for arm in ARMS:  # interleaved: what is rare gets the same chance in every arm
                if time.monotonic() - start > seconds:
                    return repeats
                found = gradients(streamed if arm.multiply == "streamed" else resident, arm, ids)
                if arm not in expected:
                    expected[arm] = {name: tensor.cpu() for name, tensor in found.items()}
                    continue
                repeats[arm].runs += 1
                if other := differences({name: tensor.cpu() for name, tensor in found.items()}, expected[arm]):
                    repeats[arm].differing.append(other)
    return repeats


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b-16", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=STEADY_RUNS, help="repeats of each arm after its first run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=200, help="no step is started after")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1 or arguments.runs < 1:
        parser.error(f"--tokens {arguments.tokens} --runs {arguments.runs}: at least 1 of each is needed")
    repeats = measure(
        SHAPES[arguments.shape], arguments.tokens, arguments.runs, torch.device(arguments.device), arguments.seconds
    )
    print("\n".join(line(arm, found) for arm, found in repeats.items()))
    code = verdict(repeats)
    if arguments.json:
        rows = [dataclasses.asdict(arm) | dataclasses.asdict(found) for arm, found in repeats.items()]
        record = {"shape": arguments.shape, "tokens": arguments.tokens, "torch": torch.__version__, "verdict": code}
        record |= {"cublas_workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"], "steady_runs": STEADY_RUNS}
        arguments.json.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
    print({0: "every arm repeats its bits", 1: "OURS does not repeat where bitsandbytes' does", 3: "no verdict"}[code])
    return code


if __name__ == "__main__":
    sys.exit(main())
