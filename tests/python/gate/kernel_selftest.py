#!/usr/bin/env python3
"""Can the gates fail on a GPU? Every fault of the kernels against every gate.

    NYBBLE_BUILD_DIR=FAULT_BUILD python tests/python/gate/kernel_selftest.py [--only NAME,...] [--record PATH]

FAULT_BUILD: cmake -DNYBBLE_FAULT_SWITCHES=ON, target nybble_torch. Every row is a process of its own with a time limit,
since a fault may hang a kernel or break the CUDA context; rows run side by side. Exit code 1 when a cell is not as
predicted.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import selftest
import torch
from kernel_mutations import KERNEL_MUTATIONS, has_switches, planted

from nybble.gate import record
from nybble.gate.aliasing import cells
from nybble.gate.aliasing.gate import AliasingGate, run_on_one_thread
from nybble.gate.aliasing.stacks import Sizes as StackSizes
from nybble.gate.checks import run_checks
from nybble.gate.determinism.gate import DeterminismGate
from nybble.gate.determinism.gate import Sizes as DeterminismSizes
from nybble.gate.memory.gate import MemoryGate
from nybble.gate.memory.gate import Sizes as MemorySizes
from nybble.gate.numerics.gate import NumericsGate
from nybble.gate.numerics.gate import Sizes as NumericsSizes
from nybble.gate.training.needs import missing
from nybble.gate.training.store import Shape

LARGE, TOKENS = (28672, 8192), (24, 300, 600)  # many units for every CTA; small_m, then hopper
EQUALITY_TOKENS = 12, 300  # a sum of split pieces in every multiply; hopper in every multiply
LIMIT_SECONDS = 80
NOTES = (
    "0 ok, 1 product wrong, 3 no verdict (the reference does not repeat itself), None: it did not come that far. What",
    "the rows are, and why some cells stay green: docs/gates.md. equality runs at 12 and at 300 tokens, the worse",
    "verdict counts.",
    "",
    "Not measured: exact, race, share and speed under these faults; other seeds of the delays; other cards.",
)


def aliasing():
    gate = AliasingGate(device="cuda", slots=(2,), sizes=StackSizes(layers=4, dim=1024, tokens=24))
    gate.cells = [cell for cell in gate.cells if cell.stack is cells.GROUPS[0][0]]
    return run_on_one_thread(gate)


def numerics():
    return run_checks(NumericsGate("cuda", NumericsSizes((LARGE,), TOKENS, max(TOKENS), 1, 2)))


def determinism():
    return run_checks(DeterminismGate("cuda", DeterminismSizes((LARGE,), TOKENS, 200, max(TOKENS), boundary_count=2)))


def memory():
    return run_checks(MemoryGate("cuda", MemorySizes(((8192, 8192, 64),), (3,), 1024, 24)))


def equality():
    """Of both sizes the report that is worse."""
    reports = (selftest.equality_on("cuda", Shape(1024, 2816, 3, 8, 4, 256), tokens) for tokens in EQUALITY_TOKENS)
    return max(reports, key=lambda report: report.verdict)


GATES = {"aliasing": aliasing, "numerics": numerics, "determinism": determinism, "memory": memory, "equality": equality}


def row(name: str) -> dict[str, int | None]:
    """Exit codes by gate, from a process of its own; None where it did not come that far."""
    command = [sys.executable, __file__, "--row", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=os.environ)
        text = done.stdout
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode()
    found = dict(line.split("=") for line in text.splitlines() if "=" in line and line.split("=")[0] in GATES)
    return {gate: int(found[gate]) if gate in found else None for gate in GATES}


def run_row(name: str) -> int:
    """In the child: one line a gate."""
    mutation = next(m for m in KERNEL_MUTATIONS if m.name == name)
    with planted(mutation):
        for gate, make in GATES.items():
            if gate != "equality" or missing() is None:
                print(f"{gate}={selftest.verdict(make)}", flush=True)
    return 0


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=pathlib.Path, metavar="PATH", help="also write PATH.json and PATH.md")
    options = parser.parse_args(arguments)
    if not has_switches():
        print("the library has no fault switches; build with -DNYBBLE_FAULT_SWITCHES=ON", file=sys.stderr)
        return 1
    if options.row is not None:
        return run_row(options.row)
    begun = time.monotonic()
    mutations = [m for m in KERNEL_MUTATIONS if options.only is None or m.name in options.only]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(row, [m.name for m in mutations]))
    wrong, rows = 0, []
    print(f"{'kernel mutation':<28}" + "".join(f"{name:<14}" for name in GATES))
    for mutation, codes in zip(mutations, found, strict=True):
        marks = {}
        for gate, code in codes.items():
            expected = mutation.expected.get(gate, frozenset({0}))
            right = code in expected
            wrong += not right
            words = "-" if code is None else str(code)
            marks[gate] = words if right else f"{words} not {'/'.join(map(str, sorted(expected)))}"
        predicted = {gate: sorted(mutation.expected.get(gate, frozenset({0}))) for gate in codes}
        rows.append({"mutation": mutation.name, "faults": mutation.faults, "found": codes, "predicted": predicted})
        print(f"{mutation.name:<28}" + "".join(f"{marks[name]:<14}" for name in GATES), flush=True)
    verdict = f"{wrong} cells are not as predicted" if wrong else "every cell as predicted"
    if options.record:
        write_record(options, rows, verdict, time.monotonic() - begun)
    print(f"kernel selftest: {verdict}")
    return 1 if wrong else 0


def write_record(options: argparse.Namespace, rows: list[dict], verdict: str, seconds: float) -> None:
    """PATH.json, and the table as PATH.md."""
    path, whole = options.record, "make gate-selftest FAULT_BUILD=build/fault"
    part = f"python tests/python/gate/kernel_selftest.py --only '{','.join(options.only or [])}'"
    found = record.provenance([]) | {
        "question": "Do faults inside the kernels turn exactly the predicted gates red?",
        "command": whole if options.only is None else part,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "verdict": verdict,
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(found, path.stem))


def page(data: dict, name: str) -> str:
    gates = list(data["rows"][0]["found"])
    lines = [
        f"# Faults inside the kernels against the gates, on {data['gpu']}",
        "",
        f"Question: {data['question']} {data['verdict'].capitalize()}. As data: [{name}.json]({name}.json).",
        "",
        f"    {data['command']}",
        "",
        f"Commit {data['commit']}; {', '.join(f'{key} {value}' for key, value in data['versions'].items())}; "
        f"{data['seconds']:.0f} s. Every row runs with random delays, in a process of its own, all at a time.",
        "",
        "| kernel mutation | " + " | ".join(gates) + " |",
        "|---" * (1 + len(gates)) + "|",
    ]
    for row in data["rows"]:
        cells = [
            str(code) if code in row["predicted"][gate] else f"**{code}**, predicted {row['predicted'][gate]}"
            for gate, code in row["found"].items()
        ]
        lines.append(f"| {row['mutation']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *NOTES]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
