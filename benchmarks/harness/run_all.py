#!/usr/bin/env python3
"""`make bench`: every harness that times something and fits this machine, one after another, and one table last.

    python benchmarks/harness/run_all.py [--only NAME,...] [--out FOLDER] [--seconds S] [--list]

Each harness keeps its own checks and its own exit code; its output goes to FOLDER/NAME.log (default build/bench).
The last table has a line for each that ran, then each that did not and why. Exit: 0 all right; 1 a must was missed, a
result was wrong or a harness crashed; 3 nothing failed, but one had no verdict or ran out of time, or nothing ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VERDICTS = {0: "ok", 1: "FAILED", 3: "no verdict"}


@dataclasses.dataclass(frozen=True)
class Machine:
    """What harnesses ask of a machine. gpu: name of the first GPU or ""."""

    gpu: str
    cuda_build: bool
    build: pathlib.Path
    modules: frozenset[str]

    def lacks(self, *modules: str) -> str:
        missing = [module for module in modules if module not in self.modules]
        return f"no {', '.join(missing)} in this interpreter" if missing else ""


@dataclasses.dataclass(frozen=True)
class Harness:
    """seconds: it is ended after. command: arguments after the interpreter, or of a program when program is set. unfit:
    why not here, "" to run. expected: seconds it takes on an H200's host, about.
    """

    name: str
    seconds: int
    command: Callable[[Machine, pathlib.Path], list[str]]
    unfit: Callable[[Machine], str]
    program: bool = False
    expected: int = 0


def needs_gpu(machine: Machine) -> str:
    if not machine.gpu:
        return "no GPU here"
    return "" if machine.cuda_build else "nybble was built without CUDA"


def needs_h200(machine: Machine) -> str:
    other = (
        "" if "H200" in machine.gpu else f"its targets are the H200's, this is {machine.gpu}; linear-bench runs instead"
    )
    return needs_gpu(machine) or other


def portable_library(machine: Machine) -> pathlib.Path:
    return machine.build / "benchmarks" / "cuda" / "libportable_bench.so"


def needs_portable(machine: Machine) -> str:
    library = portable_library(machine)
    missing = "" if library.exists() else f"no {library}; cmake --build {machine.build} --target portable_bench"
    return needs_gpu(machine) or missing


def other_paths(machine: Machine) -> list[str]:
    """Where the library is built: an argument for h200_linear.py."""
    library = portable_library(machine)
    return ["--library", str(library)] if library.exists() else []


def script(name: str, *arguments: str) -> list[str]:
    return [str(HERE / name), *arguments]


HARNESSES = (
    Harness("visit-cost", 90, lambda m, out: script("visit_cost.py", "--rounds", "5"), lambda m: "", expected=40),
    Harness(
        "codec",
        60,
        lambda m, out: [str(m.build / "tests" / "cpp" / "format" / "format_cuda_bench")],
        lambda m: (
            needs_gpu(m)
            or ("" if (m.build / "tests/cpp/format/format_cuda_bench").exists() else "format_cuda_bench is not built")
        ),
        program=True,
        expected=10,
    ),
    Harness(
        "h200-linear",
        200,
        lambda m, out: script("h200_linear.py", "--out", str(out), "--budget", "170", "--must", *other_paths(m)),
        needs_h200,
        expected=100,
    ),
    Harness(
        "linear-bench",
        120,
        lambda m, out: ["-m", "nybble.bench", "linear", "--seconds", "60", "--json", str(out / "linear-bench.json")],
        lambda m: "h200-linear measures more" if needs_h200(m) == "" else "",
        expected=70,
    ),
    Harness(
        "portable-time",
        150,
        lambda m, out: script(
            "portable_time.py", str(portable_library(m)), "--seconds", "90", "--json", str(out / "h200-portable.json")
        ),
        needs_portable,
        expected=70,
    ),
    Harness(
        "resident-step",
        150,
        lambda m, out: script("h200_resident_step.py", "--out", str(out), "--budget", "60"),
        lambda m: needs_h200(m).split(";")[0] or m.lacks("transformers", "peft", "bitsandbytes"),
        expected=80,
    ),
    Harness(
        "cpu-linear",
        150,
        lambda m, out: script("cpu_linear.py", "--shapes", "4096x4096", "--rows", "1,32", "--grad-rows", "1"),
        lambda m: m.lacks("bitsandbytes"),
        expected=35,
    ),
)


def this_machine() -> Machine:
    import torch

    import nybble

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    modules = {name for name in ("bitsandbytes", "transformers", "peft") if importlib.util.find_spec(name)}
    build = pathlib.Path(os.environ.get("NYBBLE_BUILD_DIR", ROOT / "build" / "dev"))
    return Machine(gpu, nybble.build_info()["cuda"] is not None, build, frozenset(modules))


@dataclasses.dataclass(frozen=True)
class Outcome:
    name: str
    code: int
    seconds: float
    last: str

    @property
    def verdict(self) -> str:
        return "out of time" if self.code == 124 else VERDICTS.get(self.code, f"FAILED ({self.code})")


def run(harness: Harness, machine: Machine, out: pathlib.Path) -> Outcome:
    command = harness.command(machine, out)
    command = command if harness.program else [sys.executable, *command]
    print(f"== {harness.name}: {' '.join(command)}", flush=True)
    start, log = time.time(), out / f"{harness.name}.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=harness.seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for line in lines[-8:]:
        print(f"   {line[:200]}")
    return Outcome(harness.name, code, time.time() - start, lines[-1].strip() if lines else "")


def table(outcomes: list[Outcome], left_out: list[tuple[str, str]]) -> str:
    lines = [f"{'harness':16s} {'verdict':12s} {'s':>5s}  last line"]
    lines += [f"{o.name:16s} {o.verdict:12s} {o.seconds:5.0f}  {o.last[:110]}" for o in outcomes]
    lines += [f"{name:16s} {'not run':12s} {'':5s}  {why}" for name, why in left_out]
    return "\n".join(lines)


def exit_code(outcomes: list[Outcome]) -> int:
    codes = {outcome.code for outcome in outcomes}
    if codes - {0, 3, 124}:
        return 1
    return 3 if codes != {0} else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, comma separated")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "build" / "bench", help="folder for logs and records"
    )
    parser.add_argument("--seconds", type=float, default=900, help="start no harness after")
    parser.add_argument("--list", action="store_true", help="say what would run, and stop")
    arguments = parser.parse_args(argv)
    names = {harness.name for harness in HARNESSES}
    wanted = set(arguments.only.split(",")) if arguments.only else names
    if wanted - names:
        parser.error(f"no harness {', '.join(sorted(wanted - names))}; there are {', '.join(sorted(names))}")
    machine = this_machine()
    arguments.out.mkdir(parents=True, exist_ok=True)
    start, outcomes, left_out, expected = time.time(), [], [], 0
    for harness in HARNESSES:
        if harness.name not in wanted:
            continue
        why = harness.unfit(machine)
        if not why and time.time() - start > arguments.seconds:
            why = f"no time left of {arguments.seconds:.0f} s"
        expected += 0 if why else harness.expected
        if why or arguments.list:
            left_out.append(
                (harness.name, why or f"would run, about {harness.expected} s, at most {harness.seconds} s")
            )
        else:
            outcomes.append(run(harness, machine, arguments.out))
    print(f"\n{machine.gpu or 'no GPU'}, logs in {arguments.out}")
    print(table(outcomes, left_out))
    print(f"about {expected} s were expected" if outcomes else f"about {expected} s in all")
    return 0 if arguments.list else exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
