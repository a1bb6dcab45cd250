#!/usr/bin/env python3
"""The plot of a record of h200_linear.py: time of `auto` / time of dense over tokens, one panel a direction, as SVG.

    python benchmarks/harness/plot_linear.py benchmarks/records/h200-linear.json [--out FILE.svg]

The shaded band is what the spread of both arms allows; a line at 1 is dense cuBLAS.
"""

import argparse
import json
import math
import pathlib
import sys
from xml.sax.saxutils import escape

COLORS = ("#1b6ca8", "#c8553d", "#2f9e44", "#7048e8", "#e8890c", "#22b8cf", "#868e96")
WIDTH, HEIGHT, LEFT, TOP, GAP = 420, 300, 56, 58, 30
LOW, HIGH = 0.25, 2.0


class Panel:
    """One direction: tokens on a logarithmic axis, ratio on a linear one."""

    def __init__(self, left, tokens):
        self.left, self.first, self.last = left, math.log2(tokens[0]), math.log2(tokens[-1])

    def x(self, m):
        return self.left + (math.log2(m) - self.first) / max(self.last - self.first, 1e-9) * WIDTH

    def y(self, ratio):
        inside = min(max(ratio, LOW), HIGH)
        return TOP + (HIGH - inside) / (HIGH - LOW) * HEIGHT


def text(x, y, content, size=11, anchor="middle"):
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="#222">{escape(content)}</text>'


def line(x1, y1, x2, y2, color, width=1.0):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'


def axes(panel, tokens, title):
    parts = [text(panel.left + WIDTH / 2, TOP - 14, title, 13)]
    for step in range(int(LOW * 4), int(HIGH * 4) + 1):
        y = panel.y(step / 4)
        bold = step == 4
        parts.append(line(panel.left, y, panel.left + WIDTH, y, "#444" if bold else "#ddd", 1.4 if bold else 0.8))
        parts.append(text(panel.left - 6, y + 4, f"{step / 4:.2f}", anchor="end"))
    for m in tokens:
        parts.append(line(panel.x(m), TOP + HEIGHT, panel.x(m), TOP + HEIGHT + 4, "#444"))
        if m & (m - 1) == 0:  # sizes between powers of two have a tick, but no room for words
            parts.append(text(panel.x(m), TOP + HEIGHT + 17, str(m) if m < 1024 else f"{m // 1024}k", 10))
    parts.append(text(panel.left + WIDTH / 2, TOP + HEIGHT + 34, "tokens"))
    return parts


def curve(panel, rows, color):
    points = sorted((row["m"], row["ratio_dense"], row["spread"] + row["dense_spread"]) for row in rows)
    upper = [f"{panel.x(m):.1f},{panel.y(ratio * (1 + spread / 2)):.1f}" for m, ratio, spread in points]
    lower = [f"{panel.x(m):.1f},{panel.y(ratio * (1 - spread / 2)):.1f}" for m, ratio, spread in reversed(points)]
    path = " ".join(f"{panel.x(m):.1f},{panel.y(ratio):.1f}" for m, ratio, _ in points)
    parts = [f'<polygon points="{" ".join(upper + lower)}" fill="{color}" opacity="0.12"/>']
    parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    parts += [
        f'<circle cx="{panel.x(m):.1f}" cy="{panel.y(ratio):.1f}" r="2.4" fill="{color}"/>' for m, ratio, _ in points
    ]
    return parts


def svg(record):
    """The whole picture. Raises ValueError for a record without rows of auto."""
    rows = [row for row in record["rows"] if row["auto"]]
    if not rows:
        raise ValueError("the record has no rows of auto")
    tokens = sorted({row["m"] for row in rows})
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    total = LEFT + 2 * WIDTH + GAP + LEFT
    height = TOP + HEIGHT + 76 + 16 * -(-len(shapes) // 4)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" font-family="sans-serif">']
    parts.append(f'<rect width="{total}" height="{height}" fill="white"/>')
    title = f"Time of the 4-bit multiply / time of dense cuBLAS (16-bit), {record['device']} (below 1: faster)"
    parts.append(text(total / 2, 18, title, 14))
    for i, (direction, title) in enumerate((("forward", "y = x Wᵀ"), ("grad_x", "grad_x = grad_y W"))):
        panel = Panel(LEFT + i * (WIDTH + GAP + 20), tokens)
        parts += axes(panel, tokens, title)
        for j, (n, k) in enumerate(shapes):
            own = [row for row in rows if (row["n"], row["k"], row["direction"]) == (n, k, direction)]
            parts += curve(panel, own, COLORS[j % len(COLORS)]) if own else []
    for j, (n, k) in enumerate(shapes):
        x, y = LEFT + j % 4 * 200, TOP + HEIGHT + 56 + 16 * (j // 4)
        parts.append(line(x, y - 4, x + 22, y - 4, COLORS[j % len(COLORS)], 3))
        parts.append(text(x + 28, y, f"{n} x {k}", anchor="start"))
    words = "Curves: W as out x in features. Bands: what the spread of both arms' rounds allows."
    parts.append(text(LEFT, height - 8, words, 10, "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def command(draw, description: str) -> int:
    """`SCRIPT RECORD [--out FILE]` for a script whose draw(record) gives an SVG's text."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="default: beside the record, .svg")
    arguments = parser.parse_args()
    out = arguments.out or arguments.record.with_suffix(".svg")
    out.write_text(draw(json.loads(arguments.record.read_text())), encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(command(svg, __doc__))
