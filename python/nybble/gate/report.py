"""What every gate prints: its verdict with reasons, and the same as JSON."""

from __future__ import annotations

import platform
from typing import Any

import torch

from nybble.gate import checks
from nybble.gate.runner import Report, Result, Role, Verdict

MEANING = {
    Verdict.OK: "ok: the product is right, and every control failed as predicted",
    Verdict.PRODUCT_WRONG: "PRODUCT WRONG",
    Verdict.CONTROL_DID_NOT_FAIL: "VACUOUS: a control did not behave as predicted, so a right product proves nothing",
    Verdict.NO_VERDICT: "NO VERDICT: nothing was compared, or the numbers cannot be trusted",
}

SHOWN = 24  # reasons that are printed; the JSON has all


def pattern(wrong: frozenset[int], parts: int) -> str:
    """One character a part: X wrong, . right."""
    return "".join("X" if part in wrong else "." for part in range(parts))


def shown(result: Result) -> str:
    """A cell's backward in one word."""
    return result.shown if result.raised is not None else pattern(result.backward_wrong, result.parts)


def reasons(report: Report) -> list[str]:
    """Every line that explains a verdict other than ok."""
    lines = list(report.faults)
    if report.soundness_only and not all(r.as_expected for r in report.results):
        lines.append("the harness is unsound: an arm differs although nothing was recycled")
    if not report.results:
        lines.append("no arm ran in any cell")
    elif not any(r.role == Role.PRODUCT.value for r in report.results):
        lines.append("no product arm ran")
    elif not report.soundness_only and not any(r.must_fail for r in report.results):
        lines.append("no control arm ran in a cell in which it must fail")
    for result in report.results:
        if isinstance(result, checks.Row):
            lines += checks.reasons(result)
            continue
        where = f"{result.arm} | {result.cell}"
        lines += [f"{where}: {fault}" for fault in result.faults]
        if not result.as_expected:
            want = "raises" if result.expected.stale else pattern(result.expected.wrong, result.parts)
            error = f" ({result.raised})" if result.raised else ""
            forward = f", forward {pattern(result.forward_wrong, result.parts)}" if result.forward_wrong else ""
            lines.append(f"{where}: backward {shown(result)}, expected {want}{forward}{error}")
    lines += [f"{claim.text}: {claim.found}" for claim in report.claims if not claim.holds]
    return lines


def verdict_lines(report: Report) -> list[str]:
    """The end of every gate's printout: counts by direction, arms left out, the verdict and why."""
    compared = [r for r in report.results if isinstance(r, Result) and r.raised is None]
    forward = sum(r.forward_compared for r in compared), sum(len(r.forward_wrong) for r in compared)
    backward = sum(r.backward_compared for r in compared), sum(len(r.backward_wrong) for r in compared)
    ended = sum(isinstance(r, Result) for r in report.results) - len(compared)
    lines = []
    if compared or ended:
        lines = [
            f"forward:  {forward[0]} tensors compared, {forward[1]} layers differ",
            f"backward: {backward[0]} tensors compared, {backward[1]} layers differ, {ended} runs ended by an error",
        ]
    lines += checks.summary_lines(report)
    lines += [f"not run: {arm} ({why})" for arm, why in report.not_run.items()]
    why = reasons(report)
    lines += [f"  {reason}" for reason in why[:SHOWN]]
    if len(why) > SHOWN:
        lines.append(f"  and {len(why) - SHOWN} more, see --json")
    meaning = MEANING[report.verdict]
    if report.soundness_only and report.verdict is Verdict.OK:
        meaning = "sound: with nothing recycled every arm is exact (this says nothing about the product)"
    where = f" on {report.findings['card']}" if "card" in report.findings else ""
    lines.append(f"{report.gate}{where}: {meaning} (exit {int(report.verdict)}, {report.seconds:.1f} s)")
    return lines


def machine() -> dict[str, Any]:
    """Where a report was made."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def as_json(report: Report) -> dict[str, Any]:
    """The whole report as plain data."""
    return {
        "gate": report.gate,
        "question": report.question,
        "verdict": int(report.verdict),
        "meaning": MEANING[report.verdict],
        "reasons": reasons(report),
        "not_run": report.not_run,
        "machine": machine(),
        "seconds": report.seconds,
        "claims": [{"claim": c.text, "holds": c.holds, "found": c.found} for c in report.claims],
        "findings": report.findings,
        "results": [
            checks.row_json(result) if isinstance(result, checks.Row) else _result_json(result)
            for result in report.results
        ],
    }


def _result_json(result: Result) -> dict[str, Any]:
    return {
        "arm": result.arm,
        "role": result.role,
        "cell": result.cell,
        "forward": {"compared": result.forward_compared, "wrong": sorted(result.forward_wrong)},
        "backward": {
            "compared": result.backward_compared,
            "wrong": sorted(result.backward_wrong),
            "largest_difference": [None if d == float("inf") else d for d in result.backward_difference],
        },
        "shown": shown(result),
        "expected": "raises" if result.expected.stale else pattern(result.expected.wrong, result.parts),
        "as_expected": result.as_expected,
        "raised": result.raised,
        "launches": result.launches,
        "faults": result.faults,
        **({"measured": counted(result.measured)} if result.measured else {}),
    }


def counted(words: list[str]) -> dict[str, int]:
    """How often each word was seen."""
    return {word: words.count(word) for word in dict.fromkeys(words)}
