"""What the portable and row kernels cost on the GPU at hand.

    python portable_time.py LIBRARY [--seconds S] [--json FILE]

Every arm in the same run: cuBLAS on the dequantised weight, bitsandbytes (its own dispatch; dequantize_4bit + matmul
for grad_x) where it can be imported, `auto` (the plan's choice), p<tile> (portable, c: cut reductions), d<tile> (its
dense skeleton), x5 (every mma issued five times: slower tensor cores). Weights rotate over three times the L2 cache,
CUDA graph replays, arms shuffled in every round, median of 9. Columns: microseconds (ratio to cuBLAS).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

import torch
from portable_kernels import AUTO, DENSE, NF4, PORTABLE, TILES, Kernels, Weight, bits_to_floats


def import_bitsandbytes():
    try:
        import bitsandbytes
        import bitsandbytes.functional as functional

        return bitsandbytes, functional
    except Exception as error:  # an arm that is missing is said, whatever the reason
        print("no bitsandbytes arm:", error)
        return None, None


def bitsandbytes_state(functional, weight):
    spec = dict(shape=torch.Size((weight.n, weight.k)), code=bits_to_floats(NF4), blocksize=64, quant_type="nf4")
    if not weight.nested:
        return functional.QuantState(absmax=weight.absmax, dtype=torch.bfloat16, **spec)
    inner = functional.QuantState(
        absmax=weight.nested_absmax, code=weight.nested_code, blocksize=256, dtype=torch.float32
    )
    return functional.QuantState(absmax=weight.codes, dtype=torch.bfloat16, offset=weight.offset, state2=inner, **spec)


def capture(body, count):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            body(i)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_us(graph, count):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count


def arms_for(m):
    """Name -> options of Kernels.call."""
    arms = {"auto": dict(path=AUTO)}
    variants = (3,) if m <= 16 else (3, 2) if m <= 64 else (2, 1) if m <= 128 else (1, 0) if m <= 256 else (0,)
    for v in variants:
        for cut in (0, 1):
            arms[f"p{TILES[v]}{'c' if cut else ''}"] = dict(path=PORTABLE, variant=v, cut=cut)
    if 64 < m <= 128:
        arms["d128c"] = dict(path=DENSE, variant=1, cut=1)
    if m >= 256:
        arms["d256"], arms["d256c"] = dict(path=DENSE, variant=0, cut=0), dict(path=DENSE, variant=0, cut=1)
    if m in (512, 2048):
        arms["p256x5"] = dict(path=PORTABLE, variant=0, cut=0, repeat=5)
        arms["d256x5"] = dict(path=DENSE, variant=0, cut=0, repeat=5)
    return arms


class Shape:
    """Copies of one weight, more than the L2 cache holds three times, and the arms' bodies."""

    def __init__(self, n, k, bnb, functional):
        l2 = 3 * torch.cuda.get_device_properties(0).L2_cache_size
        self.n, self.k, self.bnb, self.functional = n, k, bnb, functional
        self.weights = [Weight(n, k) for _ in range(l2 // (n * k // 2) + 1)]
        self.dense = [w.dense(torch.bfloat16) for w in self.weights[: max(2, l2 // (n * k * 2) + 1)]]
        self.states = [bitsandbytes_state(functional, w) for w in self.weights] if functional else None
        self.flat = [w.packed.view(-1, 1) for w in self.weights]
        if functional:
            same = torch.equal(functional.dequantize_4bit(self.flat[0], self.states[0]), self.dense[0])
            print(f"N{n} K{k}: dequantize_4bit equals the reference: {same}")

    def bodies(self, kernels, m, direction):
        reduction, columns = (self.n, self.k) if direction else (self.k, self.n)
        x = torch.randn(m, reduction, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(m, columns, dtype=torch.bfloat16, device="cuda")
        copies, dense_copies = len(self.weights), len(self.dense)

        def cublas(i):
            w = self.dense[i % dense_copies]
            torch.mm(x, w if direction else w.t(), out=out)

        def bitsandbytes(i):
            state, flat = self.states[i % copies], self.flat[i % copies]
            if direction:
                torch.mm(x, self.functional.dequantize_4bit(flat, state), out=out)
            else:
                self.bnb.matmul_4bit(x, flat.t(), state)

        bodies, plans = {"cublas": cublas}, {}
        if self.functional:
            bodies["bnb"] = bitsandbytes
        for name, options in arms_for(m).items():
            dense = options["path"] == DENSE
            calls = [
                kernels.call(w, x, out, direction, dense=self.dense[i] if dense else None, **options)
                for i, w in enumerate(self.weights[: dense_copies if dense else copies])
            ]
            plans[name] = kernels.plan(calls[0])
            for c in calls[1:]:
                kernels.plan(c)
            bodies[name] = lambda i, calls=calls: kernels.run(calls[i % len(calls)])
        bodies["keep"] = (x, out)  # alive as long as the graphs
        return bodies, plans


def time_cell(kernels, shape, m, direction, rounds):
    bodies, plans = shape.bodies(kernels, m, direction)
    keep = bodies.pop("keep")
    flops = 2 * m * shape.n * shape.k
    count = max(len(shape.weights), min(36, int(2e3 / (flops / 4e8 + 10))))
    graphs, times = {}, {}
    for name, body in bodies.items():
        n = max(4, count // 3) if name.endswith("x5") or flops > 2e11 else count
        graphs[name] = (capture(body, n), n)
    for _ in range(rounds):
        order = list(graphs)
        random.shuffle(order)
        for name in order:
            times.setdefault(name, []).append(replay_us(*graphs[name]))
    del keep
    medians = {name: statistics.median(t) for name, t in times.items()}
    spread = {name: (max(t) - min(t)) / medians[name] for name, t in times.items()}
    return dict(n=shape.n, k=shape.k, m=m, direction=direction, us=medians, spread=spread, plans=plans)


def line(cell):
    dense = cell["us"]["cublas"]
    texts = [f"{name} {us:.1f} ({us / dense:.2f})" for name, us in cell["us"].items()]
    return f"{cell['n']}x{cell['k']} M{cell['m']} {'gx' if cell['direction'] else 'y '}: " + " | ".join(texts)


def clock():
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def time_all(kernels, seconds, rounds=9):
    start, cells, skipped, clocks = time.time(), [], [], {}
    bnb, functional = import_bitsandbytes()
    shapes = ((14336, 4096), (4096, 14336), (4096, 4096))
    tokens = (1, 16, 128, 512, 8, 64, 256, 2048, 4)
    for n, k in shapes:
        shape = Shape(n, k, bnb, functional)
        share = seconds * (shapes.index((n, k)) + 1) / len(shapes)
        for m in tokens:
            for direction in (0, 1):
                if time.time() - start > share:
                    skipped.append((n, k, m, direction))
                    continue
                cells.append(time_cell(kernels, shape, m, direction, rounds))
                print(line(cells[-1]), flush=True)
            clocks[f"{n}x{k} M{m}"] = clock()
        del shape
        torch.cuda.empty_cache()
    summarise(cells)
    print(f"TIME {len(cells)} cells, skipped {skipped}, clock and power {clock()}, {time.time() - start:.0f} s")
    return dict(cells=cells, skipped=skipped, clocks=clocks)


def geometric_mean(values):
    return statistics.geometric_mean(values) if values else float("nan")


def summarise(cells):
    """What the targets ask: against bitsandbytes, against the dense skeleton, and with slow tensor cores."""
    print("shape M dir | auto us /cublas /bnb spread | best arm us")
    for c in sorted(cells, key=lambda c: (c["n"], c["k"], c["m"], c["direction"])):
        us = c["us"]
        own = {name: t for name, t in us.items() if name[0] in "ap" and "x5" not in name}
        best = min(own, key=own.get)
        bnb = us["auto"] / us["bnb"] if "bnb" in us else float("nan")
        where = f"{c['n']}x{c['k']} {c['m']} {'gx' if c['direction'] else 'y'}"
        ratio = us["auto"] / us["cublas"]
        print(f"{where} | {us['auto']:.1f} {ratio:.2f} {bnb:.2f} {c['spread']['auto']:.0%} | {best} {us[best]:.1f}")
    large = [c["us"] for c in cells if c["m"] >= 512]
    skeleton = [min(us["p256"], us["p256c"]) / min(us["d256"], us["d256c"]) for us in large]
    slow = [us["p256x5"] / us["d256x5"] for us in large if "p256x5" in us]
    print(f"fused / own dense skeleton at M >= 512: {geometric_mean(skeleton):.3f} (goal 1.20)")
    print(f"the same with every mma issued 5 times: {geometric_mean(slow):.3f} (goal 1.05)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.manual_seed(int(time.time()))
    kernels = Kernels(arguments.library)
    print(torch.cuda.get_device_name(), "sm", kernels.sm, "SMs", kernels.sms, "torch", torch.__version__)
    result = time_all(kernels, arguments.seconds)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, result=result), file)
    return 1 if result.get("failures") else 0


if __name__ == "__main__":
    sys.exit(main())
