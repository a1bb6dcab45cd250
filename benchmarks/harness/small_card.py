#!/usr/bin/env python3
"""Do the gates work on a small card? Other memory of a larger one is held, so that --gib are really free.

    python benchmarks/harness/small_card.py --gib 7.6 [--out FOLDER] [--commit HASH] [-- ARGUMENTS of `nybble.gate all`]

The memory is held by a process of its own, so contexts, libraries and every worker of a gate must fit beside each
other. A card of 8 GB leaves about 7.6 GiB to programs. FOLDER gets <card>-small-card-<gib>.json and .md: exit code and
seconds of every gate, what it left out, and the most that was used of what was free; rows of gates that do not run this
time stay, with their commit. Needs the card alone: others would run out of memory. Exit code: that of `python -m
nybble.gate all`; 3 where the card is not free.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import torch

from nybble.gate import every, record

MIB = 1 << 20
BUSY_MIB = 2048  # that others may use before this run would be in their way
HOLD = """
import sys, torch
torch.cuda.init()
free, _ = torch.cuda.mem_get_info()
pieces, left = [], free - int(sys.argv[1])
while left > 0:
    pieces.append(torch.empty(min(left, 1 << 32), dtype=torch.uint8, device="cuda"))
    left -= pieces[-1].numel()
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()
"""


class Watch:
    """The least memory that the device has free while the block runs, asked every 20 ms."""

    def __enter__(self) -> "Watch":
        self.free, self.least, self.running = torch.cuda.mem_get_info()[0], torch.cuda.mem_get_info()[0], True
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()
        return self

    def _ask(self) -> None:
        while self.running:
            self.least = min(self.least, torch.cuda.mem_get_info()[0])
            time.sleep(0.02)

    def __exit__(self, *error) -> None:
        self.running = False
        self.thread.join()

    @property
    def used(self) -> int:
        return self.free - self.least


def gates_under(gib: float, arguments: list[str], folder: pathlib.Path) -> tuple[int, str, Watch]:
    """(exit code, text, memory) of `nybble.gate all` with that much free."""
    hold = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(int(gib * 2**30))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if not hold.stdout.readline():
            raise SystemExit("the memory could not be held")
        command = [sys.executable, "-m", "nybble.gate", "all", "--device", "cuda", "--records", str(folder), *arguments]
        with Watch() as watch:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.returncode, done.stdout, watch
    finally:
        hold.stdin.close()
        hold.wait()


def rows_of(folder: pathlib.Path) -> list[dict]:
    """One a gate: exit code, seconds, what it left out on this card."""
    card = every.card("cuda")
    rows = json.loads((folder / f"{card}-gates-all.json").read_text())["results"]
    for row in rows:
        path = folder / f"{card}-gate-{row['gate']}.json"
        report = json.loads(path.read_text()) if path.is_file() else {"not_run": {}, "results": []}
        memory = {name: why for name, why in report["not_run"].items() if "are free" in why}
        row |= {"left_out": memory, "compared": len(report["results"]) + sum(report.get("as_predicted", {}).values())}
    return rows


def kept_rows(path: pathlib.Path, rows: list[dict]) -> list[dict]:
    """Of an earlier run, the gates that are not in `rows`."""
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    now = {row["gate"] for row in rows}
    return [row for row in old if row["gate"] not in now]


def markdown(data: dict, name: str) -> str:
    lines = [
        f"# Gates with {data['gib']:g} GiB of an {data['gpu']}",
        "",
        f"Question: {data['question']}",
        f"Worst exit code {data['exit']}; {data['free_mib']} MiB were free. Most used: by all gates of a run. As data: "
        f"[{name}.json]({name}.json).",
        "",
        f"    {data['command']}",
        "",
        f"Last commit {data['commit']}; "
        + ", ".join(f"{key} {value}" for key, value in data["versions"].items())
        + ".",
        "",
        "| gate | exit | s | rows | most used, MiB | commit | left out for want of memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        left_out = "; ".join(f"{name} ({why})" for name, why in row["left_out"].items()) or "nothing"
        cells = [row["gate"], row["exit"], f"{row['seconds']:.1f}", row["compared"], row["used_mib"], row["commit"]]
        lines.append("| " + " | ".join(map(str, [*cells, left_out])) + " |")
    return "\n".join([*lines, "", f"Not measured: {data['not_measured']}"]) + "\n"


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=7.6)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/small-card"))
    parser.add_argument("--commit", help="of the tree, where git does not tell")
    parser.add_argument("rest", nargs="*", metavar="-- ARGUMENTS", help="of `nybble.gate all`")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU here")
        return 3
    free, total = torch.cuda.mem_get_info()
    others = (total - free) // MIB
    if others > BUSY_MIB or free < options.gib * 2**30:
        print(f"{others} MiB of the card are in use, expected at most {BUSY_MIB}, and {options.gib:g} GiB free")
        return 3
    with tempfile.TemporaryDirectory(prefix="nybble-small-card-") as folder:
        code, text, watch = gates_under(options.gib, options.rest, pathlib.Path(folder))
        rows = rows_of(pathlib.Path(folder))
    print(text)
    found = record.provenance(["all", "--device", "cuda", *options.rest])
    name = f"{every.card('cuda')}-small-card-{options.gib:g}"
    commit = options.commit or found["commit"]
    rows = [{**row, "commit": commit, "used_mib": watch.used // MIB} for row in rows]
    rows = kept_rows(options.out / f"{name}.json", rows) + rows
    data = {
        **found,
        "command": " ".join(
            [
                "python benchmarks/harness/small_card.py",
                f"--gib {options.gib:g}",
                *(["--", *options.rest] if options.rest else []),
            ]
        ),
        "commit": commit,
        "question": "Do the gates work where so little memory is free, and do they say what they left out?",
        "gpu": torch.cuda.get_device_name(),
        "gib": options.gib,
        "exit": every.worst(row["exit"] for row in rows),
        "free_mib": watch.free // MIB,
        "rows": rows,
        "not_measured": "a card that is small by itself: contexts, kernels and speed are this card's.",
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(markdown(data, name))
    print(markdown(data, name))
    return code


if __name__ == "__main__":
    sys.exit(main())
