"""What the record of h200_stream.py says: its table, and what in it makes it worthless."""

from nybble.gate.training.timing import LARGEST_SPREAD, LEAST_PAIRS

MIB = 1 << 20
SAVINGS = (
    ("no_decode", "streamed_dequant", "dequantisation's share of the dequantise arm"),
    ("no_decode", "streamed", "what is left of it with our multiply"),
    ("no_copies", "streamed", "the copies' share"),
    ("streamed_keep", "streamed", "keep takes off"),
    ("no_copies_keep", "no_copies", "keep takes off without copies"),
    ("peer_nybble", "peer", "our multiply takes off soup-cli's step"),
)
# Of streamed's row: its time by that of another arm. Above 1, streaming with our multiply is the slower one.
RATIOS = {"ratio_dequant": ("streamed_dequant", "the dequantise arm"), "ratio_peer": ("peer", "soup-cli")}
TIME_OF_RESIDENT = "time_of_resident"  # the same beside the resident arm
# What the targets say: streamed's time by the other's, or 1 in the interval; what keep takes off, by length; the rate
# beside the resident model's from this length on; the share of the link where copies are the limit; the peak.
SLOWER, KEEP_SAVES = 1.01, 0.2
RESIDENT_RATE, COMPUTE_BOUND_TOKENS = 0.97, 8192
LINK_SHARE = 0.95
PEAK_SLACK_MIB = 64
KEEP_TARGETS = {512: "keep takes off without copies", 8192: "keep takes off"}
MAX_WIDTH = 0.1
COLUMNS = (
    "rounds",
    "host_ms",
    "step_ms",
    "tok_s",
    "ratio_resident",
    "ratio_link",
    "peak_allocated_mib",
    "peak_reserved_mib",
    "spread",
    "quartiles",
    "clock_mhz",
    "power_w",
    "memory_controller_percent",
)
FORMATS = {
    "step_ms": ".1f",
    "host_ms": ".1f",
    "tok_s": ".0f",
    "ratio_resident": ".3f",
    "ratio_link": ".3f",
    "spread": ".3f",
    "quartiles": ".3f",
}
OWN_NUMERICS = ("streamed_dequant", "peer", "peer_nybble")  # reported, but not held to the resident model's bits
PATHS = {"streamed_dequant": {"dequant"}, "resident_bnb": set(), "peer": set()}


def peak(row: dict) -> str:
    found = row.get("peak_allocated_mib")
    return f"{row['arm']} " + (
        "out of memory" if row.get("out_of_memory") else "-" if found is None else f"{found:.0f} MiB"
    )


def exact_line(exact: dict) -> str:
    return ", ".join(f"{label} {cell['equal']}/{cell['compared']}" for label, cell in exact.items())


def times_line(rows: list[dict]) -> str:
    return ", ".join(f"{row['arm']} {row['step_ms']:.1f} ms" for row in rows if "step_ms" in row)


def stack_line(stack: list[dict]) -> str:
    rows = [
        f"{row['tokens']} tokens {row['step_ms']:.1f} ms a step ({row['no_copies_ms']:.1f} without copies)"
        + (f", {row['ratio_link']:.3f} of the link" if row["ratio_link"] else "")
        for row in stack
    ]
    return "the multiplies alone: " + "; ".join(rows)


def find(case: dict, arm: str, tokens: int) -> dict:
    return next((row for row in case["rows"] if (row["arm"], row["tokens"]) == (arm, tokens)), {})


def lengths(case: dict) -> list[int]:
    return sorted({row["tokens"] for row in case["rows"]})


def predicted_peak_mib(case: dict, tokens: int) -> float | None:
    """Resident peak - packed base + window x layer."""
    resident = find(case, "resident", tokens).get("peak_allocated_mib")
    memory = case["memory"]
    return None if resident is None else resident + (memory["slot_bytes"] - memory["host_bytes"]) / MIB


def faults(record: dict) -> list[str]:
    """What makes the record worthless, in words; [] when nothing does."""
    return [f"{case['shape']}, {text}" for case in record["cases"] for text in faults_of(case)]


def faults_of(case: dict) -> list[str]:
    found = []
    again = case["exact"]["again"]
    if again["equal"] != again["compared"]:
        found.append(f"no verdict on equality: resident differs from itself, {again['equal']}/{again['compared']}")
    for label, cell in case["exact"].items():
        if label in OWN_NUMERICS:
            continue
        if cell["zero"] or cell["compared"] < 3 or cell["equal"] != cell["compared"]:
            found.append(f"gradients of {label}: {cell['equal']} of {cell['compared']} equal, {cell['zero']} zero")
    for row in case["rows"]:
        where = f"{row['arm']} at {row['tokens']} tokens"
        if "step_ms" not in row or row["garbage"]:
            continue
        if len(row["rounds_ms"]) < 3:
            found.append(f"no verdict on {where}: {len(row['rounds_ms'])} rounds")
        elif not row["gradient_norm"] > 0 or row["loss_first"] == row["loss_last"]:
            found.append(f"{where} did not train: gradient norm {row['gradient_norm']}, loss {row['loss_last']}")
        elif row.get("adapters_moved") == 0:
            found.append(f"{where} did not train: no adapter changed")
        paths = set(row["paths"])
        expected = PATHS.get(row["arm"])
        if (expected is not None and paths != expected) or (expected is None and paths in (set(), {"dequant"})):
            found.append(f"{where} took the paths {sorted(paths)}")
    return found


def cell_text(row: dict, column: str) -> str:
    value = row.get(column)
    if column == "rounds":
        return str(len(row.get("rounds_ms", [])))
    if value is None:
        return "out of memory" if row.get("out_of_memory") and column == "step_ms" else "-"
    text = format(value, FORMATS.get(column, ".0f"))
    return text + "!" if column == "spread" and value > LARGEST_SPREAD else text


def markdown(record: dict) -> str:
    machine = record["machine"]
    lines = [
        f"# Streamed LoRA training, {machine['device']}",
        "",
        f"`{machine['command']}`; torch {machine['torch']}{driver_of(machine)}, {record['seconds']:.0f} s. What the "
        "columns mean: "
        "`benchmarks/harness/h200_stream.py`.",
    ]
    for case in record["cases"]:
        lines += ["", *case_lines(case, machine)]
    closing = [f"* Fault: {text}." for text in faults(record)]
    closing.append(
        f"\n`!`: rounds spread over {LARGEST_SPREAD:.0%}; then only the pairs of one round, whose intervals are given, "
        f"say something. Not slower: at most {SLOWER} of the time, or 1 in the interval. "
        "Garbage arms compute nonsense: only their time is meant."
    )
    return "\n".join([*lines, "", *closing]) + "\n"


def driver_of(machine: dict) -> str:
    return f", driver {machine['driver']}, power limit {machine['power_limit']}" if "power_limit" in machine else ""


def trained(case: dict) -> list[str]:
    """Proof that what was timed is training; faults() has what is none."""
    rows = [row for row in case["rows"] if "step_ms" in row and not row["garbage"]]
    if not rows:
        return []
    norms, moved = [row["gradient_norm"] for row in rows], sum(row["adapters_moved"] for row in rows)
    changes = [row["loss_last"] - row["loss_first"] for row in rows]
    rounds = sum(len(row["rounds_ms"]) for row in rows)
    return [
        f"* Every timed arm trained: gradient norms {min(norms):.3g} to {max(norms):.3g}, adapters changed in "
        f"{moved} of {rounds} rounds, loss of the last round less the first's "
        f"{min(changes):+.3f} to {max(changes):+.3f}."
    ]


def made_by(case: dict, machine: dict) -> list[str]:
    """What made a case of a merged record, where it is not what the head names."""
    if "command" not in case:
        return []
    if case["command"] == machine["command"]:
        return [f"Commit {case['commit']}.", ""]
    return [f"`{case['command']}`, commit {case['commit']}.", ""]


def case_lines(case: dict, machine: dict) -> list[str]:
    memory = case["memory"]
    lines = [
        f"## {case['shape']} shape, adapters on {case['adapters']}",
        "",
        *made_by(case, machine),
        f"{memory['layers']} layers of {memory['layer_bytes'] / MIB:.1f} MiB, "
        f"{memory['slot_bytes'] // memory['layer_bytes']} slots.",
    ]
    if case["h2d_gb_s"]:
        lines[-1] += (
            f" In the same process: page-locked copies of a layer at {case['h2d_gb_s']:.1f} GB/s"
            + (f", pageable ones at {case['pageable_gb_s']:.1f}" if "pageable_gb_s" in case else "")
            + f", a bf16 multiply of "
            f"8192^3 at {case['gemm_tflops']:.0f} TFLOP/s."
        )
    lines += [
        "",
        f"Loss and gradients equal to the resident model's, bit for bit: {exact_line(case['exact'])} "
        "(`again`: resident against itself; `streamed_dequant` has numerics of its own).",
        "",
        "| tokens | arm | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for row in sorted(case["rows"], key=lambda row: row["tokens"]):
        name = row["arm"] + (" (garbage)" if row["garbage"] else "")
        cells = [cell_text(row, column) for column in COLUMNS]
        lines.append(f"| {row['tokens']} | {name} | " + " | ".join(cells) + " |")
    stack = [f"* {stack_line(case['stack'])}"] if case["stack"] else []
    peer = [f"* soup-cli's arms did not run: {case['no_peer']}."] if "no_peer" in case else []
    peer += [f"* Gradients of {arm} were not compared: {why}" for arm, why in case.get("not_compared", {}).items()]
    return [*lines, "", *trained(case), *stack, *peaks(case), *times(case), *verdicts(case), *peer]


def judge(name: str, at: str, found: list[float], limit: float, holds: bool) -> str:
    """An interval wider than MAX_WIDTH with the limit in it says nothing."""
    middle, low, high = found
    vague = low < limit < high and high - low > MAX_WIDTH
    word = "no verdict, the interval is too wide" if vague else "holds" if holds else "MISSED"
    return f"* {name}, {at}: {middle:.3f} ({low:.3f} .. {high:.3f}), {word}."


def verdicts(case: dict) -> list[str]:
    """The targets that pairs of one round decide."""
    lines = []
    for tokens in lengths(case):
        row, at = find(case, "streamed", tokens), f"{tokens} tokens"
        for key, (_, name) in RATIOS.items():
            if key in row and len(row["rounds_ms"]) >= LEAST_PAIRS:
                middle, low, high = row[key]
                lines.append(judge(f"Not slower than {name}", at, row[key], 1, middle <= SLOWER or low <= 1 <= high))
        if TIME_OF_RESIDENT in row and tokens >= COMPUTE_BOUND_TOKENS and len(row["rounds_ms"]) >= LEAST_PAIRS:
            rate = [1 / ratio for ratio in (row[TIME_OF_RESIDENT][i] for i in (0, 2, 1))]
            lines.append(
                judge(f"{RESIDENT_RATE} of the resident rate", at, rate, RESIDENT_RATE, rate[0] >= RESIDENT_RATE)
            )
        lines += [*link_verdict(case, tokens, at), *peak_verdict(case, tokens, at)]
        keep = case.get("savings", {}).get(str(tokens), {}).get(KEEP_TARGETS.get(tokens))
        if keep is not None and len(row["rounds_ms"]) >= LEAST_PAIRS:
            name = f"{KEEP_TARGETS[tokens].capitalize()} 20% or more"
            lines.append(judge(name, at, keep, KEEP_SAVES, keep[0] >= KEEP_SAVES))
    return lines


def link_verdict(case: dict, tokens: int, at: str) -> list[str]:
    """Where a step's bytes at the copy rate take longer than the step without copies."""
    row, free = find(case, "streamed", tokens), find(case, "no_copies", tokens)
    if not row.get("ratio_link") or "step_ms" not in free or len(row["rounds_ms"]) < LEAST_PAIRS:
        return []
    copies_ms = row["ratio_link"] * row["step_ms"]
    if copies_ms <= free["step_ms"]:
        return []
    word = "holds" if row["ratio_link"] >= LINK_SHARE else "MISSED"
    bound = f"copies {copies_ms:.0f} ms, a step without them {free['step_ms']:.0f} ms"
    return [f"* {LINK_SHARE} of the link, {at} ({bound}): {row['ratio_link']:.3f}, {word}."]


def peak_verdict(case: dict, tokens: int, at: str) -> list[str]:
    ours, predicted = find(case, "streamed", tokens).get("peak_allocated_mib"), predicted_peak_mib(case, tokens)
    if ours is None or predicted is None:
        return []
    word = "holds" if ours <= predicted + PEAK_SLACK_MIB else "MISSED"
    return [
        f"* Peak at most resident - base + slots + {PEAK_SLACK_MIB} MiB, {at}: {ours - predicted:+.0f} MiB, {word}."
    ]


def times(case: dict) -> list[str]:
    """Beside the dequantise arm and soup-cli, and what each ablation takes off."""
    lines = []
    for tokens in lengths(case):
        row = find(case, "streamed", tokens)
        found = [
            f"{row[key][0]:.3f} ({row[key][1]:.3f} .. {row[key][2]:.3f}) of the time of {name}"
            for key, (_, name) in RATIOS.items()
            if key in row
        ]
        for less, more, text in SAVINGS:
            pair = [find(case, arm, tokens) for arm in (less, more)]
            if (saved := case.get("savings", {}).get(str(tokens), {}).get(text)) is not None:
                found.append("{} {:+.1%} ({:+.1%} .. {:+.1%})".format(text, *saved))
            elif all("step_ms" in row for row in pair):
                mark = "!" if max(row["spread"] for row in pair) > LARGEST_SPREAD else ""
                found.append(f"{text} {1 - pair[0]['step_ms'] / pair[1]['step_ms']:+.1%}{mark}")
        if found:
            lines.append(f"* {tokens} tokens, streamed: " + "; ".join(found) + ".")
    return lines


def peaks(case: dict) -> list[str]:
    lines = []
    for tokens in lengths(case):
        predicted = predicted_peak_mib(case, tokens)
        ours = find(case, "streamed", tokens).get("peak_allocated_mib")
        dequant = find(case, "streamed_dequant", tokens).get("peak_allocated_mib")
        if None in (predicted, ours, dequant):
            continue
        layers = (dequant - ours) / (case["memory"]["layer_bytes"] / MIB)
        lines.append(
            f"* {tokens} tokens: streamed peak {ours:.0f} MiB, resident - base + slots {predicted:.0f} MiB "
            f"({ours - predicted:+.0f}); the dequantise arm {dequant - ours:+.0f} MiB ({layers:+.2f} layers)."
        )
        auto = find(case, "streamed_auto", tokens)
        if "layers_that_keep" in auto and "peak_reserved_mib" in auto:
            lines.append(
                f"* {tokens} tokens, auto under a limit of {auto['limit_mib']:.0f} MiB: {auto['layers_that_keep']} of "
                f"{case['memory']['layers']} layers keep, {auto['peak_reserved_mib']:.0f} MiB reserved."
            )
    return lines
