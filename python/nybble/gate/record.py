"""A gate's record: the report with what is needed to run it again, as JSON (one row a line) and as a short page."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from nybble import build_info

from .training.telemetry import first_gpu

FEW = 20  # rows, up to which a record keeps the words of checks that hold, as the intervals of timed arms are
MANY = 500  # rows, above which a record keeps numbers and counts instead of every row in words
SCHEMA = Path(__file__).with_name("report.schema.json")


def write(
    path: Path, data: dict[str, Any], *, text: Iterable[str], notes: Iterable[str], arguments: Sequence[str]
) -> None:
    """Writes `path`.json and `path`.md (a suffix of path is dropped). arguments: of `python -m nybble.gate`."""
    whole = {**provenance(arguments), **data, "notes": list(notes)}
    if len(data["results"]) > MANY:
        whole |= condensed(data["results"])
    if len(data["results"]) > FEW:
        whole["results"] = [compact(result) for result in whole["results"]]
    stem = path.with_suffix("") if path.suffix in (".json", ".md") else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(stem.name + ".json").write_text(as_text(whole))
    stem.with_name(stem.name + ".md").write_text(page(whole, list(text), stem.name))


def condensed(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of many rows: those that did as predicted as a count by arm, and the first product's numbers as a table."""
    kept, counts, rows = [], {}, []
    first = next((r["arm"] for r in results if r["role"] == "product"), None)
    columns = list(dict.fromkeys(key for r in results if r["arm"] == first for key in r.get("values", {})))
    for result in results:
        if "checks" not in result or not result["as_expected"] or result["faults"]:
            kept.append(result)
            continue
        counts[result["arm"]] = counts.get(result["arm"], 0) + 1
        if result["arm"] == first:
            rows.append([result["arm"], result["cell"], *(result["values"].get(key) for key in columns)])
    return {"results": kept, "as_predicted": counts, "table": {"columns": ["arm", "cell", *columns], "rows": rows}}


def compact(result: dict[str, Any]) -> dict[str, Any]:
    """A judged row without the words of checks that hold."""
    if "checks" not in result:
        return result
    words = {name: {**c, "found": "" if c["holds"] else c["found"]} for name, c in result["checks"].items()}
    return {**result, "checks": words}


def provenance(arguments: Sequence[str]) -> dict[str, Any]:
    """The command, the commit and the versions behind a report."""
    info = build_info()
    commit, dirty = commit_of(Path(__file__).parent)
    return {
        "command": "python -m nybble.gate " + shlex.join(without_record(arguments)),
        "commit": commit,
        "dirty": dirty,
        "versions": {"nybble": info["version"], "torch": torch.__version__, "cuda": info["cuda"], **driver()},
    }


def without_record(arguments: Sequence[str]) -> list[str]:
    """The arguments without where the record went, which is nobody else's folder."""
    given = list(arguments)
    for option in ("--record", "--records"):
        if option in given:
            at = given.index(option)
            del given[at : at + 2]
    return given


def commit_of(folder: Path) -> tuple[str, bool | None]:
    """(hash, uncommitted changes) of the checkout; $NYBBLE_COMMIT where there is no git; "unknown" without both."""

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
        return found.stdout.strip()

    given = os.environ.get("NYBBLE_COMMIT")
    if given:
        return given, None
    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", None


def driver() -> dict[str, str]:
    """Driver and power limit of torch's first GPU, where nvidia-smi tells."""
    if not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "-i", first_gpu(), "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip().split(", ")
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(("driver", "power_limit"), found, strict=False))


def as_text(data: dict[str, Any]) -> str:
    """JSON with one result a line: thousands of rows stay readable as a diff."""
    head = json.dumps({key: value for key, value in data.items() if key not in ("results", "table")}, indent=1)
    text = head.removesuffix("\n}") + ',\n "results": [' + one_a_line(data["results"]) + "]"
    if "table" in data:
        columns, rows = json.dumps(data["table"]["columns"]), one_a_line(data["table"]["rows"])
        text += f',\n "table": {{"columns": {columns}, "rows": [{rows}]}}'
    return text + "\n}\n"


def one_a_line(rows: list[Any]) -> str:
    return "\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n " if rows else ""


def page(data: dict[str, Any], text: list[str], name: str) -> str:
    """The record in words."""
    machine, versions = data["machine"], data["versions"]
    where = machine.get("gpu", machine["cpu"])
    lines = [
        f"# Gate {data['gate']} on {where}",
        "",
        f"Question: {data['question']}",
        f"Verdict: {data['meaning']} (exit {data['verdict']}). All rows: [{name}.json]({name}.json).",
        "",
        f"    {data['command']}",
        "",
        f"Commit {data['commit']}{' with uncommitted changes' if data['dirty'] else ''}; "
        + ", ".join(f"{key} {value}" for key, value in versions.items())
        + f"; Python {machine['python']}; {data['seconds']:.0f} s.",
        "",
        "```",
        *text,
        "```",
    ]
    if data["notes"]:
        lines += ["", *[f"- {note}" for note in data["notes"]]]
    missing = [f"{arm} ({why})" for arm, why in data["not_run"].items()]
    lines += ["", f"Not measured: {'; '.join([*missing, 'other machines'])}."]
    return "\n".join(lines) + "\n"
