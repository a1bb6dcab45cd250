"""What the portable path must reach on the H200, and the verdict on a record of portable_time.py. Needs no GPU and no
torch.

Judged is `auto`: the row kernel up to 8 tokens, the portable kernel as plan_portable() plans it beyond; beside it the
faster of the dense skeleton's two ways to share out the same tiles.
"""

import statistics

import portable_model as model

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (27648, 5120))
LARGE_TOKENS = (512, 1024, 2048)
SMALL_TOKENS = (1, 4, 8, 16, 64, 128, 256)
ROW_TOKENS = 8  # up to here not slower than bitsandbytes, beyond faster
DIRECTIONS = ("forward", "grad_x")
MEANS = {  # name -> arm, skeletons, most that the geometric mean of arm / faster skeleton over both directions may be
    "fused / own dense skeleton": ("auto", ("d256", "d256c"), 1.20),
    "the same, every mma issued five times": ("autox5", ("d256x5", "d256cx5"), 1.05),
}
SEPARATE = ("s256x5", "s256cx5")  # dequantise + dense skeleton, every mma issued five times
ERROR_MOST = 0.01  # norm of the difference to cuBLAS / norm


def where(cell):
    return f"{cell['n']}x{cell['k']} M{cell['m']} {DIRECTIONS[cell['direction']]}"


def ratio(cell, arm, others):
    """Time of arm / time of the fastest of others; None where one was not measured."""
    us = cell["us"]
    if arm not in us or not all(name in us for name in others):
        return None
    return us[arm] / min(us[name] for name in others)


def mean(ratios):
    return statistics.geometric_mean(ratios) if ratios else None


def within(value, most):
    """A rounding of the mean's last digits decides nothing; 1.0503 is above 1.05."""
    return value <= most * (1 + 1e-9)


def means(cells):
    """name -> most, the mean over both directions, that of each, and the number of cells."""
    result = {}
    for name, (arm, skeletons, most) in MEANS.items():
        ratios = ([], [])
        for cell in cells:
            value = ratio(cell, arm, skeletons) if cell["m"] in LARGE_TOKENS else None
            if value is not None:
                ratios[cell["direction"]].append(value)
        result[name] = dict(most=most, both=mean(ratios[0] + ratios[1]), cells=len(ratios[0] + ratios[1]))
        result[name].update((direction, mean(values)) for direction, values in zip(DIRECTIONS, ratios, strict=True))
    return result


def model_checks(cells):
    """What the model predicts for autox5 / (dequantise + dense) beside what was measured, a row a cell."""

    def share(cell):
        return ratio(cell, "dq", MEANS["the same, every mma issued five times"][1])

    large = [cell for cell in cells if cell["m"] in LARGE_TOKENS]
    return model.checks(large, lambda cell: ratio(cell, "autox5", SEPARATE), share)


def small_misses(cell):
    """Against bitsandbytes, up to 256 tokens."""
    value = ratio(cell, "auto", ("bnb",))
    if value is None:
        return [f"{where(cell)}: bitsandbytes not measured"]
    if cell["m"] <= ROW_TOKENS:
        return [] if value <= 1 else [f"{where(cell)}: {value:.4f} of bitsandbytes, must not be slower"]
    return [] if value < 1 else [f"{where(cell)}: {value:.4f} of bitsandbytes, must be faster"]


def cell_misses(cell):
    path = cell["plans"]["auto"].split()[0]
    allowed = ("row", "portable") if cell["m"] <= ROW_TOKENS else ("portable",)
    texts = [] if path in allowed else [f"{where(cell)}: the plan took {path}, expected {' or '.join(allowed)}"]
    error = cell.get("error", float("nan"))
    if not error <= ERROR_MOST:
        texts.append(f"{where(cell)}: result differs from dense by {error:.2e} (norm)")
    if cell["m"] in SMALL_TOKENS:
        return texts + small_misses(cell)
    needed = {name: ratio(cell, arm, skeletons) for name, (arm, skeletons, _) in MEANS.items()}
    needed["fused / (dequantise + dense), every mma issued five times"] = ratio(cell, "autox5", SEPARATE)
    if cell["m"] in LARGE_TOKENS:
        texts += [f"{where(cell)}: {name} not measured" for name, value in needed.items() if value is None]
    return texts


def wanted():
    """(n, k, m, direction) of every cell of a record; of a shape, the tokens of the means first."""
    order = LARGE_TOKENS + SMALL_TOKENS
    return [(n, k, m, direction) for n, k in SHAPES for m in order for direction in range(len(DIRECTIONS))]


def misses(cells):
    """One text for each target that does not hold or was not measured."""
    texts = []
    for name, values in means(cells).items():
        if values["both"] is None:
            texts.append(f"{name}: not measured")
        elif not within(values["both"], values["most"]):
            texts.append(f"{name}: {values['both']:.4f}, at most {values['most']:.2f}")
    measured = {(cell["n"], cell["k"], cell["m"], cell["direction"]) for cell in cells}
    for n, k, m, direction in wanted():
        if (n, k, m, direction) not in measured:
            texts.append(f"{where(dict(n=n, k=k, m=m, direction=direction))}: not measured")
    for row in model_checks(cells):
        if not row["within"]:
            text = f"{row['measured']:.4f} measured, the model predicts {row['predicted']:.4f}, {row['off']:+.1%}"
            texts.append(f"{where(row)}: {text}, at most {model.MOST_OFF:.0%} off")
    return texts + [text for cell in cells for text in cell_misses(cell)]


def verdict(record):
    """What goes into the record beside its cells."""
    cells = record["result"]["cells"]
    return dict(means=means(cells), model=model_checks(cells), missed=misses(cells))


def model_lines(rows):
    if not rows:
        return []
    texts = ["fused / (dequantise + dense), every mma issued five times: the model, then measured"]
    for row in rows:
        texts.append(
            f"  {where(row)}: predicted {row['predicted']:.4f}, measured {row['measured']:.4f}, {row['off']:+.1%}, "
            + ("within" if row["within"] else "NOT within")
            + f" {model.MOST_OFF:.0%} (dequantise / dense: predicted {row['share_predicted']:.3f}"
            + (")" if row["share_measured"] is None else f", measured {row['share_measured']:.3f})")
        )
    worst = max(rows, key=lambda row: abs(row["off"]))
    inside = sum(row["within"] for row in rows)
    texts.append(
        f"the model: {inside} of {len(rows)} cells within {model.MOST_OFF:.0%}, the farthest {worst['off']:+.1%}"
    )
    return texts


def lines(verdict):
    """For people: four digits, since 1.0503 misses 1.05."""
    texts = []
    for name, values in verdict["means"].items():
        if values["both"] is None:
            continue
        sides = ", ".join(f"{d} {values[d]:.4f}" for d in DIRECTIONS if values[d] is not None)
        texts.append(
            f"{name}, M >= 512: {values['both']:.4f} (at most {values['most']:.2f}; {sides}), "
            f"geometric mean of {values['cells']} cells"
        )
    texts += model_lines(verdict["model"])
    texts.append(f"{len(verdict['missed'])} targets missed or not measured")
    return texts + [f"  {text}" for text in verdict["missed"]]
