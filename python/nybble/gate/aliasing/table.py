"""The printed tables of the aliasing gate: one cell layer by layer, then every cell in one line."""

from __future__ import annotations

import itertools

from nybble.gate.aliasing.cells import Cell
from nybble.gate.report import shown
from nybble.gate.runner import Report, Result, Role


def render(report: Report, cells: list[Cell]) -> list[str]:
    """The lines before the verdict."""
    by_cell: dict[str, list[Result]] = {}
    for result in report.results:
        by_cell.setdefault(result.cell, []).append(result)
    lines = [
        f"{report.findings['runs']} runs of {report.findings['backwards_of_a_run']} backwards; a packed layer has "
        + ", ".join(f"{mib:g} MiB ({kind})" for kind, mib in report.findings["layer_mib"].items())
    ]
    if cells and cells[0].name in by_cell:
        lines += first_cell(by_cell[cells[0].name], cells[0])
    lines += every_cell(by_cell, cells)
    if report.claims:
        lines += ["", "Slots read on purpose, against the rules"]
        lines += [f"  {'ok ' if claim.holds else 'BAD'} {claim.text}: {claim.found}" for claim in report.claims]
    return lines


def first_cell(results: list[Result], cell: Cell) -> list[str]:
    """Largest difference of a gradient from the one through private buffers, layer by layer."""
    results = [r for r in results if r.raised is None]
    width = max([26, *(len(r.arm) + 13 for r in results)])
    lines = [cell.name, "layer  " + "".join(f"{r.arm + ' vs private':>{width}}" for r in results)]
    for layer in range(max((r.parts for r in results), default=0)):
        entries = (r.backward_difference[layer] for r in results)
        lines.append(
            f"{layer:>5}  " + "".join(f"{d:>{width - 9}.6e} {'MISMATCH' if d else '  ok    '}" for d in entries)
        )
    return lines


def every_cell(by_cell: dict[str, list[Result]], cells: list[Cell]) -> list[str]:
    """One line a cell: X = a layer with wrong gradients, * = not as predicted, ~ = an unsafe op with right numbers."""
    arms = list(dict.fromkeys(r.arm for results in by_cell.values() for r in results))
    layers = max((r.parts for results in by_cell.values() for r in results), default=0)
    width = max([layers + 2, *(len(arm) + 2 for arm in arms)])
    lines = [
        "",
        "Backward by layer: X wrong, . right; 'raises' = the owner check; ~ hides the defect; * not as predicted",
    ]
    for _, group in itertools.groupby(cells, key=lambda c: (c.stack, c.ring)):
        group = list(group)
        heading = f"{group[0].stack.value}; {group[0].ring.value}"
        lines += ["", heading, f"{'slots  checkpoint':<24}" + "".join(f"{arm:<{width}}" for arm in arms)]
        for cell in group:
            found = {r.arm: r for r in by_cell.get(cell.name, [])}
            marks = (_mark(found[arm]) if arm in found else "-" for arm in arms)
            lines.append(f"{cell.slots:>5}  {cell.mode.value:<17}" + "".join(f"{mark:<{width}}" for mark in marks))
    return lines


def _mark(result: Result) -> str:
    text = shown(result)
    if not result.as_expected or result.faults:
        return text + "*"
    hides = result.role == Role.CONTROL.value and result.raised is None and not result.backward_wrong
    return text + ("~" if hides else "")
