#!/usr/bin/env python3
"""The plot of a gate's record, as SVG, for gates that measure along an axis: numerics, race, memory, share, speed.

python benchmarks/harness/plot_gates.py benchmarks/records/h200-gate-numerics.json [--out FILE.svg]
"""

import argparse
import json
import math
import pathlib
import sys

from plot_linear import COLORS, line, text

WIDTH, HEIGHT, LEFT, TOP = 510, 280, 66, 44  # pictures are 600 wide, as pages show them
ROW, BAR, INDENT, WHOLE = 36, 330, 14, 600  # of bar charts
LIMIT, FLOOR = 0.05, 1e-6  # numerics: what a ratio may be off from 1, and what is drawn as equal


class Scale:
    """Data to pixels on one axis, linear or logarithmic."""

    def __init__(self, values, begin: float, end: float, logarithmic: bool = False):
        self.log, self.begin, self.end = logarithmic, begin, end
        self.low, self.high = self._of(min(values)), self._of(max(values))

    def _of(self, value):
        return math.log2(value) if self.log else value

    def __call__(self, value):
        share = (self._of(value) - self.low) / ((self.high - self.low) or 1)
        return self.begin + share * (self.end - self.begin)


def picture(width, height, title, parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, ground, text(width / 2, 20, title, 13), *parts, "</svg>"]) + "\n"


def machine(record):
    return record["machine"].get("gpu", f"a CPU ({record['machine']['cpu']})")


def dot(x, y, color, shape="circle", hollow=False):
    paint = f'fill="none" stroke="{color}" stroke-width="1.6"' if hollow else f'fill="{color}" opacity="0.7"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" {paint}/>'
    return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" {paint}/>'


def axes(x, y, x_ticks, y_ticks, x_title, y_title):
    parts = []
    for value, label in y_ticks:
        parts += [line(LEFT, y(value), LEFT + WIDTH, y(value), "#ddd"), text(LEFT - 6, y(value) + 4, label, 10, "end")]
    for value, label in x_ticks:
        parts += [
            line(x(value), TOP + HEIGHT, x(value), TOP + HEIGHT + 4, "#444"),
            text(x(value), TOP + HEIGHT + 17, label, 10),
        ]
    return [*parts, text(LEFT + WIDTH / 2, TOP + HEIGHT + 34, x_title), text(LEFT, TOP - 8, y_title, 11, "start")]


def legend(names, top):
    parts = []
    for i, name in enumerate(names):
        x, y = LEFT + i % 4 * 130, top + 16 * (i // 4)
        parts += [line(x, y - 4, x + 18, y - 4, COLORS[i % len(COLORS)], 4), text(x + 24, y, name, anchor="start")]
    return parts


def numerics(record):
    """How far the error against float64 is from torch's, by tokens; a colour a path, each a little aside."""
    rows = [row["values"] | {"cell": row["cell"]} for row in record["results"] if row["arm"] == "auto"]
    table = record.get("table", {"columns": ["arm"], "rows": []})
    named = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    rows += [row for row in named if row["arm"] == "auto"]
    points = [(int(row["cell"].split()[2]), row["ratio"], row["path"]) for row in rows if "ratio" in row]
    paths = sorted({path for *_, path in points})
    tokens, off = [m for m, *_ in points], [max(FLOOR, abs(ratio - 1)) for _, ratio, _ in points]
    x = Scale(tokens, LEFT + 14, LEFT + WIDTH - 14, True)
    y = Scale([*off, FLOOR, 2 * LIMIT], TOP + HEIGHT - 8, TOP, True)
    ticks = [(m, str(m)) for m in (1, 4, 16, 64, 256, 1024, 4096, 16384) if m <= max(tokens)]
    steps = [(10.0**e, f"1e{e}") for e in range(-5, 0)] + [(FLOOR, "<= 1e-6")]
    parts = axes(x, y, ticks, steps, "tokens", "|error against float64 / that of dequantise + linear - 1|")
    parts += [
        line(LEFT, y(LIMIT), LEFT + WIDTH, y(LIMIT), "#c00", 1.4),
        text(LEFT + WIDTH, y(LIMIT) + 13, f"{LIMIT:g}: limit of a larger error", 10, "end"),
    ]
    dots = []
    for (m, _, path), value in zip(points, off, strict=True):
        place = paths.index(path)
        aside = 4 * (place - (len(paths) - 1) / 2)
        dots.append(dot(x(m) + aside, y(value), COLORS[place % len(COLORS)]))
    parts += dict.fromkeys(dots)  # those on one place once
    title = f"Error of {len(points)} multiplies on {machine(record)}"
    return picture(LEFT + WIDTH + 24, TOP + HEIGHT + 70, title, parts + legend(paths, TOP + HEIGHT + 54))


def race(record):
    """Layer size against link rate: what the unsafe arm did, and the line at which a copy takes one visit."""
    grid = record["findings"].get("size_against_rate")
    if not grid:
        return None
    x = Scale([p["layer_bytes"] / 2**20 for p in grid], LEFT + 20, LEFT + WIDTH - 20, True)
    y = Scale([p["copy_visits"] for p in grid] + [1.0], TOP + HEIGHT - 10, TOP + 10, True)
    sizes = sorted({p["layer_bytes"] / 2**20 for p in grid})
    ticks = [(2.0**e, f"{2**e}" if e >= 0 else f"1/{2**-e}") for e in range(-8, 9, 2) if y.low <= e <= y.high]
    parts = axes(
        x, y, [(s, f"{s:.2g} MiB") for s in sizes], ticks, "size of a layer", "time of a copy / visit of a layer"
    )
    parts.append(line(LEFT, y(1), LEFT + WIDTH, y(1), "#444", 1.4))
    parts.append(text(LEFT + 4, y(1) - 6, "predicted wrong above this line, right below", 10, "start"))
    names = {"right": 2, "wrong": 1, "mixed": 4}
    for p in grid:
        color, shape = COLORS[names[p["seen"]]], "rect" if p["seen"] == "wrong" else "circle"
        hollow = p["predicted"] == "close"
        parts.append(dot(x(p["layer_bytes"] / 2**20), y(p["copy_visits"]), color, shape, hollow))
    words = "Unsafe arm's gradients: squares wrong, discs right; hollow: too close to the line to call"
    parts.append(text(LEFT, TOP + HEIGHT + 54, words, anchor="start"))
    explained = record["findings"]["explanation"].split(":")[0]
    title = f"When an unsafe op turns wrong, on {machine(record)}: explanation {explained}"
    return picture(LEFT + WIDTH + 24, TOP + HEIGHT + 70, title, parts)


def bars(title, rows, caption):
    """rows: (label, value, words, color, (low, high) of a line across the bar); values of one unit."""
    parts, largest = [], max(max(value, *span) for _, value, _, _, span in rows)
    for i, (label, value, words, color, span) in enumerate(rows):
        y = TOP + ROW * i
        top, middle = y + 4, y + 4 + (ROW - 20) / 2
        width = BAR * value / largest
        low, high = (INDENT + BAR * edge / largest for edge in span)
        parts.append(text(INDENT, y, label, 11, "start"))
        parts.append(
            f'<rect x="{INDENT}" y="{top}" width="{width:.1f}" height="{ROW - 20}" fill="{color}" opacity="0.8"/>'
        )
        if low == high:
            parts.append(line(low, top - 1, low, top + ROW - 19, "#222", 2))
        else:
            parts.append(line(low, middle, high, middle, "#222", 1.4))
        parts.append(text(max(INDENT + width, high) + 6, middle + 4, words, 11, "start"))
    parts.append(text(INDENT, TOP + ROW * len(rows) + 10, caption, 11, "start"))
    return picture(WHOLE, TOP + ROW * len(rows) + 24, title, parts)


def timed(record):
    """Tokens per second and peak memory of every arm; a line for what the rounds spread over."""
    rows = [row for row in record["results"] if row["values"] and row["role"] != "control"]
    found = []
    for row in rows:
        values, rate = row["values"], row["values"]["tokens_per_second"]
        peak = f", peak {values['peak_bytes'] / 2**30:.2f} GiB" if "peak_bytes" in values else ""
        color = COLORS[0] if row["role"] == "product" else COLORS[6]
        half = values.get("spread", 0.0) / 2
        words = f"{rate:,.0f} tok/s{peak}"
        found.append((f"{row['arm']}, {row['cell']}", rate, words, color, (rate * (1 - half), rate * (1 + half))))
    caption = "blue: nybble's multiply; grey: what it is compared with; line: spread of the rounds"
    title = f"Tokens per second and peak memory ({record['gate']}) on {machine(record)}"
    return bars(title, found, caption) if found else None


def memory(record):
    """Peaks of a model, streamed and with private copies, and the formula of the streamed one."""
    rows = [
        row for row in record["results"] if "formula_bytes" in row["values"] or row["arm"] == "model of private copies"
    ]
    rows = [row for row in rows if row["values"]]
    if not rows:
        return None
    unit, name = (2**20, "MiB") if max(row["values"]["peak_bytes"] for row in rows) >= 2**24 else (2**10, "KiB")
    found = []
    for row in rows:
        peak, formula = row["values"]["peak_bytes"] / unit, row["values"]["formula_bytes"] / unit
        color = COLORS[0] if row["role"] == "product" else COLORS[1]
        words = f"{peak:,.0f} {name}, formula {formula:,.0f}"
        found.append((f"{row['arm']}, {row['cell']}", peak, words, color, (formula, formula)))
    caption = "mark: resident peak - packed base + window x layer bytes, the formula of a streamed model"
    return bars(f"Peak memory of a training step on {machine(record)}", found, caption)


PLOTS = {"numerics": numerics, "race": race, "share": timed, "speed": timed, "memory": memory}


def svg(record) -> str | None:
    """The picture of a record; None where a gate has none."""
    return PLOTS[record["gate"]](record) if record["gate"] in PLOTS else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="default: beside the record, .svg")
    arguments = parser.parse_args()
    drawn = svg(json.loads(arguments.record.read_text()))
    if drawn is None:
        print("this gate has nothing to plot", file=sys.stderr)
        return 1
    out = arguments.out or arguments.record.with_suffix(".svg")
    out.write_text(drawn, encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
