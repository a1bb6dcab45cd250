"""Verdict and tables of the record "resident step, patched against unpatched". Needs no GPU and no torch."""

import pathlib
import subprocess

SLOWER = 1.01
NOT_SLOWER = "at no size shown to be slower than bitsandbytes"
LOSS_TOLERANCE = 0.02  # bf16 logits of a random model; two summation orders over 32 layers
NOISE_TOLERANCE = 1.25  # times the difference that a third summation order makes
SPREAD = 0.05


def commit() -> str:
    """The commit of this checkout, "+" where files differ from it; "unknown" without git."""
    folder = pathlib.Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        clean = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=folder).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name if clean else name + "+"


def faults(record) -> list[str]:
    """Everything that makes the record a failure, in words; empty when it holds."""
    found = [] if record["rows"] else ["no size was measured"]
    noise = max((row.get("gradient_noise", 0) for row in record["rows"]), default=0)
    if record["rows"] and not noise > 0:
        found.append("no size has the third summation order to compare gradients with")
    for row in record["rows"]:
        where = f"{row['tokens']} tokens"
        ours, theirs = row["nybble"], row["bitsandbytes"]
        low, high = row["interval"]
        if row["ratio"] > SLOWER and not low <= 1 <= high:
            found.append(f"{where}: slower, ratio {row['ratio']:.3f} [{low:.3f}, {high:.3f}]")
        if not row["loss_difference"] <= LOSS_TOLERANCE:
            found.append(f"{where}: losses differ by {row['loss_difference']:.2e}, at most {LOSS_TOLERANCE}")
        limit = NOISE_TOLERANCE * row.get("gradient_noise", noise)
        if not row["gradient_difference"] <= limit:
            found.append(f"{where}: gradients differ by {row['gradient_difference']:.2e}, at most {limit:.2e}")
        if row["compared"] == 0:
            found.append(f"{where}: no gradient was compared")
        for arm, values in (("nybble", ours), ("bitsandbytes", theirs)):
            if not values["gradient_norm"] > 0 or values["nonzero"] != row["compared"]:
                found.append(f"{where}: {arm}: {values['nonzero']} of {row['compared']} gradients are not zero")
            if values["adapters_changed"] != row["compared"]:
                found.append(f"{where}: {arm}: {values['adapters_changed']} of {row['compared']} adapters changed")
        if not ours["launches"] or theirs["launches"]:
            found.append(f"{where}: launches of nybble: {ours['launches']} patched, {theirs['launches']} unpatched")
        if not row["losses"][1] < row["losses"][0]:
            found.append(f"{where}: the loss did not fall: {row['losses'][0]:.4f} to {row['losses'][1]:.4f}")
    return found


def line(row) -> str:
    low, high = row["interval"]
    ms = {arm: 1000 * seconds for arm, seconds in row["seconds"].items()}
    return (
        f"{row['tokens']:5} tokens: {ms['bitsandbytes']:8.1f} -> {ms['nybble']:8.1f} ms, ratio {row['ratio']:.3f} "
        f"[{low:.3f}, {high:.3f}], A/A {row['control']:.3f}, {row['rounds']} rounds, loss diff "
        f"{row['loss_difference']:.1e}, gradients {row['gradient_difference']:.1e} (sums reversed {noise_text(row)}), "
        f"{row['nybble']['launches']}"
    )


def noise_text(row) -> str:
    return f"{row['gradient_noise']:.1e}" if "gradient_noise" in row else "not run"


def markdown(record) -> str:
    """The record as a page; what needs judgement is added by hand below it."""
    rows, layers = record["rows"], record["layers"]
    lines = [
        f"# Resident step, patched against unpatched, {record['device']}",
        "",
        f"One LoRA training step of a Llama-8B-shaped model, {layers} layers, base resident in NF4 with nested scales "
        f"(random weights), rank {record['rank']} on all seven",
        "linears, everything else bf16, non-reentrant checkpointing, batch 1, forward + backward + gradient norm + "
        "AdamW. One model, one process; arms interleaved",
        "(bitsandbytes, nybble, bitsandbytes again), order rotating. Ratio: geometric mean over rounds of nybble / "
        "bitsandbytes, 95% bootstrap interval.",
        "",
        "| tokens | bitsandbytes ms | nybble ms | ratio | interval | A/A control | rounds | peak allocated GB, "
        "bitsandbytes / nybble | reserved GB | SM MHz | W |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["interval"]
        first, last = row["control_interval"]
        memory = [
            " / ".join(f"{row[arm].get(key, 0) / 1e9:.2f}" for arm in ("bitsandbytes", "nybble"))
            for key in ("allocated_bytes", "reserved_bytes")
        ]
        noisy = "" if max(row["spread"].values()) <= SPREAD else " ~"
        lines.append(
            f"| {row['tokens']} | {1000 * row['seconds']['bitsandbytes']:.1f} | {1000 * row['seconds']['nybble']:.1f}"
            f"{noisy} | {row['ratio']:.3f} | {low:.3f} to {high:.3f} | {row['control']:.3f} ({first:.3f} to "
            f"{last:.3f}) | {row['rounds']} | {memory[0]} | {memory[1]} | "
            f"{row.get('clock_mhz')} | {row.get('power_w')} |"
        )
    lines += [
        "",
        f"`~`: the times of an arm spread over {SPREAD:.0%} between rounds.",
        "",
        "| tokens | loss, bitsandbytes / nybble | gradients apart (relative) | dense weights, sums reversed | "
        "gradient norm | launches of nybble | run |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours, theirs = row["nybble"], row["bitsandbytes"]
        paths = ", ".join(f"{path} {count}" for path, count in ours["launches"].items())
        lines.append(
            f"| {row['tokens']} | {theirs['loss']:.5f} / {ours['loss']:.5f} | {row['gradient_difference']:.1e} | "
            f"{noise_text(row)} | {theirs['gradient_norm']:.4g} / {ours['gradient_norm']:.4g} | {paths} | "
            f"{row['run']} |"
        )
    found = faults(record)
    lines += [
        "",
        "Verdict: " + ("; ".join(found) if found else NOT_SLOWER + "; everything trained") + ".",
        "",
        *(
            f"Run {index}: commit {run['commit']}, torch {run['torch']}, transformers {run['transformers']}, PEFT "
            f"{run['peft']}, bitsandbytes {run['bitsandbytes']}, {run['seconds']:.0f} s. "
            f"`{run['command']}`{'. ' + run['note'] if 'note' in run else ''}\n"
            for index, run in enumerate(record["runs"])
        ),
    ]
    return "\n".join(lines)
