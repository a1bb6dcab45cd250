"""Random multiplies on a GPU, and the proof that they would see a race: planted faults must be caught.

    python tools/gpu_stress.py linear_stress [--faults linear_stress_of_a_fault_build] [--cases 10000] [--record PATH]

The first program is the product's (NYBBLE_FAULT_SWITCHES off). The second comes from a build with the switches on; it
runs once without a fault, with delays, and must be right; then once for every fault and the kernels that it can
concern, several at a time. A fault is caught by a wrong output, a hang or a CUDA error within --limit seconds; delays
change until it is.
Exit code 1 when the product or the build without a fault is wrong, or a fault outside of BLIND is not caught.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import time

import gpu_record

ALL_KERNELS = "hopper,hopper_rows,small_m,strips,portable,row"
MIDDLE = "hopper_rows_96_160"  # two tiles of hopper_rows by themselves, so that none hides behind the others
# What each fault can concern.
FAULTS = {
    "no_proxy_fence": ("hopper", "hopper_rows", "small_m"),
    "released_unread": ("hopper", "hopper_rows"),
    "released_early": ("hopper", "hopper_rows", "small_m", "strips"),
    "wrong_parity": ("hopper", "hopper_rows", "small_m"),
    "peer_not_awaited": ("hopper", "hopper_rows"),
    "flag_not_reset": ("hopper", "hopper_rows", "portable"),
    "flag_not_cleared": ("hopper", "hopper_rows"),
    "no_grid_wait": ("hopper", "hopper_rows", "small_m", "strips"),
    "copy_not_awaited": ("hopper", "hopper_rows", "strips", "portable"),
    "sums_not_awaited": ("small_m", "strips"),
    "spare_not_awaited": ("hopper",),
    "end_not_awaited": ("hopper", "hopper_rows"),
    "arrival_order": ("hopper", "hopper_rows", "small_m", "strips"),
}
for planted, kernels in FAULTS.items():
    if "hopper_rows" in kernels:
        FAULTS[planted] = (*kernels, MIDDLE)
# Faults that no run has caught there, and what is known.
BLIND = {
    ("no_proxy_fence", "small_m"): (
        "other warps put x in order before wgmma reads it, and hand it over by an mbarrier; on hopper and hopper_rows "
        "the thread that stored starts a bulk copy at once, which is seen. The fence stays: the memory model wants it"
    ),
    ("released_early", "hopper"): (
        "the slot goes back while wgmma, already issued, reads it; the refill crosses the memory and lands after that "
        "read, and no delay can be put into a wgmma. Released before it is read (released_unread) it is caught"
    ),
}
BLIND["released_early", "hopper_rows"] = BLIND["released_early", MIDDLE] = BLIND["released_early", "hopper"]
# One visit in `odds` of a place sleeps up to `ns`; 0: none.
DELAYS = ((40, 3000), (0, 1), (400, 30000), (7, 500), (15, 8000))
CAUGHT = {1: "wrong output", 3: "hang", 4: "CUDA error"}


def run(binary, limit, **options):
    """(exit code, seconds, text) of linear_stress; code 124 when it ran past the limit."""
    command = [str(binary)] + [str(part) for key, value in options.items() for part in (f"--{key}", value)]
    start = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        return 124, time.time() - start, f"{late.stdout or ''}"
    return done.returncode, time.time() - start, done.stdout + done.stderr


def has_switches(binary):
    """Whether a program was built with fault switches; src/device/fault.cpp puts the mark there."""
    return b"nybble_fault_switches_mark" in binary.read_bytes()


def last_line(text):
    return text.strip().splitlines()[-1] if text.strip() else "no output"


def verdict_line(text):
    lines = [line for line in text.splitlines() if line.startswith(("WRONG", "HANG", "ERROR", "RIGHT"))]
    return lines[0] if lines else last_line(text)


def hunt(binary, fault, kernels, limit):
    """One cell of the table: what caught the fault in these kernels, after how many seconds, with which delays."""
    start, share = time.time(), limit / len(DELAYS)
    cell = dict(fault=fault, kernels=kernels, caught=None, ok=(fault, kernels) in BLIND)
    for number, (odds, ns) in enumerate(DELAYS):
        options = {"delay-odds": odds, "delay-ns": ns, "hang-seconds": 4, "seconds": share, "cases": 10**9}
        code, _, text = run(binary, share + 20, kernels=kernels, fault=fault, seed=number + 1, **options)
        cell |= dict(seconds=round(time.time() - start, 1), text=verdict_line(text), delays_tried=number + 1)
        if code != 0:
            caught = dict(caught=CAUGHT.get(code, f"exit {code}"), ok=code in CAUGHT)
            return cell | caught | dict(delay_odds=odds, delay_ns=ns)
    return cell


def green(title, binary, limit, **options):
    code, seconds, text = run(binary, limit, **options)
    print(f"{title}: exit {code}, {seconds:.1f} s, {verdict_line(text)[:300]}", flush=True)
    if code != 0:
        print(text[-3000:])
    verdict = verdict_line(text)
    return dict(arm=title, ok=code == 0, code=code, seconds=round(seconds, 1), verdict=verdict, text=text)


def show(cell):
    delays = f"{cell['delay_odds']}, {cell['delay_ns']}" if "delay_odds" in cell else ""
    caught = cell["caught"] or "NOT CAUGHT"
    print(f"{cell['fault']:17s} {cell['kernels']:11s} {caught:13s} {cell['seconds']:5.1f}  {delays}", flush=True)


def whole(record, arguments, seconds):
    """The run as data, without where its programs lay."""
    given = {name: getattr(arguments, name) for name in ("cases", "kernels", "only", "limit", "jobs", "seed")}
    words = [
        f"--{name} {f'{value:g}' if isinstance(value, float) else value}"
        for name, value in given.items()
        if value is not None
    ]
    faults = ["--faults linear_stress_of_the_fault_build"] if arguments.faults else []
    return {
        **gpu_record.provenance(),
        "question": "Would the stress test of the GPU multiply see a race? Each fault is planted in a build of the "
        "same kernels and must end it.",
        "command": " ".join(["python tools/gpu_stress.py linear_stress", *faults, *words]),
        "cores": os.cpu_count(),
        "seconds": round(seconds, 1),
        "meanings": meanings(),
        "blind": {" ".join(cell): why for cell, why in BLIND.items()},
        **record,
    }


def meanings():
    """What each fault leaves out, from the comments of src/device/fault.h."""
    text = (gpu_record.ROOT / "src/device/fault.h").read_text()
    found = re.findall(r"^  k(\w+), +// (.+)$", text, re.M)
    return {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower(): words for name, words in found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("product", type=pathlib.Path)
    parser.add_argument("--faults", type=pathlib.Path, help="the program of a build with NYBBLE_FAULT_SWITCHES=ON")
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--kernels", default=f"{ALL_KERNELS},{MIDDLE}")
    parser.add_argument("--only", help="faults to plant, comma separated; by default all")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one fault in one family of kernels")
    parser.add_argument("--jobs", type=int, default=5, help="fault programs at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=pathlib.Path, metavar="PATH", help="also write PATH.json and PATH.md")
    arguments = parser.parse_args()
    if has_switches(arguments.product) or (arguments.faults and not has_switches(arguments.faults)):
        print("the product has fault switches in it, or the fault build has none")
        return 1
    common = dict(kernels=arguments.kernels, cases=arguments.cases, seed=arguments.seed)
    begun = time.time()
    record = {"green": [green("product", arguments.product, 300, **common)], "faults": []}
    if arguments.faults:
        delays = {"delay-odds": DELAYS[0][0], "delay-ns": DELAYS[0][1]}
        record["green"].append(green("no fault, delays", arguments.faults, 300, **common, **delays))
        wanted, only = arguments.kernels.split(","), arguments.only.split(",") if arguments.only else FAULTS
        cells = [(fault, kernels) for fault in only for kernels in FAULTS[fault] if kernels in wanted]
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            hunts = [pool.submit(hunt, arguments.faults, *cell, arguments.limit) for cell in cells]
            print(f"{'fault':17s} {'kernels':11s} {'caught by':13s} {'s':>5s}  delays (one in, ns)")
            for done in concurrent.futures.as_completed(hunts):
                show(done.result())
        record["faults"] = [done.result() for done in hunts]
    if arguments.record:
        gpu_record.write(arguments.record, whole(record, arguments, time.time() - begun), gpu_record.stress_page)
    return 0 if all(row["ok"] for row in record["green"] + record["faults"]) else 1


if __name__ == "__main__":
    sys.exit(main())
