"""All gates: every gate that fits this machine, in one process, each with its own report.

The exit code is the worst of them: a product that one gate found wrong stays wrong whatever the others say, then comes
a control that did not fail, then no verdict. A gate that cannot run here is listed and does not count, unless none ran.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
import traceback
from pathlib import Path

import torch

from nybble.gate import command, record
from nybble.gate.report import machine
from nybble.gate.runner import Verdict
from nybble.gate.training.needs import missing

SEVERITY = (Verdict.OK, Verdict.NO_VERDICT, Verdict.CONTROL_DID_NOT_FAIL, Verdict.PRODUCT_WRONG)
TRAINING = ("equality", "exact", "race", "share", "speed")
TIMED = ("share", "speed")
WORDS = {0: "ok", 1: "PRODUCT WRONG", 2: "VACUOUS", 3: "NO VERDICT"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the run; each gate keeps its own defaults."""
    command.add_device(parser)
    parser.add_argument("--full", action="store_true", help="the sizes of records")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...", help="these gates")
    parser.add_argument(
        "--records", type=Path, metavar="FOLDER", help="write <card>-gate-<name> and <card>-gates-all there"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the gates, prints a line for each at the end, returns the worst exit code."""
    from nybble.gate import GATES

    ran: dict[str, tuple[int, float]] = {}
    left_out: dict[str, str] = {}
    started = time.monotonic()
    for name in options.only or [name for name in GATES if name != "all"]:
        why = unfit(name, options.device)
        if why is not None:
            left_out[name] = why
            continue
        print(f"\n=== {name}", flush=True)
        begin = time.monotonic()
        ran[name] = run_one(name, options), time.monotonic() - begin
    code, seconds = worst(code for code, _ in ran.values()), time.monotonic() - started
    lines = [f"{name:<12} {code} {WORDS[code]:<14} {took:6.1f} s" for name, (code, took) in ran.items()]
    lines += [f"{name:<12} - not run: {why}" for name, why in left_out.items()]
    lines.append(f"all: {WORDS[code]} (exit {code}, {seconds:.0f} s)")
    print("\n=== all gates", *lines, sep="\n")
    if options.records is not None:
        write_summary(options, ran, left_out, code, seconds, lines)
    return code


def write_summary(options, ran, left_out, code, seconds, lines) -> None:
    """What the run says as a whole, as <card>-gates-all.json and .md."""
    data = {
        "gate": "all",
        "question": "Is every gate that fits this machine green, in one process and one run?",
        "verdict": code,
        "meaning": WORDS[code],
        "reasons": [f"{name}: {WORDS[found]}" for name, (found, _) in ran.items() if found],
        "claims": [],
        "findings": {},
        "not_run": left_out,
        "machine": machine(),
        "seconds": seconds,
        "results": [{"gate": name, "exit": code, "seconds": round(took, 1)} for name, (code, took) in ran.items()],
    }
    path = options.records / f"{card(options.device)}-gates-all"
    record.write(path, data, text=lines, notes=[], arguments=options.arguments)


def run_one(name: str, options: argparse.Namespace) -> int:
    """One gate with its own defaults; a crash is no verdict."""
    from nybble.gate import GATES

    parser = argparse.ArgumentParser(prog=name)
    GATES[name].add_arguments(parser)
    arguments = ["--device", options.device, *(["--full"] if options.full else [])]
    if options.records is not None:
        arguments += ["--record", str(options.records / f"{card(options.device)}-gate-{name}")]
    gate_options = parser.parse_args(arguments)
    gate_options.arguments = [name, *arguments]
    try:
        return GATES[name].run(gate_options)
    except Exception:
        traceback.print_exc()
        return int(Verdict.NO_VERDICT)
    finally:
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def unfit(name: str, device: str) -> str | None:
    """Why a gate has nothing to say on this machine, or None."""
    if name in TIMED and device == "cpu":
        return "times of a CPU step say nothing about a card"
    if name in TRAINING:
        return missing()
    return None


def worst(codes) -> int:
    """The exit code that outranks the others; no gate at all is no verdict."""
    return int(max((Verdict(code) for code in codes), key=SEVERITY.index, default=Verdict.NO_VERDICT))


def card(device: str) -> str:
    """The machine in a file's name: h200, rtx-4090, cpu."""
    if device == "cpu":
        return "cpu"
    words = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-").split("-")
    return "-".join(word for word in words if word not in ("nvidia", "geforce"))
