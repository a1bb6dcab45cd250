"""Gates whose arms are judged by named checks (an error, a count, bytes, a time) instead of bit for bit.

The verdicts are the runner's: a product must pass every check, a control must fail exactly those that its prediction
names, a row that compared nothing is no verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nybble.gate.runner import Claim, Report, Role, one_thread, repeatable_algorithms


@dataclass(frozen=True)
class Check:
    """One named question to an arm, and its answer."""

    name: str
    holds: bool
    found: str


@dataclass
class CheckArm:
    """What is judged. must: the checks that a control has to fail; may: those that it may fail as well."""

    name: str
    role: str  # product, native or control (runner.Role)
    act: Callable[..., Any]
    must: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()
    not_run: str | None = None


@dataclass
class Judged:
    """An arm's answers in one cell. compared: elements or samples behind them. faults: why they say nothing."""

    checks: list[Check]
    compared: int
    values: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass
class Row:
    """One arm in one cell, judged against its prediction."""

    arm: str
    role: str
    cell: str
    checks: list[Check]
    must: frozenset[str]
    may: frozenset[str]
    compared: int
    values: dict[str, Any]
    faults: list[str]
    raised: str | None = None

    @property
    def red(self) -> frozenset[str]:
        return frozenset(check.name for check in self.checks if not check.holds)

    @property
    def as_expected(self) -> bool:
        return self.raised is None and self.must <= self.red <= self.must | self.may

    @property
    def must_fail(self) -> bool:
        return bool(self.must)


class CheckGate:
    """One gate. `cells` have .name; left_out: what this machine could not run, and why. `arms` may be replaced, so that
    tests can plant a defect.
    """

    name: str
    question: str
    arms: Sequence[CheckArm]
    cells: Sequence[Any]
    device: torch.device
    algorithms = "error"  # runner.repeatable_algorithms; timed gates take the fastest
    left_out: dict[str, str]

    def runs(self, arm: CheckArm, cell: Any) -> bool:
        """Whether the arm has anything to do with the cell."""
        return True

    def prepare(self, cell: Any) -> Any:
        """What the arms of a cell share. Timed gates run all arms here, interleaved."""

    def judge(self, arm: CheckArm, cell: Any, shared: Any) -> Judged:
        raise NotImplementedError

    def claims(self) -> list[Claim]:
        """Claims about the product that are no row."""
        return []

    def after(self, report: Report) -> None:
        """Sees every row; may add faults and findings."""


def run_checks(gate: CheckGate) -> Report:
    """Judges every arm of `gate` in every cell; on the CPU with one thread, as the sizes there are small."""
    started = time.monotonic()
    arms = [arm for arm in gate.arms if arm.not_run is None]
    report = Report(gate.name, gate.question, [], {arm.name: arm.not_run for arm in gate.arms if arm.not_run})
    with repeatable_algorithms(gate.algorithms), one_thread(gate.device.type == "cpu"):
        for cell in gate.cells:
            shared = gate.prepare(cell)
            report.results += [row(gate, arm, cell, shared) for arm in arms if gate.runs(arm, cell)]
            del shared
        report.claims = gate.claims()
        gate.after(report)
    report.not_run.update(gate.left_out)
    report.seconds = time.monotonic() - started
    return report


def row(gate: CheckGate, arm: CheckArm, cell: Any, shared: Any) -> Row:
    """One arm in one cell. What it raises is its result."""
    must, may = (frozenset(), frozenset()) if arm.role != Role.CONTROL.value else (arm.must, arm.may)
    result = Row(arm.name, Role(arm.role).value, cell.name, [], must, may, 0, {}, [])
    try:
        judged = gate.judge(arm, cell, shared)
    except Exception as error:
        result.raised = f"{type(error).__name__}: {error}"
        return result
    result.checks, result.compared, result.values = judged.checks, judged.compared, judged.values
    result.faults += judged.faults
    if judged.compared == 0 or not judged.checks:
        result.faults.append("nothing was compared")
    return result


def reasons(row: Row) -> list[str]:
    """Lines that say in what a row is not as predicted."""
    where = f"{row.arm} | {row.cell}"
    lines = [f"{where}: {fault}" for fault in row.faults]
    if row.raised is not None:
        return [*lines, f"{where}: raised {row.raised}"]
    if not row.as_expected:
        found = (
            "; ".join(f"{check.name}: {check.found}" for check in row.checks if not check.holds) or "every check holds"
        )
        expected = "red " + ", ".join(sorted(row.must)) if row.must else "every check to hold"
        lines.append(f"{where}: {found}; expected {expected}")
    return lines


def row_json(row: Row) -> dict[str, Any]:
    """A row as plain data."""
    return {
        "arm": row.arm,
        "role": row.role,
        "cell": row.cell,
        "checks": {check.name: {"holds": check.holds, "found": check.found} for check in row.checks},
        "expected_red": sorted(row.must),
        "may_be_red": sorted(row.may),
        "as_expected": row.as_expected,
        "compared": row.compared,
        "values": row.values,
        "raised": row.raised,
        "faults": row.faults,
    }


def summary_lines(report: Report) -> list[str]:
    """One line an arm: rows, rows that are red by check, what a control had to fail."""
    rows = [r for r in report.results if isinstance(r, Row)]
    lines = []
    for arm in dict.fromkeys(r.arm for r in rows):
        own = [r for r in rows if r.arm == arm]
        names = dict.fromkeys(check.name for r in own for check in r.checks)
        red = ", ".join(f"{name} {sum(name in r.red for r in own)}" for name in names)
        must = ", ".join(sorted(own[0].must))
        right = sum(r.as_expected and not r.faults for r in own)
        lines.append(
            f"{own[0].role:<8} {arm:<28} {right} of {len(own)} as predicted; red: {red}"
            + (f"; must: {must}" if must else "")
        )
    return lines
