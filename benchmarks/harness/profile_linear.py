#!/usr/bin/env python3
"""What limits a multiply: one launch of `auto` and one of dense cuBLAS under Nsight Compute, side by side.

    python profile_linear.py [CELL...] [--ncu PATH] [--record FILE] [--commit COMMIT]     CELL: 4096x14336:64:grad_x

Nested NF4, bf16, block 64. Caches are flushed before every pass, the card's clock is left as it is; times under a
profiler are not those of a training step. The default cells are musts that `h200_linear.py --judge` has listed, and
goals that are missed.
--record h200-profile writes h200-profile.md and .json. Exit code 1 when a cell was not profiled, also when ncu took
more than LIMIT_S. Needs a GPU and ncu.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

LIMIT_S = 600  # the record of the default cells took 44 s
CELLS = [f"4096x14336:{m}:grad_x" for m in (64, 128, 256)]
CELLS += [f"1024x4096:{m}:forward" for m in (2048, 4096, 8192, 16384)] + ["1024x4096:2048:grad_x"]
CELLS += [f"14336x4096:{m}:{d}" for m in (1, 16, 64, 128) for d in ("forward", "grad_x")]  # goals, from here on
CELLS += ["28672x8192:256:grad_x", "4096x4096:512:forward", "14336x4096:1024:forward", "4096x4096:8192:forward"]
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
)
EXTRA = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
)
# Column -> the metrics that say it, the first that a report has.
METRICS = {
    "SM %": ["sm__throughput.avg.pct_of_peak_sustained_elapsed"],
    "tensor pipe %": [
        EXTRA[0],
        "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ],
    "shared/L1 pipe %": [EXTRA[1], "l1tex__throughput.avg.pct_of_peak_sustained_active"],
    "issue %": [
        EXTRA[2],
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
    ],
    "L2 %": ["lts__t_sectors.avg.pct_of_peak_sustained_elapsed", "lts__throughput.avg.pct_of_peak_sustained_elapsed"],
    "DRAM %": [
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    ],
    "waves": ["launch__waves_per_multiprocessor"],
    "CTAs": ["launch__grid_size"],
}
TIME, MICROSECONDS = "gpu__time_duration.sum", {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
ARMS = ("auto", "cuBLAS")


def cell_of(text):
    shape, m, direction = text.split(":")
    n, k = map(int, shape.split("x"))
    if direction not in ("forward", "grad_x"):
        raise ValueError(f"direction {direction!r}, expected forward or grad_x")
    return n, k, int(m), direction


def launch(cells):
    """Under the profiler: of each cell one launch of each arm, after one that is not profiled."""
    import h200_linear
    import torch

    gpu = h200_linear.Gpu(nested=True)
    gpu.functional, gpu.rotate = None, 0
    for cell in cells:
        n, k, m, direction = cell_of(cell)
        shape = h200_linear.Shape(n, k, gpu)
        bodies = shape.bodies(m, direction)[0]
        print(f"{cell} {gpu.path_and_result(bodies['auto'], direction)[0]}", flush=True)
        for arm in ("auto", "dense"):
            bodies[arm](0)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            bodies[arm](1)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def command_of(ncu, log, cells, extra):
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--log-file", log]
    sections = [option for section in SECTIONS for option in ("--section", section)]
    metrics = ["--metrics", ",".join(EXTRA)] if extra else []
    return [
        ncu,
        *options,
        *sections,
        *metrics,
        sys.executable,
        str(pathlib.Path(__file__).resolve()),
        "--launch",
        *cells,
    ]


def number(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def read_report(text):
    """The kernels of a report in raw CSV: dicts of numbers by metric; "kernel": its name; TIME in microseconds."""
    start = text.find('"ID"')
    if start < 0:
        return []
    header, units, *rows = csv.reader(io.StringIO(text[start:]))
    found = []
    for row in rows:
        if len(row) != len(header):
            continue
        values = dict(zip(header, row, strict=True))
        kernel = {name: number(value) for name, value in values.items() if number(value) is not None}
        kernel["kernel"] = values["Kernel Name"]
        unit = re.sub(r"econd$", "", units[header.index(TIME)])
        kernel[TIME] *= MICROSECONDS[unit]
        found.append(kernel)
    return found


# Of the others' kernels: ncu leaves out outer namespaces, ours among them, as it likes.
CUBLAS = re.compile("nvjet|cublas|cutlass|gem[mv]|splitK", re.IGNORECASE)


def arms_of(kernels):
    """[[kernels of auto, kernels of cuBLAS], ...]: the two take turns, each with one or several kernels."""
    cells, last = [], "cuBLAS"
    for kernel in kernels:
        arm = "cuBLAS" if CUBLAS.search(kernel["kernel"]) else "auto"
        if not cells or (arm == "auto" and last == "cuBLAS"):
            cells.append({name: [] for name in ARMS})
        cells[-1][arm].append(kernel)
        last = arm
    return cells


def stalls(kernel, count=3):
    """(reason, share of all warps' waiting) of the longest waits."""
    waits = {match[1]: value for name, value in kernel.items() if (match := STALL.fullmatch(name))}
    waits = {reason: value for reason, value in waits.items() if not reason.endswith("not_issued") and value}
    total = sum(waits.values())
    return [(reason, waits[reason] / total) for reason in sorted(waits, key=waits.get, reverse=True)[:count]]


def summary(kernels):
    """Of one arm: microseconds of all its kernels; the rest of the longest one."""
    longest = max(kernels, key=lambda kernel: kernel[TIME])
    row = {"us": sum(kernel[TIME] for kernel in kernels), "kernels": [kernel["kernel"] for kernel in kernels]}
    for column, names in METRICS.items():
        name = next((name for name in names if name in longest), None)
        row[column], row.setdefault("metrics", {})[column] = longest.get(name), name
    return row | {"stalls": stalls(longest)}


def line(cell, arm, row):
    values = " | ".join("-" if row[column] is None else f"{row[column]:.4g}" for column in METRICS)
    waits = ", ".join(f"{reason} {share:.0%}" for reason, share in row["stalls"])
    return f"| {cell} | {arm} | {row['us']:.1f} | {values} | {waits} |"


def markdown(record):
    columns = ["N x K : M : direction", "arm", "us", *METRICS, "warps wait for"]
    names = record["rows"][0]["auto"]["metrics"] if record["rows"] else {}
    head = f"""# What limits a multiply, {record["device"]}

`{record["command"]}`, commit {record["commit"]},
torch {record["torch"]}, {record["seconds"]:.0f} s. One launch each under Nsight Compute, caches flushed before every
pass, the card's clock as it is. No launch overlaps with the one before, so times are longer than in `h200-linear`.
CTAs, waves and shares are those of the longest kernel, times the sum of all. Shares are of the peak over the whole
launch, idle SMs included, unless the metric's name ends in `active`.

| {" | ".join(columns)} |
|{"---|" * len(columns)}
"""
    rows = [line(row["cell"], arm, row[arm]) for row in record["rows"] for arm in ARMS]
    metrics = "\n".join(f"- {column}: `{name}`" for column, name in names.items())
    return head + "\n".join(rows) + f"\n\nMetrics:\n\n{metrics}\n"


def run_ended(command, limit):
    """(exit code, stdout, stderr). After `limit` seconds the program and what it started are killed; TimeoutExpired."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        try:
            out, err = program.communicate(timeout=limit)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            raise
    return program.returncode, out, err


def profile(ncu, cells, limit=LIMIT_S, failed=None):
    """The record, without device and commit. Without the extra metrics where this ncu does not know them. failed: where
    a report goes that does not hold every cell, with the suffix .failed.csv.
    """
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for extra in (True, False):
            log = pathlib.Path(folder) / f"report{int(extra)}.csv"
            try:
                code, out, err = run_ended(command_of(ncu, str(log), cells, extra), limit)
            except subprocess.TimeoutExpired:
                print(f"ncu was ended after {limit} s", file=sys.stderr)
                return None
            text = log.read_text() if log.exists() else ""
            found = arms_of(read_report(text))
            if len(found) == len(cells) and all(arms[name] for arms in found for name in ARMS):
                rows = [{"cell": c} | {a: summary(arms[a]) for a in ARMS} for c, arms in zip(cells, found, strict=True)]
                return dict(rows=rows, seconds=time.time() - start, launched=out.strip().splitlines()[:60])
            print(f"ncu exit code {code}, {len(found)} of {len(cells)} cells", file=sys.stderr)
            print((text + out + err)[-1500:], file=sys.stderr)
            if failed:
                failed.with_suffix(".failed.csv").write_text(text)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS, metavar="CELL")
    parser.add_argument("--ncu", default=shutil.which("ncu") or "/usr/local/cuda/bin/ncu")
    parser.add_argument("--record", type=pathlib.Path, help="writes this name with .json and .md")
    parser.add_argument("--commit", help="of the code that is profiled, for the record")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        return launch(options.cells)
    record = profile(options.ncu, options.cells, failed=options.record)
    if record is None:
        return 1
    import torch

    about = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, commit=options.commit)
    record |= about | {"command": " ".join(["python benchmarks/harness/profile_linear.py", *options.cells])}
    text = markdown(record)
    print(text)
    if options.record:
        options.record.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        options.record.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
