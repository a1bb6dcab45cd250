"""Which plan of the Hopper path is best, and is it still best alone? Needs a GPU of compute capability 9.0.

    python hopper_plans.py LIBRARY [LIBRARY...] [--cells 4096x4096:512,1024 ...] [--rounds N] [--seconds S]
                           [--alone SECONDS] [--json FILE]

LIBRARY: libportable_bench.so (cmake --build BUILD --target portable_bench). For every cell and direction: dense
(torch.mm), the plan that the path itself takes ("auto"), and every other tile, schedule, way of the scales and raster
group that is a plan of its own; up to 128 tokens the tiles of the small-M kernel, too. Further libraries are other
builds of the kernels: what `auto` takes there, and the same with the other way of the scales ("1:auto", ...). Weights
rotate over 3 x L2, CUDA graph replays, arms shuffled in each round. An arm's ratio: median over rounds of its time /
the dense time of that round.
With --alone, where dense takes half a millisecond or more, the plan that auto takes, the best other one and dense then
run for that long each, one after another, the two plans once more in reverse order: a large multiply is power-limited,
and arms that alternate share one clock.
"""

import argparse
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

import torch
from portable_kernels import HOPPER, SMALL_M, Kernels, Weight
from portable_time import capture

# Tokens of a cluster's tile, in the order of HopperTile.
TILES = ("512", "256", "128", "rows256", "rows192", "rows160", "rows128", "rows96", "rows64")
ROW_PAIRS = [t for t, name in enumerate(TILES) if name.startswith("rows")]
SCHEDULES, SCALES = ("whole", "stream", "pieces"), ("exp", "own")
AUTO_GROUP, GROUPS = 4, (1, 2, 8)
GRAPH_US, WORKSPACE = 1500, 64 << 20
SMALL_M_TOKENS, SMALL_M_ROWS, SMALL_M_COLUMNS = 128, 256, 1024  # what its kernel takes
ALONE_US = 500  # from here on the card's power is what limits
DIRECTIONS = ("forward", "grad_x")
DEFAULT = ["4096x4096:512,1024,2048,4096", "14336x4096:2048,8192", "4096x14336:2048,8192", "1024x4096:2048,4096,8192"]


def variant(tile, schedule, scales):
    return (scales * len(TILES) + tile) * len(SCHEDULES) + schedule


def words(variant_number, group):
    schedule, rest = variant_number % len(SCHEDULES), variant_number // len(SCHEDULES)
    name = f"{TILES[rest % len(TILES)]} {SCHEDULES[schedule]} {SCALES[rest // len(TILES)]}"
    return name if group == AUTO_GROUP else f"{name} g{group}"


def candidates(rows, m):
    """(variant, group) of every plan worth a try for an output of so many rows and tokens."""
    waves = -(-rows // 128) * -(-m // 512) / 66
    tiles = (0, 1) if waves < 2 else (0,)
    if m <= 256:
        tiles = (1, 2, *(t for t in ROW_PAIRS if m <= 2 * int(TILES[t][4:])))
    elif m < 4096:  # row pairs that pad no more than tiles of 256
        padded = {t: -(-m // int(TILES[t][4:])) * int(TILES[t][4:]) for t in ROW_PAIRS if int(TILES[t][4:]) > 128}
        tiles = (0, 1, *(t for t, tokens in padded.items() if tokens <= -(-m // 256) * 256))
    ways = {t: (1,) if t in ROW_PAIRS else (0, 1) for t in tiles}
    found = [(variant(t, s, c), AUTO_GROUP) for t in tiles for s in range(3) for c in ways[t]]
    return found + [(variant(0, 0, c), group) for c in range(2) for group in GROUPS if m > 1024]


class Cell:
    """Graphs of all arms of one shape, M and direction."""

    def __init__(self, libraries, weights, dense, m, direction, only=None):
        self.n, self.k, self.m, self.direction = weights[0].n, weights[0].k, m, direction
        backward = direction == "grad_x"
        reduction, columns = (self.n, self.k) if backward else (self.k, self.n)
        self.x = torch.randn(m, reduction, dtype=torch.bfloat16, device="cuda")
        self.out = torch.full((m, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
        self.bodies, self.plans, self.errors = {}, {}, {}
        operands = [w if backward else w.t() for w in dense]
        self.bodies["dense"] = lambda i: torch.mm(self.x, operands[i % len(operands)], out=self.out)
        self.bodies["dense"](0)
        self.reference = self.out.float()
        for number, kernels in enumerate(libraries):
            prefix = "" if number == 0 else f"{number}:"
            self.add(kernels, weights, backward, f"{prefix}auto", -1, 0)
            if m <= SMALL_M_TOKENS and number == 0 and self.n % SMALL_M_ROWS == 0 and self.k % SMALL_M_COLUMNS == 0:
                self.add(kernels, weights, backward, "small_m", -1, 0, SMALL_M)
            taken = int(re.search(r"variant (\d+)", self.plans[f"{prefix}auto"][1])[1])
            for v, group in candidates(columns, m):
                same = group == AUTO_GROUP and (v - taken) % (len(TILES) * len(SCHEDULES)) == 0
                if (number == 0 or same) and (only is None or words(v, group) in only):
                    self.add(kernels, weights, backward, prefix + words(v, group), v, group)
        self.count = max(2, min(40, int(GRAPH_US / (2 * m * self.n * self.k / 650e6 + 8))))
        self.graphs = {arm: capture(body, self.count) for arm, body in self.bodies.items()}

    def add(self, kernels, weights, backward, arm, v, group, path=HOPPER):
        """An arm, unless its plan is one that another arm of the library has."""
        calls = [kernels.call(w, self.x, self.out, backward, path=path, variant=v, cut=group) for w in weights]
        plans = [kernels.plan(call) for call in calls]
        plan = (kernels, plans[0])
        if plan in self.plans.values():
            return
        self.plans[arm] = plan
        self.out.fill_(float("nan"))
        kernels.run(calls[0])
        self.errors[arm] = (torch.dist(self.out.float(), self.reference) / self.reference.norm()).item()
        self.bodies[arm] = lambda i: kernels.run(calls[i % len(calls)])

    def replay(self, arm):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graphs[arm].replay()
        end.record()
        return start, end

    def interleaved(self, rounds):
        """arm -> microseconds of each round."""
        events = {arm: [] for arm in self.graphs}
        for _ in range(rounds):
            order = list(self.graphs)
            random.shuffle(order)
            for arm in order:
                events[arm].append(self.replay(arm))
        torch.cuda.synchronize()
        return {arm: [s.elapsed_time(e) * 1e3 / self.count for s, e in pairs] for arm, pairs in events.items()}

    def alone(self, arm, seconds):
        """Median microseconds of the second half of `seconds` without any other arm."""
        estimate = self.replay(arm)
        torch.cuda.synchronize()
        replays = max(4, int(seconds * 1e3 / estimate[0].elapsed_time(estimate[1])))
        pairs = [self.replay(arm) for _ in range(replays)]
        torch.cuda.synchronize()
        return statistics.median(s.elapsed_time(e) * 1e3 / self.count for s, e in pairs[replays // 2 :])


def summary(cell, times):
    """One row of the record: ratio to dense of every arm, rounds paired."""
    dense = times["dense"]
    ratios = {arm: [t / d for t, d in zip(values, dense, strict=True)] for arm, values in times.items()}
    quartiles = {arm: statistics.quantiles(values, n=4) for arm, values in ratios.items() if arm != "dense"}
    return dict(
        **dict(n=cell.n, k=cell.k, m=cell.m, direction=cell.direction, dense_us=statistics.median(dense)),
        ratio={arm: round(q[1], 4) for arm, q in quartiles.items()},
        quartiles={arm: [round(q[0], 4), round(q[2], 4)] for arm, q in quartiles.items()},
        us={arm: round(statistics.median(values), 2) for arm, values in times.items()},
        plans={arm: plan for arm, (_, plan) in cell.plans.items()},
        errors=cell.errors,
    )


def clock():
    command = ["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def alone_of(cell, row, seconds):
    """Times of auto, the best other plan and dense, each alone, the plans twice."""
    others = [arm for arm in row["ratio"] if "auto" not in arm]
    best = min(others, key=row["ratio"].get)
    found = {}
    for arm in ("auto", best, "dense", best, "auto"):
        found.setdefault(arm, []).append(round(cell.alone(arm, seconds), 2))
    return dict(best_other=best, us=found, clock=clock())


def line(row, shown=5):
    ratios = sorted(row["ratio"].items(), key=lambda item: item[1])
    autos = [f"{arm} {value:.3f}" for arm, value in row["ratio"].items() if "auto" in arm]
    best = [f"{arm} {value:.3f}" for arm, value in ratios if "auto" not in arm][:shown]
    text = f"{row['n']}x{row['k']} M{row['m']} {row['direction']} dense {row['dense_us']:.1f} us | {', '.join(autos)}"
    text += f" ({row['plans']['auto'].split('tokens, ')[-1].rstrip(')')}) | {', '.join(best)}"
    if "alone" in row:
        text += f" | alone {row['alone']['us']}"
    return text


def cells_of(texts):
    """["4096x4096:512,1024"] -> {(4096, 4096): [512, 1024]}"""
    found = {}
    for text in texts:
        shape, tokens = text.split(":")
        found.setdefault(tuple(map(int, shape.split("x"))), []).extend(map(int, tokens.split(",")))
    return found


def measure(arguments):
    libraries = [Kernels(path, WORKSPACE) for path in arguments.libraries]
    start, rows, skipped = time.time(), [], []
    l2 = 3 * torch.cuda.get_device_properties(0).L2_cache_size
    for (n, k), tokens in cells_of(arguments.cells or DEFAULT).items():
        weights = [Weight(n, k) for _ in range(l2 // (n * k // 2) + 1)]
        dense = [w.dense(torch.bfloat16) for w in weights[: max(2, l2 // (n * k * 2) + 1)]]
        for m in tokens:
            for direction in DIRECTIONS:
                if time.time() - start > arguments.seconds:
                    skipped.append(f"{n}x{k} M{m} {direction}")
                    continue
                cell = Cell(libraries, weights, dense, m, direction, arguments.only)
                rows.append(summary(cell, cell.interleaved(arguments.rounds)))
                if arguments.alone and rows[-1]["dense_us"] >= ALONE_US:
                    rows[-1]["alone"] = alone_of(cell, rows[-1], arguments.alone)
                print(line(rows[-1]), flush=True)
                del cell
    print(f"{len(rows)} rows, skipped {skipped}, clock and power {clock()}, {time.time() - start:.0f} s")
    return dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rounds=arguments.rounds, rows=rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--cells", nargs="*", help=f"default {' '.join(DEFAULT)}")
    parser.add_argument("--only", action="append", help="an arm by name, besides auto; default: every plan")
    parser.add_argument("--rounds", type=int, default=27)
    parser.add_argument("--seconds", type=float, default=60, help="no new cell after")
    parser.add_argument("--alone", type=float, default=0, help="seconds of each arm without the others")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.manual_seed(int(time.time()))
    record = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    wrong = [f"{r['n']}x{r['k']} M{r['m']} {a}" for r in record["rows"] for a, e in r["errors"].items() if not e < 5e-3]
    print(f"{len(wrong)} arms differ from dense{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
