"""Times of h200_stream.py's arms: turns in a shuffled order, and what pairs of one round say about two arms."""

import contextlib
import gc
import os
import random
import statistics
import time

import torch
from stream_arms import GARBAGE
from stream_report import RATIOS, SAVINGS, TIME_OF_RESIDENT
from visit_profile import no_collector

from nybble.gate.training.timing import saving


@contextlib.contextmanager
def quiet_host(options):
    """No garbage collector; --calling-thread and --pin as asked: the backward on it, and it on one core."""
    cores = os.sched_getaffinity(0)
    if options.pin:
        os.sched_setaffinity(0, {max(cores)})  # of the calling thread; those that it starts follow
    try:
        with no_collector(), torch.autograd.set_multithreading_enabled(not options.calling_thread):
            yield
    finally:
        os.sched_setaffinity(0, cores)


def time_arms(case, tokens: int, save) -> None:
    """Turns of every arm that has memory. Each has run at this length before, for its memory."""
    ids, options = case.tokens(tokens), case.options
    arms = [arm for arm in case.arms if not case.row(arm, tokens).get("out_of_memory")]
    times = {arm: [] for arm in arms}
    began = time.time()
    while len(times[arms[0]]) < options.rounds or time.time() - began < options.length_seconds:
        random.shuffle(arms)
        for arm in arms:
            times[arm].append(turn(case, arm, tokens, ids))
        for arm in arms:
            finish_row(case, arm, tokens, times[arm], statistics.median(t[0] for t in times["resident"]))
        compare(case, tokens, {arm: [t[0] for t in times[arm]] for arm in arms})
        save()


def turn(case, arm: str, tokens: int, ids: torch.Tensor) -> tuple[float, float, float, float, float]:
    """Seconds of a step, seconds until it was enqueued, the span of wall clock, the loss."""
    model, steps = case.prepare(arm, tokens), case.options.steps
    for group in model.optimiser.param_groups:
        group["lr"] = 0.0 if arm in GARBAGE else 1e-4
    gc.collect()
    before = model.fingerprint()  # waits for the device
    began, start = time.time(), time.perf_counter()
    for _ in range(steps):
        loss = model.step(ids)
    enqueued = (time.perf_counter() - start) / steps
    case.sync()
    took = (time.perf_counter() - start) / steps
    ended = time.time()
    row = case.row(arm, tokens)
    row["gradient_norm"] = model.gradient_norm()
    row["adapters_moved"] = row.get("adapters_moved", 0) + (model.fingerprint() != before)  # rounds
    return took, enqueued, began, ended, loss.item()


def compare(case, tokens: int, times: dict[str, list[float]]) -> None:
    row = case.row("streamed", tokens)
    others = {key: arm for key, (arm, _) in RATIOS.items()} | {TIME_OF_RESIDENT: "resident"}
    for key, other in others.items():
        if "streamed" in times and other in times:
            found = saving(times[other], times["streamed"])
            row[key] = [1 - found.middle, 1 - found.high, 1 - found.low]
    savings = case.record["savings"].setdefault(str(tokens), {})
    for less, more, text in SAVINGS:
        if less in times and more in times:
            found = saving(times[more], times[less])
            savings[text] = [found.middle, found.low, found.high]


def finish_row(case, arm: str, tokens: int, rounds: list[tuple], resident: float) -> None:
    row, times = case.row(arm, tokens), [seconds for seconds, *_ in rounds]
    seconds = statistics.median(times)
    quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [seconds, seconds, seconds]
    row.update(
        step_ms=1e3 * seconds,
        host_ms=1e3 * statistics.median(enqueued for _, enqueued, *_ in rounds),
        tok_s=tokens / seconds,
        spread=(max(times) - min(times)) / seconds,
        quartiles=(quarters[2] - quarters[0]) / seconds,
        rounds_ms=[1e3 * t for t in times],
        ratio_resident=resident / seconds,
        loss_first=rounds[0][-1],
        loss_last=rounds[-1][-1],
        **case.samples.during([(began, ended) for _, _, began, ended, _ in rounds]),
    )
    if case.record["h2d_gb_s"] and row.get("copied_bytes"):
        row["ratio_link"] = row["copied_bytes"] / seconds / (case.record["h2d_gb_s"] * 1e9)
