"""The cells of the gate shared out to processes: on a GPU its steps wait for one core that enqueues small kernels."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from nybble.gate import room
from nybble.gate.aliasing.cells import Cell, Mode
from nybble.gate.runner import Report

LARGEST = 8  # processes
CONTEXT_BYTES = 512 << 20  # of a card, for a process

Judge = Callable[[argparse.Namespace, Sequence[str], bool], Report]


def default_count(device: str, full: bool) -> int:
    """Processes by default: one, but on a GPU half of the cores for the sizes of a record."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(LARGEST, cores // 2)) if device == "cuda" and full else 1


def count_that_fits(wanted: int, need: float, free: int | None) -> int:
    """At most `wanted` processes, each of which takes a context and `need` bytes of the card; at least one."""
    if free is None:
        return wanted
    each = need * room.MARGIN + room.FIXED_BYTES + CONTEXT_BYTES
    return max(1, min(wanted, int(free // each)))


def shares(cells: Sequence[Cell], count: int) -> list[list[str]]:
    """Names of cells for each process. Long cells are dealt out first, so that every process gets as many of them."""
    order = sorted(cells, key=lambda cell: (not cell.is_llama, cell.mode is Mode.REENTRANT))
    return [part for part in ([cell.name for cell in order[i::count]] for i in range(count)) if part]


def run_shared(judge: Judge, options: argparse.Namespace, cells: Sequence[Cell], count: int) -> Report:
    """judge(options, names of cells, with the claims) in `count` processes; one report, in the order of `cells`.

    A process that dies raises here: what it would have found is not known, so there is no verdict.
    """
    started = time.monotonic()
    parts = shares(cells, count)
    with ProcessPoolExecutor(len(parts), multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(judge, options, names, i == 0) for i, names in enumerate(parts)]
        report = merged([job.result() for job in waiting], cells)
    report.seconds = time.monotonic() - started
    return report


def merged(reports: Sequence[Report], cells: Sequence[Cell]) -> Report:
    """The reports of all shares as one."""
    place = {cell.name: i for i, cell in enumerate(cells)}
    whole = reports[0]
    whole.results = sorted((r for report in reports for r in report.results), key=lambda r: place[r.cell])
    whole.faults = [fault for report in reports for fault in report.faults]
    whole.claims = [claim for report in reports for claim in report.claims]
    for report in reports[1:]:
        whole.not_run |= report.not_run
        whole.findings["layer_mib"] |= report.findings["layer_mib"]
    return whole
