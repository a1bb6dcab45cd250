"""What the multiply costs on this machine: `nybble bench linear`.

    python -m nybble.bench linear [--shapes 14336x4096,...] [--config config.json] [--m 1,16,512,4096]
                                  [--device cuda|cpu] [--seconds S] [--json FILE]

One row per shape, direction and number of tokens: microseconds of each path, of dequantising alone, of dense torch
(the same shape, 16-bit weight), and which path mode "auto" takes. A * marks an `auto` that another path beats by more
than 5% and the spread: `nybble tune` would change it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

import torch

from . import build_info, tune
from .timing import FUSED_PATHS, Problem, Times, Weights, measure

DEFAULT_TOKENS = {"cuda": (1, 8, 64, 512, 4096), "cpu": (1, 16)}
DEFAULT_SHAPES = {"cuda": ((14336, 4096), (4096, 14336), (4096, 4096)), "cpu": ((1024, 4096),)}
BEATEN = 1.05


def columns(results: list[Times]) -> list[str]:
    """The arms that any result has, in the order of the table."""
    return [
        arm
        for arm in ("cpu", *FUSED_PATHS, "dequant", "dequantise", "dense")
        if any(arm in times.us for times in results)
    ]


def beaten(times: Times) -> bool:
    """Whether a path is faster than what auto takes, beyond doubt."""
    ours = times.us[times.auto]
    others = [us for path, us in times.us.items() if path not in ("dense", "dequantise")]
    return min(others) * max(BEATEN, 1 + times.spread[times.auto]) < ours


def markdown(results: list[Times]) -> str:
    """The table, as text that is also markdown."""
    arms = columns(results)
    head = ["n x k", "direction", "m", *[f"{arm} us" for arm in arms], "auto takes", "auto / dense", "spread"]
    rows = [head, ["---"] * len(head)]
    for times in results:
        p = times.problem
        cells = [f"{times.us[arm]:.1f}" if arm in times.us else "-" for arm in arms]
        choice = f"{times.auto}{' *' if beaten(times) else ''}{'' if times.measured else ' (unmeasured)'}"
        ratio = f"{times.us[times.auto] / times.us['dense']:.2f}"
        spread = f"{100 * max(times.spread.values()):.0f}%"
        rows.append([f"{p.n}x{p.k}", p.direction, str(p.m), *cells, choice, ratio, spread])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def as_json(results: list[Times], device: str) -> str:
    rows = [
        dict(n=t.problem.n, k=t.problem.k, m=t.problem.m, direction=t.problem.direction, dtype=t.problem.dtype_name)
        | dict(auto=t.auto, plan=t.plan, us=t.us, spread=t.spread)
        for t in results
    ]
    return json.dumps(
        {"device": device, **build_info(), "tune_hash": f"{tune.active()[1]:016x}", "rows": rows}, indent=1
    )


def measure_all(shapes, tokens, device: torch.device, seconds: float, rounds: int) -> tuple[list[Times], list[str]]:
    """(results, what was left out for want of time)."""
    start, results, skipped = time.time(), [], []
    for n, k in shapes:
        weights = Weights(n, k, torch.bfloat16, device)
        for direction in ("forward", "grad_input"):
            for m in tokens:
                if time.time() - start > seconds:
                    skipped.append(f"{n}x{k} {direction} m {m}")
                    continue
                results.append(measure(Problem(n, k, m, direction), weights, rounds))
    return results, skipped


def _verdict(results: list[Times], device: str) -> str:
    lines = []
    slower = [t for t in results if beaten(t)]
    unmeasured = sum(not t.measured for t in results)
    if unmeasured:
        lines.append(
            f"{device} was not measured by nybble's authors at {unmeasured} of {len(results)}: auto follows a model "
            "there. `nybble tune` measures."
        )
    if slower:
        lines.append(
            f"auto takes a path that another one beats at {len(slower)} of {len(results)} (*): run `nybble tune`."
        )
    else:
        lines.append(f"auto takes the fastest path, within {BEATEN - 1:.0%} or the spread, at all {len(results)}.")
    return "\n".join(lines)


def _linear(arguments) -> int:
    kind = arguments.device or ("cuda" if torch.cuda.is_available() and build_info()["cuda"] else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        print("nybble bench: torch sees no GPU here; use --device cpu", file=sys.stderr)
        return 7
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if kind == "cuda" else "CPU"
    shapes = list(tune.parse_shapes(arguments.shapes) if arguments.shapes else DEFAULT_SHAPES[kind])
    if arguments.config:
        shapes = tune.shapes_of_config(arguments.config)
    tokens = tune.parse_tokens(arguments.m) if arguments.m else list(DEFAULT_TOKENS[kind])
    digest = tune.active()[1]
    print(f"{name}, torch {torch.__version__}, tune table: {f'{digest:016x}' if digest else 'none'}", flush=True)
    results, skipped = measure_all(shapes, tokens, device, arguments.seconds, arguments.rounds)
    if not results:
        print("nybble bench: nothing was measured", file=sys.stderr)
        return 3
    print(markdown(results))
    print(_verdict(results, name))
    if skipped:
        print(f"not measured, for want of time ({arguments.seconds:.0f} s): {', '.join(skipped)}")
    if arguments.json:
        arguments.json.write_text(as_json(results, name) + "\n", encoding="utf-8")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nybble bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["linear"])
    parser.add_argument("--shapes", help="OUTxIN,...")
    parser.add_argument("--config", type=pathlib.Path, help="config.json of a Llama-shaped model")
    parser.add_argument("--m", help="numbers of tokens")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU when there is one")
    parser.add_argument("--seconds", type=float, default=120, help="stop measuring after")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path, help="also write the numbers there")
    arguments = parser.parse_args(argv)
    try:
        return _linear(arguments)
    except (ValueError, OSError) as error:
        print(f"nybble bench: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
