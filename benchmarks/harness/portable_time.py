"""What the portable and row kernels cost on the GPU at hand, and whether that is within the H200's targets.

    python portable_time.py LIBRARY [--seconds S] [--json FILE]
    python portable_time.py --judge RECORD.json                    the verdict on a record, without a GPU

Every arm in the same run: cuBLAS on the dequantised weight, bitsandbytes (its own dispatch; dequantize_4bit + matmul
for grad_x) where it can be imported, `auto` (what the path plans), p<tile> (portable, c: cut reductions), d<tile> (its
dense skeleton), dq (dequantise into one scratch matrix), s<tile> (dq, then the skeleton on it), x5 (every mma issued
five times: slower tensor cores). Weights rotate over three times the L2 cache, CUDA graph replays, arms shuffled in
every round, median of 9. Columns: microseconds (ratio to cuBLAS). autox5 / the faster s<tile>x5 is what
portable_model.py predicts.
Exit 1: a target of portable_targets.py is missed or was not measured; 3: not an H200, no targets.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

import portable_targets as targets
import torch
from portable_kernels import AUTO, DENSE, DEQUANTIZE, NF4, PORTABLE, TILES, Kernels, Weight, bits_to_floats


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
    """Name -> options of Kernels.call. auto, autox5: variant and cut as the path plans them."""
    arms = {"auto": dict(path=AUTO)}
    variants = (3,) if m <= 16 else (3, 2) if m <= 64 else (2, 1) if m <= 128 else (1, 0) if m <= 256 else (0,)
    for v in variants:
        for cut in (0, 1):
            arms[f"p{TILES[v]}{'c' if cut else ''}"] = dict(path=PORTABLE, variant=v, cut=cut)
    if 64 < m <= 128:
        arms["d128c"] = dict(path=DENSE, variant=1, cut=1)
    if m >= 256:
        arms["d256"], arms["d256c"] = dict(path=DENSE, variant=0, cut=0), dict(path=DENSE, variant=0, cut=1)
    if m in targets.LARGE_TOKENS:
        arms["autox5"] = dict(path=PORTABLE, repeat=5)
        arms["d256x5"] = dict(path=DENSE, variant=0, cut=0, repeat=5)
        arms["d256cx5"] = dict(path=DENSE, variant=0, cut=1, repeat=5)
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
        self.scratch = torch.full((n, k), float("nan"), dtype=torch.bfloat16, device="cuda")
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
        if m in targets.LARGE_TOKENS:
            bodies |= self.separate_bodies(kernels, x, out, direction)
        return bodies, plans, (x, out)

    def separate_bodies(self, kernels, x, out, direction):
        """Dequantise, alone and before the slowed skeleton: one scratch matrix, as an allocator hands it out again."""
        makes = [kernels.call(w, x, self.scratch, direction, path=DEQUANTIZE) for w in self.weights]
        bodies = {"dq": lambda i: kernels.run(makes[i % len(makes)])}
        bodies["dq"](0)
        if not torch.equal(self.scratch, self.dense[0]):
            raise RuntimeError(f"N{self.n} K{self.k}: the dequantised weight is not the reference's")
        for name, cut in (("s256x5", 0), ("s256cx5", 1)):
            options = dict(path=DENSE, variant=0, cut=cut, repeat=5)
            multiply = kernels.call(self.weights[0], x, out, direction, dense=self.scratch, **options)
            kernels.plan(multiply)

            def body(i, multiply=multiply):
                bodies["dq"](i)
                kernels.run(multiply)

            bodies[name] = body
        return bodies


def error_of(bodies, out):
    """Norm of the difference between auto and cuBLAS on the first weight / norm."""
    bodies["cublas"](0)
    dense = out.clone()
    out.fill_(float("nan"))
    bodies["auto"](0)
    return (torch.dist(out, dense) / dense.norm()).item()


def time_cell(kernels, shape, m, direction, rounds):
    bodies, plans, operands = shape.bodies(kernels, m, direction)  # operands: alive as long as the graphs
    error = error_of(bodies, operands[1])
    flops = 2 * m * shape.n * shape.k
    copies = len(shape.weights)
    count = max(copies, min(36, int(2e3 / (flops / 4e8 + 10))))
    graphs, times = {}, {}
    for name, body in bodies.items():
        n = max(4, copies) if name.endswith("x5") or flops > 2e11 else count
        graphs[name] = (capture(body, n), n)
    for _ in range(rounds):
        order = list(graphs)
        random.shuffle(order)
        for name in order:
            times.setdefault(name, []).append(replay_us(*graphs[name]))
    del operands
    medians = {name: statistics.median(t) for name, t in times.items()}
    spread = {name: (max(t) - min(t)) / medians[name] for name, t in times.items()}
    cell = dict(n=shape.n, k=shape.k, m=m, direction=direction, error=error)
    return cell | dict(us=medians, spread=spread, plans=plans)


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
    for n, k in targets.SHAPES:
        shape = Shape(n, k, bnb, functional)
        for _, _, m, direction in (cell for cell in targets.wanted() if cell[:2] == (n, k)):
            if time.time() - start > seconds:
                skipped.append((n, k, m, direction))
                continue
            cells.append(time_cell(kernels, shape, m, direction, rounds))
            print(line(cells[-1]), flush=True)
            if direction:
                clocks[f"{n}x{k} M{m}"] = clock()
        del shape
        torch.cuda.empty_cache()
    summarise(cells)
    took = time.time() - start
    print(f"TIME {len(cells)} cells, skipped {skipped}, clock and power {clock()}, {took:.0f} s")
    return dict(cells=cells, skipped=skipped, clocks=clocks, seconds=took)


def summarise(cells):
    print("shape M dir | auto us /cublas /bnb /skeleton spread | best arm us")
    for c in sorted(cells, key=lambda c: (c["n"], c["k"], c["m"], c["direction"])):
        us = c["us"]
        own = {name: t for name, t in us.items() if name[0] in "ap" and "x5" not in name}
        best = min(own, key=own.get)
        others = (("cublas",), ("bnb",), ("d256", "d256c"))
        ratios = [targets.ratio(c, "auto", names) for names in others]
        text = " ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        where = targets.where(c)
        print(f"{where} | {us['auto']:.1f} {text} {c['spread']['auto']:.0%} | {best} {us[best]:.1f}")


def judge(record):
    """Puts the verdict into the record and prints it; the exit code."""
    record["verdict"] = targets.verdict(record)
    print("\n".join(targets.lines(record["verdict"])))
    if "H200" not in record["device"]:
        print(f"no verdict: the targets are the H200's, this is {record['device']}")
        return 3
    return 1 if record["verdict"]["missed"] else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?")
    parser.add_argument("--seconds", type=float, default=90, help="cells that do not fit are listed as skipped")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--judge", type=pathlib.Path, metavar="RECORD", help="judge a record, measure nothing")
    arguments = parser.parse_args()
    if arguments.judge:
        return judge(json.loads(arguments.judge.read_text()))
    if not arguments.library:
        parser.error("LIBRARY or --judge RECORD is needed")
    torch.manual_seed(int(time.time()))
    kernels = Kernels(arguments.library)
    print(torch.cuda.get_device_name(), "sm", kernels.sm, "SMs", kernels.sms, "torch", torch.__version__)
    record = dict(device=torch.cuda.get_device_name(), torch=torch.__version__)
    record["result"] = time_all(kernels, arguments.seconds)
    code = judge(record)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
