"""Runs a gate: every arm in every cell, against a reference of its own numerics, in one process, interleaved.

A gate is a claim ("streamed gradients equal resident ones") with the ways to lose it. The runner gives no verdict,
rather than a green one, when the reference does not equal itself, when nothing was compared, when a tensor that must
not be zero is zero, or when the code path under test did not run; and it calls a gate vacuous when a control does not
fail as predicted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import chain
from typing import Any, Protocol

import torch

from nybble._library import lib


class Verdict(IntEnum):
    """The exit code of a gate."""

    OK = 0
    PRODUCT_WRONG = 1
    CONTROL_DID_NOT_FAIL = 2
    NO_VERDICT = 3


class Role(Enum):
    """What an arm's failure means."""

    PRODUCT = "product"  # what is being proved
    NATIVE = "native"  # known to be right: if it is wrong, so is the harness
    CONTROL = "control"  # known to be wrong in a known pattern


@dataclass
class Outcome:
    """What one arm did in one cell, or what its reference did.

    forward, backward: tensors by part (for a stack: by layer) and name, compared bit for bit.
    nonzero: tensors of which each must have a non-zero element, else the comparison means nothing.
    launches: C++ path counters that moved, as {"cpu.forward": 16, ...}; None when the arm runs no counted op.
    raised: text of the error that ended the run; stale: that error was the check that the gate is about.
    """

    forward: list[dict[str, torch.Tensor]]
    backward: list[dict[str, torch.Tensor]]
    nonzero: list[torch.Tensor] = field(default_factory=list)
    launches: dict[str, int] | None = None
    raised: str | None = None
    stale: bool = False


@dataclass(frozen=True)
class Expectation:
    """The prediction for one arm in one cell.

    wrong: parts whose backward differs (forward never does); stale: the check under test must raise instead.
    launches: {"forward": n, "grad_input": m}, over all paths; None where nothing is counted.
    """

    wrong: frozenset[int] = frozenset()
    stale: bool = False
    launches: dict[str, int] | None = None


@dataclass(frozen=True)
class Claim:
    """A claim about the product that is no comparison of tensors, and whether it held."""

    text: str
    holds: bool
    found: str


class Gate(Protocol):
    """One gate. `arms` have .name, .role and .not_run (None, or why the arm is left out); `cells` have .name."""

    name: str
    question: str
    arms: Sequence[Any]
    cells: Sequence[Any]
    soundness_only: (
        bool  # the cells take away what the gate is about: every arm must be right, else the harness is unsound
    )

    def parts_of(self, cell: Any) -> int: ...  # layers of an outcome
    def runs(self, arm: Any, cell: Any) -> bool: ...
    def reference_key(self, arm: Any, cell: Any) -> Hashable: ...
    def reference(self, arm: Any, cell: Any) -> Outcome: ...
    def measure(self, arm: Any, cell: Any) -> Outcome | list[Outcome]: ...  # several: of several backwards in one run
    def expected(self, arm: Any, cell: Any) -> Expectation: ...
    def claims(self) -> list[Claim]: ...


@dataclass
class Result:
    """One arm in one cell, compared. Differences: max |a - b| by part, 0.0 for equal bits, inf for NaN."""

    arm: str
    role: str
    cell: str
    parts: int  # layers
    forward_difference: list[float]
    backward_difference: list[float]
    forward_compared: int
    backward_compared: int
    raised: str | None
    stale: bool
    expected: Expectation
    launches: dict[str, int] | None
    faults: list[str] = field(default_factory=list)  # why this cell gives no verdict
    measured: list[str] = field(default_factory=list)  # what each backward of each run showed, where there are several

    @property
    def forward_wrong(self) -> frozenset[int]:
        return frozenset(i for i, d in enumerate(self.forward_difference) if d != 0)

    @property
    def backward_wrong(self) -> frozenset[int]:
        return frozenset(i for i, d in enumerate(self.backward_difference) if d != 0)

    @property
    def as_expected(self) -> bool:
        if self.raised is not None or self.expected.stale:
            return self.stale and self.expected.stale
        return not self.forward_wrong and self.backward_wrong == self.expected.wrong

    @property
    def must_fail(self) -> bool:
        return self.expected.stale or bool(self.expected.wrong)

    @property
    def shown(self) -> str:
        """The backward in one word: one character a part, X wrong, . right."""
        if self.raised is not None:
            return "raises" if self.stale else "ERROR"
        return "".join("X" if d else "." for d in self.backward_difference)


@dataclass
class Report:
    """A gate's results and what they add up to. A result has .role, .faults, .as_expected and .must_fail."""

    gate: str
    question: str
    results: list[Any]
    not_run: dict[str, str]
    soundness_only: bool = False
    faults: list[str] = field(default_factory=list)  # why the whole gate gives no verdict
    claims: list[Claim] = field(default_factory=list)
    findings: dict[str, Any] = field(default_factory=dict)  # what was measured beside the verdict, as plain data
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """No verdict outranks the rest: numbers that cannot be trusted accuse nobody."""
        product = [r for r in self.results if r.role == Role.PRODUCT.value]
        controls = [r for r in self.results if r.role == Role.CONTROL.value]
        right = all(r.as_expected for r in self.results)
        if self.faults or not product or any(r.faults for r in self.results) or (self.soundness_only and not right):
            return Verdict.NO_VERDICT
        if not all(r.as_expected for r in product) or not all(claim.holds for claim in self.claims):
            return Verdict.PRODUCT_WRONG
        could_fail = self.soundness_only or any(r.must_fail for r in controls)
        return Verdict.OK if right and could_fail else Verdict.CONTROL_DID_NOT_FAIL


def compare(got: list[dict[str, torch.Tensor]], want: list[dict[str, torch.Tensor]]) -> tuple[list[float], int]:
    """(largest difference by part, number of tensors compared). A name that one side lacks is a difference."""
    found, places, pairs = [], [], []
    for part in range(max(len(got), len(want))):
        left = got[part] if part < len(got) else {}
        right = want[part] if part < len(want) else {}
        found.append(0.0 if left.keys() == right.keys() else float("inf"))
        for name in left.keys() & right.keys():
            places.append(part)
            pairs.append((left[name], right[name]))
    for part, value in zip(places, differences(pairs), strict=True):
        found[part] = max(found[part], value)
    return found, len(pairs)


def differences(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Of each pair max |a - b|: 0.0 only where shape, dtype and every value agree and none is NaN. The device is waited
    for once or twice, however many pairs there are.
    """
    found = [0.0 if a.shape == b.shape and a.dtype == b.dtype else float("inf") for a, b in pairs]
    alike = [i for i, value in enumerate(found) if value == 0]
    apart = read([(pairs[i][0] != pairs[i][1]).any() for i in alike])
    unequal = [i for i, other in zip(alike, apart, strict=True) if other]
    largest = read([(pairs[i][0].double() - pairs[i][1].double()).abs().max() for i in unequal])
    for i, value in zip(unequal, largest, strict=True):
        found[i] = value if value == value and value > 0 else float("inf")
    return found


def read(scalars: list[torch.Tensor]) -> list:
    """Their values, from one device in one transfer."""
    if len({value.device for value in scalars}) == 1:
        return torch.stack(scalars).tolist()
    return [value.item() for value in scalars]


def run_gate(gate: Gate, *, repeats: int = 1, algorithms: str = "error") -> Report:
    """Runs every arm of `gate` in every cell `repeats` times; keeps the worst backward of a cell. algorithms: as for
    repeatable_algorithms().
    """
    started = time.monotonic()
    arms = [arm for arm in gate.arms if arm.not_run is None]
    not_run = {arm.name: arm.not_run for arm in gate.arms if arm.not_run is not None}
    report = Report(gate.name, gate.question, [], not_run, gate.soundness_only)
    references: dict[Hashable, Outcome] = {}
    with repeatable_algorithms(algorithms):
        for cell in gate.cells:
            pairs = [(arm, gate.reference_key(arm, cell)) for arm in arms if gate.runs(arm, cell)]
            for arm, key in pairs:
                if key not in references:
                    references[key] = gate.reference(arm, cell)
                    report.faults += a_against_a(
                        references[key], gate.reference(arm, cell), gate.parts_of(cell), f"{arm.name} | {cell.name}"
                    )
            rounds = [[_results(gate, arm, cell, references[key]) for arm, key in pairs] for _ in range(repeats)]
            report.results += [_worst(list(chain(*runs))) for runs in zip(*rounds, strict=True)]
        report.claims = gate.claims()
    report.seconds = time.monotonic() - started
    return report


def a_against_a(first: Outcome, second: Outcome, parts: int, where: str) -> list[str]:
    """Why the reference cannot serve: it raised, compared nothing, differs from itself, or rests on a zero tensor."""
    if first.raised or second.raised:
        return [f"reference of {where} raised: {first.raised or second.raised}"]
    faults = []
    for direction in ("forward", "backward"):
        found, compared = compare(getattr(first, direction), getattr(second, direction))
        if compared == 0 or len(found) != parts or not all(getattr(first, direction)):
            faults.append(
                f"reference of {where}: {compared} {direction} tensors in {len(found)} parts, expected {parts}"
            )
        if any(found):
            faults.append(
                f"reference of {where} is not repeatable: {direction} differs from itself by {max(found):.3e}"
            )
        if not all(read([value.any() for part in getattr(first, direction) for value in part.values()])):
            faults.append(
                f"reference of {where}: a {direction} tensor is all zero, which equals any other failure to compute it"
            )
    if not all(read([value.any() for value in first.nonzero])):
        faults.append(f"reference of {where}: a tensor that must not be zero (LoRA B) is zero")
    return faults


def _results(gate: Gate, arm: Any, cell: Any, reference: Outcome) -> list[Result]:
    """One run: a result for each of its backwards."""
    measured, expected = gate.measure(arm, cell), gate.expected(arm, cell)
    outcomes = measured if isinstance(measured, list) else [measured]
    return [_result(arm, cell, gate.parts_of(cell), outcome, expected, reference) for outcome in outcomes]


def _result(arm: Any, cell: Any, parts: int, outcome: Outcome, expected: Expectation, reference: Outcome) -> Result:
    forward, forward_compared = compare(outcome.forward, reference.forward) if outcome.raised is None else ([], 0)
    backward, backward_compared = compare(outcome.backward, reference.backward) if outcome.raised is None else ([], 0)
    result = Result(
        arm.name,
        Role(arm.role).value,
        cell.name,
        parts,
        forward,
        backward,
        forward_compared,
        backward_compared,
        outcome.raised,
        outcome.stale,
        expected,
        outcome.launches,
    )
    if outcome.raised is None:
        if min(forward_compared, backward_compared) == 0:
            result.faults.append("nothing was compared")
        if expected.launches is not None:
            paths, counts = launch_faults(outcome.launches or {}, reference.launches or {}, expected.launches)
            result.faults += paths + (counts if result.as_expected else [])
    return result


def launch_faults(
    got: dict[str, int], reference: dict[str, int], expected: dict[str, int]
) -> tuple[list[str], list[str]]:
    """(other paths than the reference's, other counts than expected).

    A difference between two paths accuses nobody. Equality by another number of launches proves nothing, but a
    difference stays one.
    """
    paths, counts = [], []
    if got.keys() != reference.keys():
        paths.append(f"paths {sorted(got)}, but its reference took {sorted(reference)}")
    for direction, count in expected.items():
        total = sum(n for name, n in got.items() if name.endswith("." + direction))
        if total != count:
            counts.append(f"{total} {direction} launches of the op under test, expected {count}")
    return paths, counts


def _worst(results: Sequence[Result]) -> Result:
    """Any repeat that broke the prediction outranks those that met it."""
    worst = next((r for r in results if r.faults), next((r for r in results if not r.as_expected), results[0]))
    if len(results) > 1:
        worst.measured = [r.shown for r in results]
    return worst


@contextlib.contextmanager
def repeatable_algorithms(mode: str = "error") -> Iterator[None]:
    """Deterministic algorithms for the block, the caller's setting after it. mode: what an op without one does, "error"
    or "warn"; "default": whatever is fastest.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(mode)  # not use_deterministic_algorithms(): that imports the compiler, seconds
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """One CPU thread for the block: for matrices of kilobytes, waking the others costs more than they do."""
    if not wanted:
        yield
        return
    before = torch.get_num_threads(), lib.nybble_num_threads()
    torch.set_num_threads(1)
    lib.nybble_set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        lib.nybble_set_num_threads(before[1])
