#!/usr/bin/env python3
"""What streaming costs the host per layer visit, in microseconds, without the copies.

    python benchmarks/harness/visit_cost.py [--device cpu|cuda] [--rounds 9] [--pin] [--json] [--record PATH]
        [--pieces-only]

Pieces: the layers are 4 KiB, so a refill's copy is nothing; what is left is bookkeeping: two calls into the core
(acquire, release), the state machine, waking the copy thread or enqueuing a copy and its events, autograd's version
counter. CPU time of the calling thread, so that a busy machine and waiting do not count; best and median of rounds.

Step: a LoRA training step of a model of 8 layers so small that the host's work is all there is, streamed and resident
(with the same multiply), in turn. Total = the streamed step / visits (two a layer: forward and backward), as it is,
with the backward on the calling thread, and without Python's garbage collector. Added time = the difference of the two
steps / visits, pairs of one round, without collector and with the backward on the calling thread, whose CPU time is
taken: else it drowns. Where it goes: the step profiled, own time by package and function; one projection's parts.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import statistics
import sys
import tempfile
import time

import torch
import visit_profile

import nybble
from nybble._library import lib
from nybble.streaming import native
from nybble.streaming.visit import Fetcher, LayerVisit

LAYERS, BYTES = 8, 4096
QUIET = "no collector, backward on the calling thread"
LARGEST_ADDED_US = 100
STEP_LAYERS = 8


class Body(torch.nn.Module):
    def forward(self, x):
        return x


def make_visits(window: int, device: torch.device) -> list[LayerVisit]:
    arena, uids = native.Arena(), []
    for index in range(LAYERS):
        layer, _, _ = arena.add_layer(["all"], [BYTES])
        arena.fill(layer, 0, torch.zeros(BYTES, dtype=torch.uint8))
        uids.append(native.register_owner(f"layer {index}"))
    slots = [torch.empty(BYTES, dtype=torch.uint8, device=device) for _ in range(window)]
    fetcher = Fetcher(native.Ring(arena, uids, slots), LAYERS, window, device)
    visits = [LayerVisit(index, f"layer {index}") for index in range(LAYERS)]
    for visit in visits:
        visit.fetcher = fetcher
    return visits


def microseconds(body, calls: int, rounds: int) -> tuple[float, float]:
    """Best and median of rounds, per call."""
    body(calls // 10)
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        body(calls)
        times.append((time.thread_time() - start) / calls * 1e6)
    return min(times), statistics.median(times)


def pieces(device: torch.device):
    """Name and body(calls) of everything that is measured; each call is one visit."""
    held, rolling = make_visits(LAYERS, device), make_visits(2, device)
    x = torch.zeros(1)
    body = Body().eval()

    def bookkeeping(calls):
        fetcher = held[0].fetcher
        for i in range(calls):
            fetcher.acquire(i % LAYERS, native.FORWARD)
            fetcher.release(i % LAYERS)

    def visit(visits):
        def run(calls):
            with torch.no_grad():
                for i in range(calls):
                    visits[i % LAYERS].leave(visits[i % LAYERS].enter(body, x))

        return run

    def release_hook(calls):
        for _ in range(calls):
            torch.zeros(1, requires_grad=True).register_hook(held[0]._release_hook)

    def tensor_alone(calls):
        for _ in range(calls):
            torch.zeros(1, requires_grad=True)

    def owner_check(calls):
        slot = held[0].fetcher.ring.slots[0]
        uid = held[0].fetcher.ring.status(0)["owner"]
        for _ in range(calls):
            native.verify_owner(uid, [slot.data_ptr()])

    return {
        "acquire + release, layer in its slot": bookkeeping,
        "a whole visit (enter + leave), layer in its slot": visit(held),
        "a whole visit, 2 slots, a refill of 4 KiB each": visit(rolling),
        "release hook on the layer's input, with its tensor": release_hook,
        "that tensor alone": tensor_alone,
        "owner check called from Python": owner_check,
    }


def step_cost(device: torch.device, rounds: int) -> dict[str, float]:
    """Microseconds per visit: medians over rounds of one step of each, and of their difference."""
    from stream_arms import Resident, Streamed, with_adapters
    from stream_store import SHAPES, write_store

    shape = SHAPES["tiny"] | {"layers": STEP_LAYERS}
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(pathlib.Path(folder) / "store", shape, device)
        streamed = Streamed(with_adapters(nybble.stream(None, store, device=device), 4))
        resident = Resident(with_adapters(nybble.unstream(nybble.stream(None, store, device=device)), 4))
    ids = torch.randint(3, 256, (1, 16), device=device)
    arms = {"streamed": streamed, "resident": resident}
    for arm, model in arms.items():
        model.switch(arm)
    settings = {name: times_under(name, arms, ids, rounds) for name in visit_profile.SETTINGS}
    usual, quiet = settings["usual"], settings[QUIET]
    profile = visit_profile.of_step(lambda: streamed.gradients(ids), 2 * STEP_LAYERS)
    differences = [a - b for a, b in zip(quiet["streamed"], quiet["resident"], strict=True)]
    return {
        "where": visit_profile.by_package(profile),
        "functions": visit_profile.by_function(profile),
        "projection": visit_profile.projection(streamed),
        "added": statistics.median(differences),
        "added_interval": interval(differences),
        "pairs": len(differences),
        "total": statistics.median(usual["streamed"]),
        "resident": statistics.median(usual["resident"]),
        "settings": {
            name: {arm: statistics.median(us) for arm, us in found.items()} for name, found in settings.items()
        },
    }


def times_under(setting: str, arms: dict, ids: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Microseconds per visit of each round, the arms in turn; the first round does not count."""
    device = ids.device
    # Thread time leaves out a busy machine. On CUDA the backward has a thread of its own, unless it is told not to.
    clock = time.perf_counter if device.type == "cuda" and setting != QUIET else time.thread_time
    times = {arm: [] for arm in arms}
    with visit_profile.SETTINGS[setting]():
        for turn in range(rounds + 1):
            for arm, model in list(arms.items())[:: -1 if turn % 2 else 1]:
                synchronize(device)
                start = clock()
                model.gradients(ids)
                synchronize(device)
                times[arm].append((clock() - start) / (2 * STEP_LAYERS) * 1e6)
    return {arm: values[1:] for arm, values in times.items()}


def interval(values: list[float], draws: int = 2000) -> list[float]:
    """95% bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return [medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pin", action="store_true", help="the process to one core")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", type=pathlib.Path, metavar="PATH", help="also write PATH.json and PATH.md")
    parser.add_argument("--pieces-only", action="store_true")
    options = parser.parse_args()
    if options.pin:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    lib.nybble_set_num_threads(1)
    device = torch.device(options.device)
    results = {name: microseconds(body, options.calls, options.rounds) for name, body in pieces(device).items()}
    step = None if options.pieces_only else step_cost(device, options.rounds)
    machine = {"python": platform.python_version(), "torch": torch.__version__, **nybble.build_info()}
    record = {
        "command": " ".join(["visit_cost.py", *arguments_without(options.record)]),
        "commit": os.environ.get("NYBBLE_COMMIT"),
        "machine": {key: value for key, value in machine.items() if key != "library"},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "us": results,
        "step_us_per_visit": step,
    }
    if options.record:
        options.record.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        head = f"# The host's time of a streamed visit, {record['device']}\n\n`{record['command']}`, commit "
        head += f"{record['commit']}; torch {machine['torch']}, Python {machine['python']}.\n\n```\n"
        options.record.with_suffix(".md").write_text(head + "\n".join(lines(record)) + "\n```\n")
    print(json.dumps(record) if options.json else "\n".join(lines(record)))


def arguments_without(path: pathlib.Path | None) -> list[str]:
    """The command line but for where the record goes."""
    return [argument for argument in sys.argv[1:] if argument not in ("--record", str(path))]


def lines(record: dict) -> list[str]:
    found = [f"{'microseconds per call':52}  {'best':>7}  {'median':>7}"]
    found += [f"{name:52}  {best:7.2f}  {median:7.2f}" for name, (best, median) in record["us"].items()]
    step = record["step_us_per_visit"]
    if step is None:
        return found
    profiled = sum(row["us"] for row in step["where"].values())
    low, high = step["added_interval"]
    word = "holds" if high <= LARGEST_ADDED_US else "MISSED" if low > LARGEST_ADDED_US else "no verdict, too wide"
    return [
        *found,
        f"training step of {STEP_LAYERS} layers, per visit: total {step['total']:.1f} us, "
        f"resident {step['resident']:.1f} us",
        f"added by streaming, per visit: {step['added']:.1f} us ({low:.1f} .. {high:.1f}, 95% of the median of "
        f"{step['pairs']} pairs, {QUIET}); at most {LARGEST_ADDED_US}: {word}",
        *(
            f"  {name}: streamed {us['streamed']:.1f} us, resident {us['resident']:.1f} us"
            for name, us in step["settings"].items()
        ),
        f"where a visit's {profiled:.0f} us go when profiled (Python calls cost more then):",
        *(f"  {100 * r['us'] / profiled:5.1f}%  {r['calls']:7.1f} calls  {name}" for name, r in step["where"].items()),
        *(f"  {us:8.1f} us {calls:7.1f} calls  {name}" for name, us, calls in step["functions"]),
        "one projection, us a call:",
        *(f"  {us:8.1f}  {name}" for name, us in step["projection"].items()),
    ]


if __name__ == "__main__":
    main()
