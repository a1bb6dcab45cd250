"""What the GPU multiply must reach, and the verdict on a record of h200_linear.py. Needs no GPU and no torch."""

import math
import statistics

# Most that the plan of `auto` may take, in times of dense cuBLAS, by tokens M. LARGE: weights of at least 4096 x 14336.
TOKENS = (1, 4, 8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LARGE = dict(zip(TOKENS, (0.80, 0.80, 0.80, 0.80, 0.95, 1.15, 1.20, 1.15, 1.10, 1.05, 1.04, 1.03, 1.03), strict=True))
SMALL = dict(zip(TOKENS, (0.95, 0.95, 0.95, 0.95, 1.35, 1.50, 1.40, 1.30, 1.10, 1.07, 1.05, 1.04, 1.04), strict=True))
GOAL = dict(zip(TOKENS, (0.50, 0.50, 0.50, 0.50, 0.70, 0.90, 1.00, 1.02, 1.00, 1.00, 0.99, 0.99, 0.99), strict=True))
BETWEEN = (96, 160, 192, 320, 384, 640, 768, 1280)  # no target of their own: here the tiles of 512 are filled in part
LARGE_WEIGHT = 4096 * 14336
FASTER = 0.97  # a path that takes less of auto's time is named
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (27648, 5120), (5120, 27648), (28672, 8192), (1024, 4096))
REPORTED_ONLY = {(1024, 4096): 2048}  # has no must below so many tokens
DIRECTIONS = ("forward", "grad_x")


def must_of(n, k, m):
    """The largest allowed ratio to dense, or None where the ratio is only reported."""
    if m < REPORTED_ONLY.get((n, k), 0):
        return None
    return (LARGE if n * k >= LARGE_WEIGHT else SMALL).get(m)


def between(n, k, m):
    """The must of a number of tokens that the table leaves out: on the line between its neighbours, over log M."""
    low, high = max(t for t in TOKENS if t <= m), min(t for t in TOKENS if t >= m)
    ends = must_of(n, k, low), must_of(n, k, high)
    if low == high or None in ends:
        return ends[0]
    part = math.log(m / low) / math.log(high / low)
    return ends[0] + (ends[1] - ends[0]) * part


def cells(tokens=None):
    """Every (m, n, k, direction) that is measured, few tokens first."""
    return [(m, n, k, direction) for m in tokens or columns() for n, k in SHAPES for direction in DIRECTIONS]


def columns(record=None):
    """The numbers of tokens of a record; of the whole table without one."""
    return sorted((record or {}).get("tokens", TOKENS + BETWEEN))


def name(record):
    """Of a record's files."""
    return "h200-linear-plain" if record.get("scales") == "plain" else "h200-linear"


def auto_rows(record):
    return [row for row in record["rows"] if row["auto"]]


def where(row):
    return f"{row['n']}x{row['k']} M{row['m']} {row['direction']}"


def misses(record):
    """One text per must that does not hold: too slow against dense, slower than bitsandbytes beyond the spread, wrong
    result, or not measured.
    """
    texts, seen = [], set()
    for row in auto_rows(record):
        seen.add((row["m"], row["n"], row["k"], row["direction"]))
        must = must_of(row["n"], row["k"], row["m"])
        if must is not None and not row["ratio_dense"] <= must:
            texts.append(f"{where(row)} ({row['path']}): {row['ratio_dense']:.3f} of dense, must {must:.2f}")
        noise = max(row["spread"], row["bnb_spread"] or 0.0)
        if row["ratio_bnb"] is not None and not row["ratio_bnb"] <= 1 + noise:
            texts.append(f"{where(row)} ({row['path']}): {row['ratio_bnb']:.3f} of bitsandbytes, spread {noise:.3f}")
    for row in record["rows"]:
        for what, error in (("result", row["error"]), ("batch-invariant result", row.get("invariant_error", 0.0))):
            if not error <= 0.01:
                texts.append(f"{where(row)} ({row['path']}): {what} differs from dense by {error:.2e} (norm)")
    needed = cells(columns(record) if record.get("scales") == "plain" else columns())
    missing = [cell for cell in needed if cell not in seen and cell[0] in TOKENS]
    texts += [f"{n}x{k} M{m} {direction}: not measured" for m, n, k, direction in missing]
    return texts


def geometric_means(record):
    """m -> geometric mean of ratio_dense over the shapes that have a must there, both directions."""
    ratios = {}
    for row in auto_rows(record):
        if must_of(row["n"], row["k"], row["m"]) is not None:
            ratios.setdefault(row["m"], []).append(row["ratio_dense"])
    return {m: statistics.geometric_mean(values) for m, values in sorted(ratios.items())}


def invariance_costs(record):
    """m -> what batch_invariant=True takes in times of auto, of every cell where that is known: it was timed, or auto's
    plan is its own, on the Hopper path, which it always takes.
    """
    costs = {}
    for row in auto_rows(record):
        if "invariant_us" in row or row["path"] == "hopper":
            costs.setdefault(row["m"], []).append(row.get("invariant_us", row["fused_us"]) / row["fused_us"])
    return dict(sorted(costs.items()))


def invariance_lines(record):
    costs = invariance_costs(record)
    lines = ["", "Time with `batch_invariant=True` / time of `auto`, and of how many cells that is known:", ""]
    lines += ["| | " + " | ".join(f"M {m}" for m in costs) + " |", "|---" * (len(costs) + 1) + "|"]
    lines += ["| geometric mean | " + " | ".join(f"{statistics.geometric_mean(v):.2f}" for v in costs.values()) + " |"]
    lines += ["| largest | " + " | ".join(f"{max(v):.2f}" for v in costs.values()) + " |"]
    return lines + ["| cells | " + " | ".join(str(len(v)) for v in costs.values()) + " |"]


def path_costs(record):
    """path -> m -> what a path that `auto` does not take there takes in times of auto, of every cell where it ran."""
    autos = {(row["m"], row["n"], row["k"], row["direction"]): row for row in auto_rows(record)}
    costs = {}
    for row in record["rows"]:
        if not row["auto"]:
            auto = autos[row["m"], row["n"], row["k"], row["direction"]]
            cost = row["fused_us"] / auto["fused_us"]
            costs.setdefault(row["path"], {}).setdefault(row["m"], []).append((cost, row))
    return costs


def path_lines(record):
    costs = path_costs(record)
    tokens = sorted({m for by_m in costs.values() for m in by_m})
    lines = ["", "Time of paths that `auto` does not take / time of `auto`, geometric mean, in brackets the least:", ""]
    lines += ["| path | " + " | ".join(f"M {m}" for m in tokens) + " |", "|---" * (len(tokens) + 1) + "|"]
    for path, by_m in sorted(costs.items()):
        texts = []
        for m in tokens:
            values = [cost for cost, _ in by_m.get(m, [])]
            texts.append(f"{statistics.geometric_mean(values):.2f} ({min(values):.2f})" if values else "-")
        lines.append(f"| {path} | " + " | ".join(texts) + " |")
    faster = sorted((cost, where(row), path) for path, by_m in costs.items() for v in by_m.values() for cost, row in v)
    texts = [f"{what} {path} {cost:.2f}" for cost, what, path in faster if cost < FASTER]
    return lines + ["", f"Below {FASTER} of `auto`: " + (", ".join(texts) or "none") + "."]


def warm_lines(record):
    """4096 x 4096 with one weight, which stays in L2."""
    rows = [row for row in auto_rows(record) if "warm_fused_us" in row]
    tokens = sorted({row["m"] for row in rows})
    lines = ["", "The same with one weight of 4096 x 4096 that stays in L2, both arms:", ""]
    lines += ["| | " + " | ".join(f"M {m}" for m in tokens) + " |", "|---" * (len(tokens) + 1) + "|"]
    for direction in DIRECTIONS:
        ratio = {r["m"]: r["warm_fused_us"] / r["warm_dense_us"] for r in rows if r["direction"] == direction}
        lines.append(f"| {direction} | " + " | ".join(f"{ratio[m]:.2f}" for m in tokens) + " |")
    return lines


def mark(row):
    """! above the must; ? above the line between the musts of the neighbours, where the table has none."""
    must = between(row["n"], row["k"], row["m"])
    if must is None or row["ratio_dense"] <= must:
        return ""
    return "?" if row["m"] in BETWEEN else "!"


def markdown(record):
    """A table: one line per shape and direction, one column per M: ratio to dense, ! where the must is missed."""
    lines = [f"# 4-bit multiply, {record['device']}", "", record["protocol"], ""]
    lines += [f"torch {record['torch']}, bitsandbytes {record['bitsandbytes']}, {record['seconds']:.0f} s.", ""]
    scales = record.get("scales", "nested")
    lines += [f"Time of `auto` / time of dense cuBLAS (bf16, {scales} NF4, block 64). `!`: above the must."]
    lines += ["`?`: above the line between the musts of the neighbouring M (over log M), where the table has none.", ""]
    tokens = columns(record)
    lines += ["| N x K | direction | " + " | ".join(f"M {m}" for m in tokens) + " |", "|---" * (len(tokens) + 2) + "|"]
    by_cell = {(r["m"], r["n"], r["k"], r["direction"]): r for r in auto_rows(record)}
    for n, k in SHAPES:
        for direction in DIRECTIONS:
            texts = []
            for m in tokens:
                row = by_cell.get((m, n, k, direction))
                texts.append("-" if row is None else f"{row['ratio_dense']:.2f}{mark(row)} {row['path'][0]}")
            lines.append(f"| {n} x {k} | {direction} | " + " | ".join(texts) + " |")
    means = geometric_means(record)
    lines.append("| geometric mean | | " + " | ".join(f"{means[m]:.3f}" if m in means else "-" for m in tokens) + " |")
    lines.append("| goal | | " + " | ".join(f"{GOAL[m]:.2f}" if m in GOAL else "-" for m in tokens) + " |")
    if any("warm_fused_us" in row for row in record["rows"]):
        lines += warm_lines(record)
    if record.get("invariant"):
        lines += invariance_lines(record)
    if record.get("paths"):
        lines += path_lines(record)
    lines += [
        "",
        "Letter: path, h hopper, s small_m, p portable, r row, d dequant. Medians, spreads, clocks: the JSON beside.",
        "",
        f"![time of auto / time of dense over tokens]({name(record)}.svg)",
        "",
    ]
    return "\n".join(lines)
