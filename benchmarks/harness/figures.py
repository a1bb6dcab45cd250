#!/usr/bin/env python3
"""Numbers and plots that are told from records: are they what the records say?

    python benchmarks/harness/figures.py            lists every figure that differs from its record; exit code 1
    python benchmarks/harness/figures.py --write    puts the records' figures in

In a Markdown file a figure stands between two comments: <!-- figure NAME -->89 µs<!-- /figure -->. NAME is one of
FIGURES below. A plot is a file beside its record.
"""

import argparse
import functools
import json
import pathlib
import re
import sys

import plot_gates
import plot_linear
import plot_stream
from linear_targets import BETWEEN, LARGE_WEIGHT

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "records"
MARK = re.compile(r"<!-- figure (?P<name>[\w-]+) -->(?P<text>.*?)<!-- /figure -->", re.S)


@functools.cache
def record(name: str) -> dict:
    return json.loads((RECORDS / f"{name}.json").read_text())


def span(values, digits: int = 2) -> str:
    """The smallest and the largest."""
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def linear_rows() -> list[dict]:
    return [row for row in record("h200-linear")["rows"] if row["auto"]]


def linear_time(arm: str) -> str:
    """Of the forward of a 14336 x 4096 weight at 512 tokens."""
    wanted = dict(n=14336, k=4096, m=512, direction="forward")
    (row,) = (row for row in linear_rows() if wanted.items() <= row.items())
    return f"{row[f'{arm}_us']:.0f} µs"


def against_dense(tokens) -> str:
    """tokens(M): whether a number of tokens is meant."""
    return span(row["ratio_dense"] for row in linear_rows() if row["n"] * row["k"] >= LARGE_WEIGHT and tokens(row["m"]))


def between_tiles(m: int) -> bool:
    """Whether tiles of 512 tokens would be padded, up to where row pairs may take the problem instead."""
    return m > 256 and m in BETWEEN


def cpu_ratios(arm: str) -> list[float]:
    return [cell[f"ratio to {arm}"]["median"] for cell in record("cpu-linear")["cells"]]


def resident_ratio(tokens: int) -> str:
    (row,) = (row for row in record("h200-resident-step")["rows"] if row["tokens"] == tokens)
    return f"{row['ratio']:.2f}"


def streamed_cases(*shapes: str) -> list[dict]:
    return [case for case in record("h200-stream")["cases"] if case["shape"] in shapes]


def streamed_gradients() -> str:
    cases = [case["exact"]["streamed"] for case in streamed_cases("8b", "8b-16")]
    worst = min(cases, key=lambda found: found["equal"])
    return f"{worst['equal']} of {worst['compared']}"


def streamed_row(arm: str, tokens: int, *shapes: str) -> dict:
    """The one that was timed in most rounds, the last of equals."""
    rows = [row for case in streamed_cases(*shapes) for row in case["rows"]]
    rows = [row for row in rows if (row["arm"], row["tokens"]) == (arm, tokens) and "rounds_ms" in row]
    return max(reversed(rows), key=lambda row: len(row["rounds_ms"]))


def streamed_ratio(arm: str, other: str) -> str:
    """Rate of one arm by the other's, at 8192 tokens."""
    times = [streamed_row(name, 8192, "8b-16")["step_ms"] for name in (arm, other)]
    return f"{times[1] / times[0]:.3f}"


STREAMED_COLUMNS = {
    "resident": "resident",
    "streamed": "streamed",
    "streamed_keep": "activations kept",
    "streamed_dequant": "dequantised",
    "peer": "soup-cli 0.77",
}


def streamed_table() -> str:
    """Tokens per second of the 8B layers' arms and the peaks of two, a line a length."""
    lengths = sorted({row["tokens"] for case in streamed_cases("8b-16") for row in case["rows"]})
    lines = [
        "| tokens a step | " + " | ".join(STREAMED_COLUMNS.values()) + " | peak, resident | peak, streamed |",
        "|---|" + "---|" * (len(STREAMED_COLUMNS) + 2),
    ]
    for tokens in lengths:
        rows = {arm: streamed_row(arm, tokens, "8b-16") for arm in STREAMED_COLUMNS}
        rates = [f"{row['tok_s']:.0f}" for row in rows.values()]
        peaks = [f"{rows[arm]['peak_allocated_mib'] / 1024:.1f} GiB" for arm in ("resident", "streamed")]
        lines.append(f"| {tokens} | " + " | ".join([*rates, *peaks]) + " |")
    return "\n" + "\n".join(lines) + "\n"


def visit(key: str) -> str:
    return f"{record('h200-visit')['step_us_per_visit'][key] / 1e3:.1f} ms"


def visit_calling_thread() -> str:
    times = record("h200-visit")["step_us_per_visit"]["settings"]
    return f"{times['backward on the calling thread']['streamed'] / 1e3:.1f} ms"


def visit_added() -> str:
    step = record("h200-visit")["step_us_per_visit"]
    return "{:.0f} us ({:.0f} .. {:.0f})".format(step["added"], *step["added_interval"])


def visit_pieces() -> str:
    """Acquire, release and a refill: best and median of rounds."""
    return "{:.0f} to {:.0f} us".format(*record("h200-visit")["us"]["a whole visit, 2 slots, a refill of 4 KiB each"])


def visit_share() -> str:
    where = record("h200-visit")["step_us_per_visit"]["where"]
    own = sum(row["us"] for name, row in where.items() if "nybble" in name)
    return f"{own / sum(row['us'] for row in where.values()):.0%}"


FIGURES = {
    "linear-512-fused": lambda: linear_time("fused"),
    "linear-512-bitsandbytes": lambda: linear_time("bnb"),
    "linear-512-dense": lambda: linear_time("dense"),
    "linear-512-trainers": lambda: span(row["bnb_us"] / row["dense_us"] for row in linear_rows() if row["m"] == 512),
    "linear-bitsandbytes": lambda: span(row["ratio_bnb"] for row in linear_rows() if row["ratio_bnb"]),
    "linear-sizes": lambda: str(len(linear_rows())),
    "linear-dense-few": lambda: against_dense(lambda m: m <= 64),
    "linear-dense-some": lambda: against_dense(lambda m: 96 <= m <= 256),
    "linear-dense-between": lambda: against_dense(between_tiles),
    "linear-dense-many": lambda: against_dense(lambda m: m >= 512 and not between_tiles(m)),
    "cpu-bitsandbytes": lambda: f"{min(cpu_ratios('bitsandbytes')):.3f} to {max(cpu_ratios('bitsandbytes')):.2f}",
    "cpu-dense": lambda: f"{max(cpu_ratios('dense')):.2f}",
    "resident-8192": lambda: resident_ratio(8192),
    "streamed-gradients": streamed_gradients,
    "streamed-8192": lambda: streamed_ratio("streamed", "resident"),
    "streamed-keep-8192": lambda: streamed_ratio("streamed_keep", "resident"),
    "streamed-peer-8192": lambda: "{:.3f} ({:.3f} .. {:.3f})".format(
        *streamed_row("streamed", 8192, "8b-16")["ratio_peer"]
    ),
    "streamed-table": streamed_table,
    "streamed-link": lambda: f"{streamed_row('streamed', 128, '70b-24', '70b-12')['ratio_link']:.2f}",
    "visit-total": lambda: visit("total"),
    "visit-calling-thread": visit_calling_thread,
    "visit-added": visit_added,
    "visit-pieces": visit_pieces,
    "visit-share": visit_share,
}


def plots() -> dict[pathlib.Path, str]:
    """Every plot that a record has, by the file that holds it."""
    found = {RECORDS / "h200-linear.svg": plot_linear.svg(record("h200-linear"))}
    stream = RECORDS / "h200-stream.svg"
    if stream.is_file():
        found[stream] = plot_stream.svg(record("h200-stream"))
    for path in sorted(RECORDS.glob("*-gate-*.json")):
        picture = plot_gates.svg(json.loads(path.read_text()))
        if picture is not None:
            found[path.with_suffix(".svg")] = picture
    return found


def filled(text: str) -> str:
    """A page with every figure as its record has it. Raises KeyError for an unknown name."""
    return MARK.sub(lambda found: f"<!-- figure {found['name']} -->{FIGURES[found['name']]()}<!-- /figure -->", text)


def pages() -> list[pathlib.Path]:
    return [
        path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if MARK.search(path.read_text())
    ]


def stale() -> dict[pathlib.Path, str]:
    """What every file that differs ought to hold."""
    wanted = {path: filled(path.read_text()) for path in pages()} | plots()
    return {path: text for path, text in wanted.items() if not path.is_file() or path.read_text() != text}


def differences(path: pathlib.Path, wanted: str) -> list[str]:
    """Figure by figure, for a page."""
    if path.suffix == ".svg" or not path.is_file():
        return [f"{path.relative_to(ROOT)} is not the plot of its record"]
    pairs = zip(MARK.finditer(path.read_text()), MARK.finditer(wanted), strict=True)
    return [
        f"{path.relative_to(ROOT)}: {had['name']} is {had['text']!r}, its record says {has['text']!r}"
        for had, has in pairs
        if had["text"] != has["text"]
    ]


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    found = stale()
    for path, text in found.items():
        print("\n".join(differences(path, text)), file=sys.stderr)
        if options.write:
            path.write_text(text)
    if found and not options.write:
        print("python benchmarks/harness/figures.py --write puts them in", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
