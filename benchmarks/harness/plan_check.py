#!/usr/bin/env python3
"""`nybble plan` against measurement: peaks of torch's allocator in three LoRA training steps, allocated and reserved,
page-locked host memory, and bytes over the link in a step once training runs (the last one).

    python plan_check.py [--shapes 8b 32b 1.5b] [--tokens 512,1024,2048,4096] [--layers 8] [--record h200-plan]

One row per shape and length, 8 layers each; the length also selects the arm: recompute, keep, the reentrant variant,
the chunked loss. Every row makes its model anew in an empty allocator. A prediction may be up to 5% low and 10% high,
each of the four; exit code 1 when a row is outside. "link MiB" is what nybble.memory_stats counts as refill_bytes.
"""

import argparse
import gc
import json
import pathlib
import shutil
import sys
import tempfile
import time
import warnings

import peft
import torch
from stream_store import SHAPES, write_store

import nybble

MIB = 1 << 20
LOW, HIGH = -0.05, 0.10
MORE_SHAPES = {"1.5b": dict(hidden=1536, ffn=8960, layers=8, heads=12, kv_heads=2, vocab=151936)}
# (activations, reentrant, loss, targets, rows) for each length, so that every arm meets every shape
ARMS = [
    ("recompute", False, "whole", "all-linear", 1),
    ("keep", False, "whole", "q_proj,v_proj", 1),
    (3, True, "chunked", "all-linear", 2),
    ("recompute", False, "chunked", "q_proj,v_proj", 2),
]


PEAKS, STREAMED = ("allocated", "reserved"), ("pinned", "link")
HEAD = (
    "| shape | tokens | activations | loss | adapters "
    "| allocated MiB | planned | error | reserved MiB | planned | error "
    "| pinned MiB, planned | link MiB a step, planned | ok |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def lora_targets(targets: str):
    return targets if targets == "all-linear" else targets.split(",")


def clean() -> None:
    """An allocator as in a new process, but for the context."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def training(store, tokens: int, arm, rank: int, device: str = "cuda"):
    """An arm's model and a function that takes one training step."""
    activations, reentrant, loss, targets, rows = arm
    layers = json.loads((pathlib.Path(store) / "config.json").read_text())["num_hidden_layers"]
    policy = activations
    if isinstance(activations, int):
        policy = ["recompute"] * (layers - activations) + ["keep"] * activations
    model = nybble.stream(None, store, device=device, activations=policy)
    config = peft.LoraConfig(r=rank, target_modules=lora_targets(targets), task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if loss == "chunked":
        nybble.chunk_loss(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(adapters, lr=1e-4, fused=True)
    ids = torch.randint(3, model.config.vocab_size, (rows, tokens // rows), device=device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimiser.step()

    return model, step


def streamed(model, step, steps: int) -> dict:
    """Takes so many steps. Bytes in host memory, of them page-locked, and over the link in the last step."""
    for _ in range(steps - 1):
        step()
    before = nybble.memory_stats(model)["refill_bytes"]
    step()
    stats = nybble.memory_stats(model)
    return {"host": stats["host_bytes"], "pinned": stats["pinned_bytes"], "link": stats["refill_bytes"] - before}


def train(store, tokens: int, arm, rank: int, steps: int = 3) -> dict:
    """Bytes at the peak of `steps` training steps, and those of streamed()."""
    model, step = training(store, tokens, arm, rank)
    found = streamed(model, step, steps)
    torch.cuda.synchronize()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)
    peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return peaks | found


def predict(store, tokens: int, arm, rank: int) -> dict:
    activations, reentrant, loss, targets, rows = arm
    options = dict(activations=activations, reentrant=reentrant, loss=loss, targets=targets, batch=rows)
    rates = dict(link_gb_s=50.0, gemm_tflops=700.0, memory_gb_s=3000.0)  # not what is checked here
    plan = nybble.plan_training(store, tokens=tokens, rank=rank, **options, **rates)
    return {
        "allocated": plan.memory.allocated,
        "reserved": plan.memory.reserved,
        "pinned": plan.source.base_bytes,
        "link": plan.speed.link_bytes,
        "lines": plan.memory.lines,
    }


def fits(errors: dict) -> bool:
    return all(LOW <= error <= HIGH for error in errors.values())


def row(shape: str, store, tokens: int, arm, rank: int) -> dict:
    start = time.time()
    predicted = predict(store, tokens, arm, rank)
    traced = time.time()
    clean()
    left = torch.cuda.memory_allocated()
    measured = train(store, tokens, arm, rank)
    clean()
    errors = {what: predicted[what] / measured[what] - 1 for what in PEAKS + STREAMED}
    return dict(
        shape=shape,
        tokens=tokens,
        arm=list(arm),
        measured=measured,
        predicted=predicted,
        errors=errors,
        left=left,
        seconds=[traced - start, time.time() - traced],
        fits=fits(errors),
    )


def line(found: dict) -> str:
    activations, reentrant, loss, targets, _ = found["arm"]
    cells = [found["shape"], str(found["tokens"]), f"{activations}{' reentrant' if reentrant else ''}", loss, targets]
    for what in PEAKS:
        cells.append(f"{found['measured'][what] / MIB:.0f}")
        cells.append(f"{found['predicted'][what] / MIB:.0f}")
        cells.append(f"{found['errors'][what]:+.1%}")
    for what in STREAMED:
        cells.append(f"{found['measured'][what] / MIB:.0f}, {found['predicted'][what] / MIB:.0f}")
    return "| " + " | ".join([*cells, "yes" if found["fits"] else "NO"]) + " |"


def verdict(rows: list[dict]) -> str:
    inside = sum(found["fits"] for found in rows)
    spans = []
    for what in PEAKS + STREAMED:
        errors = [found["errors"][what] for found in rows]
        spans.append(f"{what} {min(errors):+.1%} to {max(errors):+.1%}")
    return f"{inside} of {len(rows)} rows between {LOW:+.0%} and {HIGH:+.0%}: {', '.join(spans)}"


def write_record(options, rows: list[dict], seconds: float) -> None:
    name = torch.cuda.get_device_name()
    info = {"device": name, "command": "plan_check.py", "commit": options.commit, "torch": torch.__version__}
    text = json.dumps(info | {"seconds": seconds, "rows": rows}, indent=1)
    options.record.with_suffix(".json").write_text(text + "\n")
    title = f"# `nybble plan` against measured peaks, {name}\n"
    about = (
        f"`plan_check.py`, commit {options.commit}, torch {torch.__version__}, {seconds:.0f} s. {options.layers} "
        "layers a shape, three training steps in an allocator as empty as a new process has it. What the columns mean: "
        "`benchmarks/harness/plan_check.py`; how a plan is made: `docs/plan.md`.\n"
    )
    table = "\n".join([HEAD, *map(line, rows)])
    options.record.with_suffix(".md").write_text("\n".join([title, about, table, "", verdict(rows), ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["8b", "32b", "1.5b"])
    parser.add_argument("--tokens", default="512,1024,2048,4096")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--record", type=pathlib.Path, help="writes this name with .json and .md")
    parser.add_argument("--commit", help="of the code that is measured, for the record")
    parser.add_argument("--scratch", help="where the random store is written and removed again")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    rows, start = [], time.time()
    print(HEAD, flush=True)
    for name in options.shapes:
        shape = (SHAPES | MORE_SHAPES)[name] | {"layers": options.layers}
        folder = pathlib.Path(tempfile.mkdtemp(dir=options.scratch))
        try:
            store = write_store(folder / "store", shape, torch.device("cuda"))
            for index, tokens in enumerate(int(text) for text in options.tokens.split(",")):
                rows.append(row(name, store, tokens, ARMS[index % len(ARMS)], options.rank))
                print(line(rows[-1]), flush=True)
        finally:
            shutil.rmtree(folder)
    wrong = [found for found in rows if not found["fits"]]
    print(verdict(rows))
    if options.record:
        write_record(options, rows, time.time() - start)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
