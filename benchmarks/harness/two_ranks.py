#!/usr/bin/env python3
"""Two ranks of one host stream one base under DDP, on two GPUs: bits, bytes that are sent, memory that is shared.

    python two_ranks.py --out FOLDER [--tokens 512] [--layers 8]        two GPUs, NCCL
    python two_ranks.py --out FOLDER --device cpu                       a trial without GPUs, gloo

torchrun starts tests/python/streaming/ddp_rank.py on a generated store with 8B layers (tiny ones on the CPU). Each rank
first computes alone, then under DDP: the same batch on both, then a half each. Rank 1 fails at the end, where rank 0
goes on to a step that it can't finish alone. Writes two-ranks.json and .md; exit code 1 when a claim does not hold.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
from stream_store import SHAPES, write_store

import nybble

RANK = pathlib.Path(__file__).resolve().parents[2] / "tests" / "python" / "streaming" / "ddp_rank.py"
SECONDS = 60  # that a failed rank may leave the other running


def run(folder: pathlib.Path, store: pathlib.Path, device: str, tokens: int, limit: float) -> dict:
    """What both ranks wrote, and how long they lived on after one of them failed."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, RANK, folder, store, "--device", device, "--tokens", str(tokens), "--fail-rank", "1"]
    with open(folder / "log", "w+") as log:
        code = subprocess.run([str(part) for part in command], stdout=log, stderr=log, timeout=limit).returncode
    ended, failed = time.time(), folder / "failed-at"
    if not failed.exists():
        raise RuntimeError(f"the ranks ended with {code} before rank 1 was to fail:\n{(folder / 'log').read_text()}")
    return {
        "ranks": [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)],
        "exit_code": code,
        "seconds_after_failure": ended - float(failed.read_text()),
        "went_on": (folder / "went-on").exists(),
    }


def claims(found: dict) -> dict[str, tuple[bool, str]]:
    """Claim -> whether it holds, and the figures."""
    ranks = found["ranks"]

    def equal(key: str) -> tuple[bool, str]:
        return (
            all(rank[key] == rank["compared"] > 0 for rank in ranks),
            ", ".join(f"{rank[key]} of {rank['compared']}" for rank in ranks),
        )

    extra = max(rank["broadcast_bytes"] - rank["adapter_bytes"] for rank in ranks)
    files = {file for rank in ranks for file in rank["files"]}
    late = found["seconds_after_failure"]
    return {
        "a rank alone repeats its gradients": equal("again"),
        "the same batch on both ranks gives the bits of one process": equal("same"),
        "a split batch gives the bits of the mean of its halves": equal("split"),
        "nothing of the base is broadcast": (
            extra <= 8 * ranks[0]["buffer_bytes"] < ranks[0]["host_bytes"],
            f"{extra} bytes beyond the adapters, the base has {ranks[0]['host_bytes']}",
        ),
        "the base is held once": (
            len(files) == 1 and all(rank["files"] for rank in ranks),
            f"{len(files)} file in both ranks' maps, {[rank['pinned_bytes'] for rank in ranks]} bytes page-locked",
        ),
        f"a failing rank ends the other within {SECONDS} s": (
            found["exit_code"] != 0 and not found["went_on"] and late < SECONDS,
            f"{late:.1f} s, exit code {found['exit_code']}",
        ),
    }


def markdown(record: dict) -> str:
    lines = [f"{'ok ' if holds else 'BAD'} {text}: {figures}" for text, (holds, figures) in record["claims"].items()]
    for name, text in (
        ("split", "a split batch against the whole one"),
        ("half", "half a batch against the whole one"),
    ):
        worst = ", ".join(f"{rank[f'{name}_difference']:.2e}" for rank in record["ranks"])
        every = ", ".join(f"{rank[f'{name}_whole_difference']:.2e}" for rank in record["ranks"])
        lines.append(f"    {text}, norm of the difference by norm: all tensors {every}, the worst {worst}")
    head = f"# Two ranks over one host arena, {record['device']}\n\n`{record['command']}`, commit {record['commit']}; "
    return f"{head}torch {record['torch']}.\n\n```\n" + "\n".join(lines) + "\n```\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--limit", type=float, default=50, help="seconds for the ranks")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    shape = SHAPES["8b" if cuda else "tiny"] | {"layers": options.layers} | ({"vocab": 32000} if cuda else {})
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        store = write_store(folder / "store", shape, torch.device(options.device))
        found = run(folder, store, options.device, options.tokens, options.limit)
    record = {
        "device": f"2 x {torch.cuda.get_device_name()}" if cuda else "cpu",
        "command": f"two_ranks.py --device {options.device} --tokens {options.tokens} --layers {options.layers}",
        "commit": os.environ.get("NYBBLE_COMMIT"),
        "torch": nybble.build_info()["torch"],
        "shape": shape,
        **found,
        "claims": claims(found),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "two-ranks.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "two-ranks.md").write_text(markdown(record))
    print(markdown(record))
    return 0 if all(holds for holds, _ in record["claims"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
