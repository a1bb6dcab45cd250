"""What the record of h200_stream.py says: its table, and what in it makes it worthless."""

MIB = 1 << 20
COLUMNS = (
    "step_ms",
    "tok_s",
    "ratio_resident",
    "ratio_link",
    "peak_allocated_mib",
    "peak_reserved_mib",
    "spread",
    "clock_mhz",
)
FORMATS = {"step_ms": ".1f", "tok_s": ".0f", "ratio_resident": ".3f", "ratio_link": ".3f", "spread": ".3f"}
MAX_SPREAD = 0.05


def peak(row: dict) -> str:
    found = row.get("peak_allocated_mib")
    return f"{row['arm']} " + (
        "out of memory" if row.get("out_of_memory") else "-" if found is None else f"{found:.0f} MiB"
    )


def exact_line(exact: dict) -> str:
    return ", ".join(f"{label} {cell['equal']}/{cell['compared']}" for label, cell in exact.items())


def times_line(rows: list[dict]) -> str:
    return ", ".join(f"{row['arm']} {row['step_ms']:.1f} ms" for row in rows if "step_ms" in row)


def find(record: dict, arm: str, tokens: int) -> dict:
    return next((row for row in record["rows"] if (row["arm"], row["tokens"]) == (arm, tokens)), {})


def lengths(record: dict) -> list[int]:
    return sorted({row["tokens"] for row in record["rows"]})


def predicted_peak_mib(record: dict, tokens: int) -> float | None:
    """Resident peak - packed base + window x layer."""
    resident = find(record, "resident", tokens).get("peak_allocated_mib")
    memory = record["memory"]
    return None if resident is None else resident + (memory["slot_bytes"] - memory["host_bytes"]) / MIB


def faults(record: dict) -> list[str]:
    """What makes the record worthless, in words; [] when nothing does."""
    found = []
    again = record["exact"]["again"]
    if again["equal"] != again["compared"]:
        found.append(f"no verdict on equality: resident differs from itself, {again['equal']}/{again['compared']}")
    for label, cell in record["exact"].items():
        if cell["zero"] or cell["compared"] < 3 or cell["equal"] != cell["compared"]:
            found.append(f"gradients of {label}: {cell['equal']} of {cell['compared']} equal, {cell['zero']} zero")
    for row in record["rows"]:
        where = f"{row['arm']} at {row['tokens']} tokens"
        if "step_ms" not in row or row["garbage"]:
            continue
        if not row["gradient_norm"] > 0 or row["loss_first"] == row["loss_last"]:
            found.append(f"{where} did not train: gradient norm {row['gradient_norm']}, loss {row['loss_last']}")
        paths = set(row["paths"])
        expected = {"streamed_dequant": {"dequant"}, "resident_bnb": set()}.get(row["arm"])
        if (expected is not None and paths != expected) or (expected is None and paths in (set(), {"dequant"})):
            found.append(f"{where} took the paths {sorted(paths)}")
    return found


def cell(row: dict, column: str) -> str:
    value = row.get(column)
    if value is None:
        return "out of memory" if row.get("out_of_memory") and column == "step_ms" else "-"
    text = format(value, FORMATS.get(column, ".0f"))
    return text + "!" if column == "spread" and value > MAX_SPREAD else text


def markdown(record: dict) -> str:
    machine, memory = record["machine"], record["memory"]
    lines = [
        f"# Streamed LoRA training, {record['shape']} shape, {machine['device']}",
        "",
        f"`{machine['command']}`: {memory['layers']} layers of {memory['layer_bytes'] / MIB:.1f} MiB, "
        f"{memory['slot_bytes'] // memory['layer_bytes']} slots; torch {machine['torch']}, {record['seconds']:.0f} s.",
    ]
    if record["h2d_gb_s"]:
        lines.append(
            f"In the same process: page-locked copies of a layer {record['h2d_gb_s']:.1f} GB/s, bf16 multiply of 8192^3"
            f" at {record['gemm_tflops']:.0f} TFLOP/s."
        )
    lines += [
        "",
        f"Gradients equal to the resident model's, bit for bit: {exact_line(record['exact'])} "
        "(`again`: resident against itself).",
        "",
        "| tokens | arm | " + " | ".join(COLUMNS) + " |",
        "|---|---|" + "---|" * len(COLUMNS),
    ]
    for tokens in lengths(record):
        for row in (row for row in record["rows"] if row["tokens"] == tokens):
            name = row["arm"] + (" (garbage)" if row["garbage"] else "")
            lines.append(f"| {tokens} | {name} | " + " | ".join(cell(row, column) for column in COLUMNS) + " |")
    lines += [
        "",
        *peaks(record),
        "",
        "`!`: rounds spread over 5%, no verdict. Garbage arms compute nonsense: only their time is meant.",
    ]
    return "\n".join(lines) + "\n"


def peaks(record: dict) -> list[str]:
    lines = []
    for tokens in lengths(record):
        predicted = predicted_peak_mib(record, tokens)
        streamed, dequant = (
            find(record, arm, tokens).get("peak_allocated_mib") for arm in ("streamed", "streamed_dequant")
        )
        if None in (predicted, streamed, dequant):
            continue
        layer = record["memory"]["layer_bytes"] / MIB
        lines.append(
            f"* {tokens} tokens: streamed peak {streamed:.0f} MiB, resident - base + slots {predicted:.0f} MiB "
            f"({streamed - predicted:+.0f}); the dequantise arm needs {dequant - streamed:+.0f} MiB "
            f"({(dequant - streamed) / layer:+.2f} layers) more."
        )
    return lines
