"""The record of the 4-bit multiply on a GPU: what `auto` takes at every size of the target table, beside dense cuBLAS
and bitsandbytes in the same run.

    python h200_linear.py --out FOLDER [--library LIBRARY] [--must]    measures, writes h200-linear.json, .md, .svg
    python h200_linear.py --judge RECORD.json                          the verdict on a record, without a GPU
    python h200_linear.py --out FOLDER --scales plain [--tokens LIST]  plain scales: h200-linear-plain.json, .md, .svg

Times include everything one call of torch.ops.nybble does on the device. Arms: auto; dequant (mode "dequant", up to
4096 tokens, where the table has a target); dense (torch.mm on the dequantised weight); bitsandbytes (matmul_4bit; for
grad_x dequantize_4bit + mm); auto with batch_invariant=True, where its plan is another one; the plan of every other
fused path that takes the problem (LIBRARY: libportable_bench.so; up to the tokens of PATHS; of small_m its tiles); for
4096 x 4096 also auto and dense with one weight that stays in L2. Weights rotate so that 3 x L2 lie between two uses of
one; CUDA graph replays; arms shuffled in every round; medians of times, and of the rounds' ratios to dense and to
bitsandbytes. Spread: (max - min) / median.
With --must (always with --judge) the exit code is 1 when a must of linear_targets.py is missed or was not measured.
"""

import argparse
import json
import operator
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time

import linear_targets as targets
import plot_linear

PROTOCOL = (
    "Weights rotate over 3 x L2, CUDA graph replays, arms shuffled in each round, {rounds} rounds. Times are medians, "
    "ratios to dense and to bitsandbytes the medians of the rounds' ratios, which the card's clock, common to a round, "
    "moves less."
)
ROUNDS = 21
GRAPH_US = 1000  # of device time a replay, at least, as far as 40 calls give it
DEQUANT_TOKENS = 4096
PATHS = {"hopper": 1 << 30, "small_m": 128, "portable": 2048, "row": 8}  # to the most tokens that it is timed with
WORKSPACE = 64 << 20
WARM_SHAPE = (4096, 4096)
NF4, BFLOAT16, FLOAT32, BLOCK = 0, 2, 0, 64
COUNTER_OF = {"forward": "forward", "grad_x": "grad_input"}
MODES = {"auto": 0, "dequant": 2}


def same_work(plan, other):
    """Whether two printed plans launch the same: path, variant, grid, split, group and workspace, not why or by what
    record.
    """
    return plan.partition(" bytes")[0] == other.partition(" bytes")[0]


class ClockMonitor:
    """SM clock (MHz) and power (W), sampled by nvidia-smi every 100 ms beside the measurements."""

    def __init__(self):
        from nybble.gate.training.telemetry import first_gpu

        self.samples = []
        command = [
            "nvidia-smi",
            "-i",
            first_gpu(),
            "--query-gpu=clocks.sm,power.draw",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
        ]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            print("no clock:", error)
            self.process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            try:
                clock, power = (float(value) for value in line.split(","))
            except ValueError:
                continue
            self.samples.append((time.time(), clock, power))

    def since(self, start):
        """Medians since `start`; the last sample when none is newer; nulls when there is none."""
        samples = [s for s in self.samples if s[0] >= start] or self.samples[-1:]
        if not samples:
            return None, None
        return statistics.median(s[1] for s in samples), statistics.median(s[2] for s in samples)

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()


class Shape:
    """Copies of a random weight of one shape, packed and dense, and the arms' bodies."""

    def __init__(self, n, k, gpu):
        self.n, self.k, self.gpu = n, k, gpu
        self.weights = [gpu.weight(n, k, nested=gpu.nested) for _ in range(max(2, -(-gpu.rotate // (n * k // 2))))]
        self.dense = [gpu.dequantized(w) for w in self.weights[: max(2, -(-gpu.rotate // (n * k * 2)))]]
        functional = gpu.functional
        self.states = [gpu.bitsandbytes_state(functional, w) for w in self.weights] if functional else None
        self.flat = [w.packed.view(-1, 1) for w in self.weights]

    def bodies(self, m, direction):
        """arm -> body(i). Activations and output are shared by all arms."""
        torch, gpu = self.gpu.torch, self.gpu
        backward = direction == "grad_x"
        reduction, columns = (self.n, self.k) if backward else (self.k, self.n)
        x = torch.randn(m, reduction, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(m, columns, dtype=torch.bfloat16, device="cuda")
        operands = [w if backward else w.t() for w in self.dense]

        def bitsandbytes(i):
            i %= len(self.flat)
            if backward:
                return torch.mm(x, gpu.functional.dequantize_4bit(self.flat[i], self.states[i]), out=out)
            return gpu.bitsandbytes.matmul_4bit(x, self.flat[i].t(), self.states[i])

        def ours(mode, rotate=True, invariant=False):
            count = len(self.weights) if rotate else 1
            return lambda i: gpu.multiply(x, self.weights[i % count], backward, MODES[mode], invariant)

        bodies = {"auto": ours("auto"), "dense": lambda i: torch.mm(x, operands[i % len(operands)], out=out)}
        if not same_work(*(gpu.plan(x, self.weights[0], direction, invariant) for invariant in (False, True))):
            bodies["invariant"] = ours("auto", invariant=True)
        if self.states:
            bodies["bnb"] = bitsandbytes
        for path in PATHS if gpu.kernels else ():
            bodies |= self.of_path(path, x, backward)
        if m <= DEQUANT_TOKENS and m in targets.TOKENS:
            bodies["dequant"] = ours("dequant")
        if (self.n, self.k) == WARM_SHAPE:
            bodies["auto_warm"] = ours("auto", rotate=False)
            bodies["dense_warm"] = lambda i: torch.mm(x, operands[0], out=out)
        return bodies, x, out

    def of_path(self, path, x, backward):
        """{path: body(i)} of a fused path's own plan, {} where it does not take the problem."""
        kernels, columns = self.gpu.kernels, self.k if backward else self.n
        if x.shape[0] > PATHS[path]:
            return {}
        out = self.gpu.torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
        calls = [kernels.call(w, x, out, backward, path=self.gpu.path_numbers[path]) for w in self.weights]
        try:
            for call in calls:
                kernels.plan(call)
        except RuntimeError:
            return {}

        def body(i):
            kernels.run(calls[i % len(calls)])
            return out

        return {path: body}

    def calls_per_graph(self, m, expected_us):
        moved = self.n * self.k // 2 + 2 * m * (self.n + self.k)  # bytes between two uses of a weight, per call
        rotation = min(len(self.weights), -(-self.gpu.rotate // moved))
        return max(2, rotation, min(40, int(GRAPH_US / expected_us)))


class Gpu:
    """torch, nybble, bitsandbytes when it can be imported, and what is the same for all shapes."""

    def __init__(self, nested, library=None):
        import portable_kernels
        import portable_time
        import torch

        import nybble
        from nybble.quant_state import QuantState, table

        self.torch, self.nybble, self.state, self.nested = torch, nybble, QuantState, nested
        self.weight = portable_kernels.Weight
        self.kernels = portable_kernels.Kernels(library, WORKSPACE) if library else None
        self.path_numbers = {path: getattr(portable_kernels, path.upper()) for path in PATHS}
        self.capture, self.replay_us = portable_time.capture, portable_time.replay_us
        self.bitsandbytes_state = portable_time.bitsandbytes_state
        self.bitsandbytes, self.functional = portable_time.import_bitsandbytes()
        self.code = table("nf4", torch.device("cuda", torch.cuda.current_device()))
        self.rotate = 3 * torch.cuda.get_device_properties(0).L2_cache_size

    def _tensors(self, w):
        if not self.nested:
            return w.packed, w.absmax, self.code, None, None, None
        return w.packed, w.codes, self.code, w.nested_absmax, w.nested_code, w.offset

    def multiply(self, x, w, backward, mode, invariant):
        spec = (w.n, w.k, BLOCK, NF4, BFLOAT16, FLOAT32, mode, invariant)
        if backward:
            return self.torch.ops.nybble.linear_4bit_grad_input(x, *self._tensors(w), None, *spec)
        return self.torch.ops.nybble.linear_4bit(x, *self._tensors(w), None, None, *spec)

    def dequantized(self, w):
        spec = (w.n, w.k, BLOCK, NF4, FLOAT32, BFLOAT16)
        return self.torch.ops.nybble.dequantize_4bit(*self._tensors(w), None, *spec)

    def plan(self, x, w, direction, invariant=False):
        spec = dict(blocksize=BLOCK, quant_type="nf4", dtype=self.torch.bfloat16)
        if self.nested:
            inner = self.state(w.nested_absmax, code=w.nested_code, blocksize=256, dtype=self.torch.float32)
            spec.update(offset=w.offset, state2=inner)
        state = self.state(w.codes if self.nested else w.absmax, (w.n, w.k), self.code, **spec)
        return self.nybble.explain(x, w.packed, state, direction=COUNTER_OF[direction], batch_invariant=invariant)

    def path_and_result(self, body, direction):
        """The one path whose counter the call moved, and what it returned."""
        self.nybble.reset_path_counters()
        result = body(0)
        key = COUNTER_OF[direction]
        ran = [path for path, counts in self.nybble.path_counters().items() if counts[key]]
        if len(ran) != 1:
            raise RuntimeError(f"one call moved the counters of {ran}, expected one path")
        return ran[0], result


def relative(gpu, values, reference):
    return (gpu.torch.dist(values, reference) / reference.norm()).item()


def measure(gpu, shape, m, direction, clocks):
    """The rows of one cell: auto, and every other path that was timed."""
    start = time.time()
    bodies, x, out = shape.bodies(m, direction)
    path, result = gpu.path_and_result(bodies["auto"], direction)
    plan = gpu.plan(x, shape.weights[0], direction)
    bodies.pop(path, None)  # auto's
    bodies["dense"](0)
    errors = {"auto": relative(gpu, result, out)}
    errors |= {arm: relative(gpu, bodies[arm](0), out) for arm in ("invariant", "dequant", *PATHS) if arm in bodies}
    del result
    count = shape.calls_per_graph(m, 2 * m * shape.n * shape.k / 650e6 + 8)
    graphs = {arm: gpu.capture(body, count) for arm, body in bodies.items()}
    times = {arm: [] for arm in graphs}
    for _ in range(ROUNDS):
        order = list(graphs)
        random.shuffle(order)
        for arm in order:
            times[arm].append(gpu.replay_us(graphs[arm], count))
    clock, power = clocks.since(start)
    del graphs, x
    us = {arm: statistics.median(values) for arm, values in times.items()}
    spread = {arm: (max(values) - min(values)) / us[arm] for arm, values in times.items()}

    def row(arm, path):
        bnb, own = us.get("bnb"), times[arm]
        ratio = {to: statistics.median(map(operator.truediv, own, times[to])) for to in ("dense", "bnb") if to in us}
        return {
            **dict(n=shape.n, k=shape.k, m=m, direction=direction, path=path, auto=arm == "auto"),
            **dict(fused_us=us[arm], dense_us=us["dense"], bnb_us=bnb, ratio_dense=ratio["dense"]),
            **dict(ratio_bnb=ratio.get("bnb"), spread=spread[arm], dense_spread=spread["dense"]),
            **dict(bnb_spread=spread.get("bnb"), clock_mhz=clock, power_w=power, calls=count, error=errors[arm]),
        }

    rows = [row("auto", path)]
    rows[0]["plan"] = plan
    if "invariant" in us:
        rows[0].update(invariant_us=us["invariant"], invariant_spread=spread["invariant"])
        rows[0].update(invariant_error=errors["invariant"])
    if "auto_warm" in us:
        rows[0].update(warm_fused_us=us["auto_warm"], warm_dense_us=us["dense_warm"])
    return rows + [row(arm, arm) for arm in ("dequant", *PATHS) if arm in us]


def measure_all(budget, nested, tokens, library):
    start = time.time()
    gpu = Gpu(nested, library)
    torch = gpu.torch
    torch.manual_seed(int(start))
    record = {
        **dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rows=[], skipped=[]),
        **dict(bitsandbytes=getattr(gpu.bitsandbytes, "__version__", None), protocol=PROTOCOL.format(rounds=ROUNDS)),
        **dict(scales="nested" if nested else "plain", tokens=list(tokens), invariant=True),
        **dict(paths=PATHS if library else {}),
    }
    clocks = ClockMonitor()
    shapes = {(n, k): Shape(n, k, gpu) for n, k in targets.SHAPES}
    torch.cuda.synchronize()
    print(f"{record['device']}, weights made in {time.time() - start:.1f} s")
    try:
        for m, n, k, direction in targets.cells(tokens):
            if time.time() - start > budget:
                record["skipped"].append(f"{n}x{k} M{m} {direction}")
                continue
            rows = measure(gpu, shapes[n, k], m, direction, clocks)
            record["rows"] += rows
            print(line(rows), flush=True)
    finally:
        clocks.stop()
    record["seconds"] = time.time() - start
    return record


def line(rows):
    row = rows[0]
    bnb = "" if row["ratio_bnb"] is None else f", {row['ratio_bnb']:.2f} of bitsandbytes"
    text = (
        f"{targets.where(row):30s} {row['path']:8s} {row['fused_us']:8.1f} us, {row['ratio_dense']:.3f} of dense{bnb}"
    )
    text += "".join(f", {other['path']} {other['ratio_dense']:.2f}" for other in rows[1:])
    return text + f" | spread {row['spread']:.3f} clock {row['clock_mhz']} MHz"


def judge(record):
    """Prints means and misses; the number of misses."""
    means = targets.geometric_means(record)
    print(
        "geometric mean by M:", ", ".join(f"{m}: {mean:.3f} (goal {targets.GOAL[m]:.2f})" for m, mean in means.items())
    )
    texts = targets.misses(record)
    print(f"{len(texts)} musts missed" + "".join(f"\n  {text}" for text in texts))
    above = [row for row in targets.auto_rows(record) if targets.mark(row) == "?"]
    print(f"{len(above)} above the line between musts" + "".join(f", {targets.where(row)}" for row in above))
    return len(texts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for the record")
    parser.add_argument("--budget", type=float, default=110, help="seconds; what does not fit is listed as skipped")
    parser.add_argument("--must", action="store_true", help="exit 1 when a must is missed")
    parser.add_argument("--judge", type=pathlib.Path, metavar="RECORD", help="judge a record, measure nothing")
    parser.add_argument("--library", help="libportable_bench.so: the other fused paths, too")
    parser.add_argument("--scales", choices=["nested", "plain"], default="nested")
    parser.add_argument("--tokens", default=",".join(map(str, targets.columns())), help="M of the record")
    arguments = parser.parse_args()
    if arguments.judge:
        return 1 if judge(json.loads(arguments.judge.read_text())) else 0
    tokens = sorted(int(text) for text in arguments.tokens.split(","))
    record = measure_all(arguments.budget, arguments.scales == "nested", tokens, arguments.library)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = targets.name(record)
    (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (arguments.out / f"{name}.md").write_text(targets.markdown(record))
    (arguments.out / f"{name}.svg").write_text(plot_linear.svg(record))
    missed = judge(record)
    print(f"{len(record['rows'])} rows, {len(record['skipped'])} cells skipped for time, {record['seconds']:.0f} s")
    return 1 if missed and arguments.must else 0


if __name__ == "__main__":
    sys.exit(main())
