#!/usr/bin/env python3
"""The plot of a record of h200_stream.py: step time of every arm, by case and length, as SVG.

    python benchmarks/harness/plot_stream.py benchmarks/records/h200-stream.json [--out FILE.svg]

A bar is the median of the rounds, the line across its end reaches from the fastest to the slowest. Bars of one length
are scaled to its slowest arm; ablations, which compute nonsense, are grey.
"""

import sys

from plot_gates import picture
from plot_linear import COLORS, command, line, text

ROW, LEFT, BAR, RIGHT = 18, 170, 420, 110
RESIDENT, STREAMED, PEER, GARBAGE = COLORS[0], COLORS[2], COLORS[1], COLORS[6]


def color(row: dict) -> str:
    if row["garbage"]:
        return GARBAGE
    return next((c for start, c in (("resident", RESIDENT), ("peer", PEER)) if row["arm"].startswith(start)), STREAMED)


def bars(rows: list[dict], top: float) -> list[str]:
    longest = max(max(row["rounds_ms"]) for row in rows)
    parts = []
    for index, row in enumerate(rows):
        y = top + ROW * index
        scale = BAR / longest
        low, high = (LEFT + scale * edge(row["rounds_ms"]) for edge in (min, max))
        width = f'width="{scale * row["step_ms"]:.1f}" height="{ROW - 6}"'
        parts += [
            text(LEFT - 8, y + ROW - 8, row["arm"], 11, "end"),
            f'<rect x="{LEFT}" y="{y:.1f}" {width} fill="{color(row)}" opacity="0.75"/>',
            line(low, y + (ROW - 6) / 2, high, y + (ROW - 6) / 2, "#222", 1.2),
            text(LEFT + BAR + 8, y + ROW - 8, f"{row['step_ms']:.1f} ms, {row['tok_s']:.0f} tok/s", 10, "start"),
        ]
    return parts


def legend(y: float) -> list[str]:
    """What the colours are, and the line."""
    kinds = (("resident", RESIDENT), ("streamed", STREAMED), ("soup-cli (peer)", PEER), ("computes nonsense", GARBAGE))
    parts = []
    for index, (name, paint) in enumerate(kinds):
        x = LEFT + 130 * index
        parts += [
            line(x, y - 4, x + 14, y - 4, paint, 8),
            text(x + 20, y, name, 10, "start"),
        ]
    words = "Bars: median of the rounds, scaled to the slowest of a length. Lines: fastest to slowest round."
    return [*parts, text(LEFT, y + 16, words, 10, "start")]


def svg(record: dict) -> str:
    """The whole picture. Raises ValueError for a record without a timed row."""
    parts, y = [], 74.0
    for case in record["cases"]:
        for tokens in sorted({row["tokens"] for row in case["rows"]}):
            rows = [row for row in case["rows"] if row["tokens"] == tokens and "step_ms" in row]
            if not rows:
                continue
            title = f"{case['shape']}, adapters on {case['adapters']}, {tokens} tokens a step"
            parts.append(text(LEFT, y + 12, title, 12, "start"))
            parts += bars(sorted(rows, key=lambda row: row["step_ms"]), y + 22)
            y += 22 + ROW * len(rows) + 14
    if not parts:
        raise ValueError("the record has no timed row")
    title = f"Time of a training step by arm, {record['machine']['device']}"
    return picture(LEFT + BAR + RIGHT + 40, round(y) + 6, title, [*legend(42.0), *parts])


if __name__ == "__main__":
    sys.exit(command(svg, __doc__))
