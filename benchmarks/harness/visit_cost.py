#!/usr/bin/env python3
"""What streaming costs the host per layer visit, in microseconds, without the copies.

    python benchmarks/harness/visit_cost.py [--rounds 9] [--json]

The layers are 4 KiB, so a refill's memcpy is nothing; what is left is bookkeeping: two calls into the core (acquire,
release), the state machine, waking the copy thread, autograd's version counter. CPU time of the calling thread, so that
a busy machine and the wait for the copy do not count; best and median of rounds.
"""

import argparse
import json
import platform
import statistics
import time

import torch

import nybble
from nybble.streaming import native
from nybble.streaming.visit import Fetcher, LayerVisit

LAYERS, BYTES = 8, 4096


class Body(torch.nn.Module):
    def forward(self, x):
        return x


def make_visits(window: int) -> list[LayerVisit]:
    arena, uids = native.Arena(), []
    for index in range(LAYERS):
        layer, _, _ = arena.add_layer(["all"], [BYTES])
        arena.fill(layer, 0, torch.zeros(BYTES, dtype=torch.uint8))
        uids.append(native.register_owner(f"layer {index}"))
    slots = [torch.empty(BYTES, dtype=torch.uint8) for _ in range(window)]
    fetcher = Fetcher(native.Ring(arena, uids, slots), LAYERS, window, torch.device("cpu"))
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


def pieces():
    """Name and body(calls) of everything that is measured; each call is one visit."""
    held, rolling = make_visits(LAYERS), make_visits(2)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: microseconds(body, options.calls, options.rounds) for name, body in pieces().items()}
    machine = {"python": platform.python_version(), "torch": torch.__version__, **nybble.build_info()}
    if options.json:
        print(json.dumps({"machine": machine, "rounds": options.rounds, "calls": options.calls, "us": results}))
        return
    print(f"{'microseconds per call':52}  {'best':>7}  {'median':>7}")
    for name, (best, median) in results.items():
        print(f"{name:52}  {best:7.2f}  {median:7.2f}")


if __name__ == "__main__":
    main()
