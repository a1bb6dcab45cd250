#!/usr/bin/env python3
"""Do torch's own operations of a LoRA step repeat their bits on a GPU? None of our code runs here.

    python benchmarks/harness/mm_repeats.py [--tokens 512,2048,4096,8192] [--repeats 1000] [--lenient] [--json FILE]
    python benchmarks/harness/mm_repeats.py --record h200-torch-repeats --merge A.json B.json       one record of both

The multiplies of a rank-16 LoRA around 8B projections (h = x A^T, its two gradients and B's), and the backward of SDPA,
each with the same operands again and again (SDPA a tenth as often), every result compared with the first. Torch is told
to repeat where it can; --lenient leaves out CUBLAS_WORKSPACE_CONFIG and only warns, which leaves SDPA's backward as it
is.
Exit code 1 when an operation does not repeat.
"""

import argparse
import json
import os
import pathlib
import sys

import torch

RANK = 16
SIDES = (1024, 4096, 14336)


def operations(tokens: int, side: int, device: torch.device) -> dict:
    """Name -> call without arguments."""
    generator = torch.Generator(device).manual_seed(tokens + side)

    def make(*shape):
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    x, wide, few, down, up = (
        make(tokens, side),
        make(tokens, side),
        make(tokens, RANK),
        make(RANK, side),
        make(side, RANK),
    )
    return {
        f"h = x A^T, {tokens} x {side} x {RANK}": lambda: x @ down.t(),
        f"gradient of A, {RANK} x {tokens} x {side}": lambda: few.t() @ x,
        f"gradient of x, {tokens} x {RANK} x {side}": lambda: few @ down,
        f"y = h B^T, {tokens} x {RANK} x {side}": lambda: few @ up.t(),
        f"gradient of B, {side} x {tokens} x {RANK}": lambda: wide.t() @ few,
        f"gradient of h, {tokens} x {side} x {RANK}": lambda: wide @ up,
    }


def attention(tokens: int, device: torch.device) -> dict:
    """Forward and backward of causal attention with the heads of an 8B layer, sequences of at most 4096."""
    rows, length = max(1, tokens // 4096), min(tokens, 4096)
    generator = torch.Generator(device).manual_seed(tokens)
    q, k, v, grad = (
        torch.randn(rows, heads, length, 128, generator=generator, device=device).to(torch.bfloat16)
        for heads in (32, 8, 8, 32)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def call():
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.cat([g.flatten() for g in torch.autograd.grad(y, (q, k, v), grad)])

    return {f"backward of SDPA, {rows} x {length} tokens, 32 and 8 heads of 128": call}


def of_sdpa(repeats: int) -> int:
    """Repeats of its backward: a tenth, as each takes long."""
    return max(1, repeats // 10)


def repeat(call, repeats: int) -> tuple[int, int]:
    """How many results differ from the first, and in how many elements the worst does."""
    first = call()
    differing = torch.zeros((), dtype=torch.int64, device=first.device)
    worst = torch.zeros_like(differing)
    for _ in range(repeats):
        elements = (call() != first).sum()
        differing += elements > 0
        worst = torch.maximum(worst, elements)
    return int(differing), int(worst)


def merge(record: pathlib.Path, paths: list[pathlib.Path]) -> int:
    """Runs of both settings on one page."""
    runs = [json.loads(path.read_text()) for path in paths]
    record.with_suffix(".json").write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    lines = [f"# Whether torch's own operations of a LoRA step repeat their bits, {runs[0]['device']}", ""]
    lines += [
        f"`benchmarks/harness/mm_repeats.py --repeats {runs[0]['repeats']}`, with `--lenient` and without, the "
        f"backward of SDPA {of_sdpa(runs[0]['repeats'])} times; torch {runs[0]['torch']}. None of our code runs in it.",
        "",
    ]
    for run in runs:
        setting = "only warns" if run["lenient"] else "has to repeat"
        wrong = [row for row in run["rows"] if row["differing"]]
        lines.append(f"* Torch {setting}: {len(run['rows']) - len(wrong)} of {len(run['rows'])} operations repeat.")
        for row in wrong:
            worst = f"{row['elements']} elements in the worst"
            lines.append(f"  * {row['operation']}: {row['differing']} results differ from the first, {worst}")
    record.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="512,2048,4096,8192")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--record", type=pathlib.Path, help="writes this name with .json and .md, of --merge's files")
    parser.add_argument("--merge", type=pathlib.Path, nargs="+", metavar="JSON", help="run nothing")
    options = parser.parse_args(argv)
    if options.merge:
        return merge(options.record, options.merge)
    if not options.lenient:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=options.lenient)
    rows, device = [], torch.device(options.device)
    try:
        for tokens in (int(text) for text in options.tokens.split(",")):
            calls = {name: call for side in SIDES for name, call in operations(tokens, side, device).items()}
            for name, call in (calls | attention(tokens, device)).items():
                differing, worst = repeat(call, of_sdpa(options.repeats) if "SDPA" in name else options.repeats)
                rows.append(dict(operation=name, differing=differing, elements=worst))
                if differing:
                    print(f"{name}: {differing} results differ, {worst} elements in the worst", flush=True)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    wrong = [row for row in rows if row["differing"]]
    print(
        f"{len(rows)} operations, {options.repeats} repeats each, SDPA a tenth: {len(wrong)} do not repeat their bits"
    )
    if options.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else options.device
        record = {"device": name, "torch": torch.__version__, "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}
        record |= {"lenient": options.lenient, "repeats": options.repeats, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
