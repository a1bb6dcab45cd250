"""The pages of gpu_stress.py and gpu_sanitize.py: where a run was made, and its tables in Markdown."""

import json
import os
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]


def first_line(*command):
    """Of what a program prints; "unknown" where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def provenance():
    """Commit ($NYBBLE_COMMIT where there is no git) and whether there are changes on top, card, driver, toolkit."""
    given = os.environ.get("NYBBLE_COMMIT")
    commit = given or first_line("git", "describe", "--always", "--exclude", "*", "--dirty")
    fields = "--query-gpu=name,driver_version,power.limit"
    card, driver, power = (*first_line("nvidia-smi", fields, "--format=csv,noheader").split(", "), "", "")[:3]
    nvcc = shutil.which("nvcc")
    toolkit = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout if nvcc else ""
    return {
        "commit": commit.removesuffix("-dirty"),
        "dirty": None if given or commit == "unknown" else commit.endswith("-dirty"),
        "gpu": card,
        "driver": driver or "unknown",
        "power_limit": power or "unknown",
        "cuda": next((word[1:] for word in toolkit.split() if word.startswith("V")), "unknown"),
    }


def write(path, data, page):
    """PATH.json and PATH.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(data, path.stem))


def heading(data, title, name):
    return [
        f"# {title} on an {data['gpu']}",
        "",
        f"{data['question']} As data: [{name}.json]({name}.json).",
        "",
        f"    {data['command']}",
        "",
        f"Commit {data['commit']}{' with uncommitted changes' if data['dirty'] else ''}; driver {data['driver']}, "
        f"power limit {data['power_limit']}, CUDA {data['cuda']}, {data['cores']} CPU cores; {data['seconds']:.0f} s.",
        "",
    ]


def stress_page(data, name):
    """Arms without a fault, then fault x kernels."""
    lines = heading(data, "Stress test of the GPU multiply", name)
    lines += ["| without a fault | s | verdict |", "|---|---|---|"]
    lines += [f"| {row['arm']} | {row['seconds']:.1f} | {row['verdict']} |" for row in data["green"]]
    columns = list(dict.fromkeys(cell["kernels"] for cell in data["faults"]))
    found = {(cell["fault"], cell["kernels"]): cell for cell in data["faults"]}
    if found:
        lines += ["", "| fault | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for fault in dict.fromkeys(cell["fault"] for cell in data["faults"]):
        cells = [found.get((fault, kernels)) for kernels in columns]
        lines.append(f"| `{fault}`: {data['meanings'][fault]} | " + " | ".join(map(cell_words, cells)) + " |")
    caught = sum(cell["caught"] is not None for cell in data["faults"])
    lines += [
        "",
        f"{caught} of {len(data['faults'])} cells were caught (none: no part in the fault). Not caught:",
        "",
    ]
    for cell in data["faults"]:
        if cell["caught"] is None:
            why = data["blind"].get(f"{cell['fault']} {cell['kernels']}", "no reason is known")
            lines.append(f"* {cell['fault']} on {cell['kernels']}, {cell['seconds']:.0f} s: {why}.")
    for cell in data["faults"]:
        if cell["caught"] is not None and cell["delays_tried"] > 1:
            lines.append(
                f"* {cell['fault']} on {cell['kernels']}: caught with setting {cell['delays_tried']} of the delays."
            )
    for run in data.get("beside", []):
        lines += ["", f"Beside it, commit {run['commit']}: `{run['command']}`: {run['result']}."]
    lines += ["", "What a case, a fault and a delay is: docs/stress.md."]
    lines += ["", "Not measured: which faults are caught without delays; other cards."]
    return "\n".join(lines) + "\n"


def cell_words(cell):
    if cell is None:
        return "none"
    return (
        f"{cell['caught']}, {cell['seconds']:.1f} s" if cell["caught"] else f"**not caught** in {cell['seconds']:.0f} s"
    )


def sanitize_page(data, name):
    """One line a check, then why each finding is no fault. A row of an earlier run has its commit."""
    lines = heading(data, "compute-sanitizer over the GPU kernels", name)
    reasons = list(dict.fromkeys(why for row in data["rows"] for why in row["explained"].values()))
    lines += ["| check | over | s | findings | verdict |", "|---|---|---|---|---|"]
    for row in data["rows"]:
        numbers = sorted({reasons.index(why) + 1 for why in row["explained"].values()})
        total = sum(row["findings"].values())
        words = "reported, as it must be" if row["expected"] == "findings" else "clean"
        words = f"explained ({', '.join(map(str, numbers))})" if numbers else words
        verdict = (
            words
            if row["ok"]
            else f"**NOT AS IT SHOULD BE**: exit {row['code']}, {len(row['open'])} places not explained"
        )
        check = row["check"] + (f", commit {row['commit']}" if "commit" in row else "")
        lines.append(f"| {check} | {row['over']} | {row['seconds']:.0f} | {total} | {verdict} |")
    lines += [""] + [f"({number}) {why}." for number, why in enumerate(reasons, 1)]
    lines += ["", "What each explanation rests on: docs/stress.md."]
    lines += [
        "",
        "Not measured: synccheck of the portable variants with one decode group, and of small_m beyond its first",
        "barrier, where the tool stops. racecheck does not follow wgmma, TMA and bulk copies: the seeded faults of the",
        "stress test stand in for it.",
    ]
    return "\n".join(lines) + "\n"
