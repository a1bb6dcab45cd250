"""Tune tables: which path a multiply takes on one card, measured once there. `nybble tune`, docs/tune.md.

    python -m nybble.tune [--shapes 4096x14336,...] [--config config.json] [--m 1,16,...] [--out FILE] [--seconds S]
    python -m nybble.tune --show [FILE]

Measures every path and writes the fastest per range of tokens. Nothing uses the table until NYBBLE_TUNE names the file,
or use() is called: a table changes which kernel adds up a sum, and so the last bits of results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterable

import torch

from .timing import Problem, Times, Weights, measure
from .tune_table import activate, active, entry, to_text, use

DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DEFAULT_SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
TIE = 0.03  # a path must be this much faster than the built-in choice to replace it


def choose(times: Times) -> str:
    """The fastest path, or the one that `auto` takes anyway when that is as good."""
    paths = {path: us for path, us in times.us.items() if path not in ("dense", "dequantise", "cpu")}
    best = min(paths, key=paths.__getitem__)
    return times.auto if paths[times.auto] <= paths[best] * (1 + TIE) else best


def entries_of(device: str, results: Iterable[Times]) -> list[dict]:
    """Table lines for all results. A measured number of tokens stands for its neighbourhood: up to the geometric middle
    of two measured ones, the least one from 1 on, the largest one for itself. Neighbours with one path are one line.
    """
    groups: dict[tuple, list[Times]] = {}
    for times in results:
        p = times.problem
        groups.setdefault((p.n, p.k, p.direction, p.dtype_name), []).append(times)
    lines = []
    for group in groups.values():
        group = sorted(group, key=lambda times: times.problem.m)
        first = 1
        for i, times in enumerate(group):
            m = times.problem.m
            last = m if i + 1 == len(group) else max(m, math.isqrt(m * group[i + 1].problem.m))
            path = choose(times)
            if i > 0 and lines[-1]["path"] == path:
                lines[-1]["m_max"] = last
            else:
                lines.append(entry(device, times.problem, first, last, path))
            first = last + 1
    return lines


def default_file(device: str) -> pathlib.Path:
    """Where `nybble tune` keeps the table of a card: $XDG_CACHE_HOME (or ~/.cache)/nybble/tune-<card>.json."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "nybble" / f"tune-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def shapes_of_config(path: pathlib.Path) -> list[tuple[int, int]]:
    """[(n, k)] of the linears of a Llama-shaped model, from its config.json. ValueError names a missing field."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    try:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
    except KeyError as missing:
        raise ValueError(
            f"{path} has no {missing}, expected the config of a Llama-shaped model; use --shapes"
        ) from None
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, config.get("num_key_value_heads", heads) * head
    return list(dict.fromkeys([(queries, hidden), (keys, hidden), (hidden, queries), (inner, hidden), (hidden, inner)]))


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """ "4096x14336,1024x4096" -> [(4096, 14336), (1024, 4096)], n (out_features) first."""
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)", part.strip())
        if not match or "0" in match.groups():
            raise ValueError(f"shape {part!r}, expected OUTxIN such as 4096x14336")
        shapes.append((int(match[1]), int(match[2])))
    return shapes


def parse_tokens(text: str) -> list[int]:
    """ "1,16" -> [1, 16]."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(f"tokens {text!r}, expected numbers from 1 on with commas, such as 1,16,512")
    return sorted({int(part) for part in text.split(",")})


def _measure_all(shapes, tokens, seconds, rounds, device) -> list[Times]:
    start, results = time.time(), []
    for n, k in shapes:
        weights = Weights(n, k, torch.bfloat16, device)
        for direction in ("forward", "grad_input"):
            for m in tokens:
                if time.time() - start > seconds:
                    print(f"out of time: {n}x{k} {direction} from m {m} on was not measured", flush=True)
                    return results
                times = measure(Problem(n, k, m, direction), weights, rounds)
                results.append(times)
                path = choose(times)
                us = ", ".join(f"{name} {value:.1f}" for name, value in sorted(times.us.items(), key=lambda x: x[1]))
                change = "" if path == times.auto else f" instead of {times.auto}"
                print(f"{n}x{k} {direction} m {m}: {path}{change} | us: {us}", flush=True)
    return results


def _show(path: pathlib.Path | None) -> int:
    if path is not None:
        use(path)
    text, digest = active()
    print(text or "no tune table is active", end="" if text else "\n")
    print(f"hash {digest:016x}, as plans print it")
    return 0


def _tune(arguments) -> int:
    if not torch.cuda.is_available():
        print("nybble tune: no GPU here; plans on the CPU have nothing to choose", file=sys.stderr)
        return 7
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    shapes = parse_shapes(arguments.shapes) if arguments.shapes else list(DEFAULT_SHAPES)
    if arguments.config:
        shapes = shapes_of_config(arguments.config)
    tokens = parse_tokens(arguments.m) if arguments.m else list(DEFAULT_TOKENS)
    activate(None)  # what is measured against is the built-in choice
    results = _measure_all(shapes, tokens, arguments.seconds, arguments.rounds, device)
    if not results:
        print("nybble tune: nothing was measured", file=sys.stderr)
        return 3
    lines = entries_of(name, results)
    measured = [
        dict(n=t.problem.n, k=t.problem.k, m=t.problem.m, direction=t.problem.direction, auto=t.auto)
        | dict(us={path: round(us, 2) for path, us in t.us.items()}, spread=round(max(t.spread.values()), 3))
        for t in results
    ]
    text = to_text(lines, measured)
    activate(text)  # refused here, not at the user's next start, if it were wrong
    out = arguments.out or default_file(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    changed = sum(choose(t) != t.auto for t in results)
    print(f"{name}: {len(lines)} entries from {len(results)} problems, {changed} of them not what auto takes, in {out}")
    print(f"hash {active()[1]:016x}. It changes the last bits of results. To follow it: export NYBBLE_TUNE={out}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nybble tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", help="OUTxIN,...; default: those of an 8B Llama")
    parser.add_argument("--config", type=pathlib.Path, help="config.json of a Llama-shaped model")
    parser.add_argument("--m", help=f"numbers of tokens, default {','.join(map(str, DEFAULT_TOKENS))}")
    parser.add_argument("--out", type=pathlib.Path, help="file, default $XDG_CACHE_HOME/nybble/tune-<card>.json")
    parser.add_argument("--seconds", type=float, default=300, help="stop measuring after")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--show", nargs="?", const="", metavar="FILE", help="print the active table, or one in a file")
    arguments = parser.parse_args(argv)
    try:
        if arguments.show is not None:
            return _show(pathlib.Path(arguments.show) if arguments.show else None)
        return _tune(arguments)
    except (ValueError, OSError) as error:
        print(f"nybble tune: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
