#!/usr/bin/env python3
"""activations="auto" on a GPU: how many layers keep under a limit of memory, what it makes torch reserve, and whether
every gradient equals the recomputing model's, bit for bit.

    python auto_check.py [--shape 8b] [--layers 8] [--tokens 4096] [--shares 0.25,0.5,0.75,1] [--json FILE]

The limits lie between what recomputing every layer reserves and what keeping every layer does. The last arm shrinks
the limit behind auto's back after its measured step, so that memory runs out, and counts the steps until one passes.
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
from plan_check import MIB, MORE_SHAPES, clean
from stream_store import SHAPES, write_store

import nybble


def make(store, activations):
    model = nybble.stream(None, store, device="cuda", activations=activations)
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator("cuda").manual_seed(3)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            values = 0.02 * torch.randn(parameter.shape, generator=generator, device="cuda")
            parameter.data = values.to(torch.bfloat16)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return nybble.chunk_loss(model)


def gradients(model, ids) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def run(store, activations, ids, limit: int | None, steps: int = 3) -> dict:
    clean()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / total)
    model = make(store, activations)
    for _ in range(steps):
        start = time.perf_counter()
        found = gradients(model, ids)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    row = dict(
        limit=limit,
        keeps=nybble.memory_stats(model)["layers_that_keep"],
        reserved=torch.cuda.max_memory_reserved(),
        ms=1e3 * seconds,
        gradients={name: grad.cpu() for name, grad in found.items()},
    )
    torch.cuda.set_per_process_memory_fraction(1.0)
    return row


def fall_back(store, ids, roomy: int, tight: int) -> dict:
    """The measured step has room, then what auto believes is wrong: the device gives less than its meter says."""
    clean()
    total = torch.cuda.mem_get_info()[1]
    model = make(store, "auto")
    gradients(model, ids)
    kept, failures, warned = [], 0, 0
    auto = model.get_base_model()._nybble_streamed.visits[0].auto
    auto._meter.limit = lambda: roomy
    torch.cuda.set_per_process_memory_fraction(tight / total)
    torch.cuda.empty_cache()
    for _ in range(12):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                found = gradients(model, ids)
            except torch.OutOfMemoryError:
                failures += 1
                found = None
        warned += sum("ran out of memory" in str(w.message) for w in seen)
        kept.append(nybble.memory_stats(model)["layers_that_keep"])
        gc.collect()  # hooks of the failed step go with its traceback
        if found is not None:
            break
    torch.cuda.set_per_process_memory_fraction(1.0)
    grads = {name: grad.cpu() for name, grad in (found or {}).items()}
    return dict(limit=tight, kept=kept, failures=failures, warnings=warned, gradients=grads)


def equal(found: dict, expected: dict) -> str:
    same = sum(torch.equal(found[name], grad) for name, grad in expected.items() if name in found)
    return f"{same}/{len(expected)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shares", default="0.25,0.5,0.75,1.1")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    torch.use_deterministic_algorithms(True, warn_only=True)
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        shape = (SHAPES | MORE_SHAPES)[options.shape] | {"layers": options.layers}
        store = write_store(folder / "store", shape, torch.device("cuda"))
        ids = torch.randint(3, shape["vocab"], (1, options.tokens), device="cuda")
        bounds = {arm: run(store, arm, ids, None) for arm in ("recompute", "keep")}
        low, high = (bounds[arm]["reserved"] for arm in ("recompute", "keep"))
        rows = {arm: row for arm, row in bounds.items()}
        for share in (float(text) for text in options.shares.split(",")):
            rows[f"auto, {share:.0%} of the way"] = run(store, "auto", ids, int(low + share * (high - low)), 4)
        fallback = fall_back(store, ids, high * 2, int(low + 0.5 * (high - low)))
    finally:
        shutil.rmtree(folder)
    expected, wrong = bounds["recompute"]["gradients"], 0
    print("| activations | limit MiB | layers keep | reserved MiB | step ms | gradients equal |")
    print("|---|---|---|---|---|---|")
    for arm, row in rows.items():
        same = equal(row.pop("gradients"), expected)
        limit = "-" if row["limit"] is None else f"{row['limit'] / MIB:.0f}"
        wrong += same != f"{len(expected)}/{len(expected)}" or (row["limit"] or high) < row["reserved"]
        print(f"| {arm} | {limit} | {row['keeps']} | {row['reserved'] / MIB:.0f} | {row['ms']:.1f} | {same} |")
        row["equal"] = same
    same = fallback["equal"] = equal(fallback.pop("gradients"), expected)
    wrong += same != f"{len(expected)}/{len(expected)}" or not 0 < fallback["failures"] <= fallback["warnings"]
    print(
        f"memory behind auto's back: {fallback['failures']} steps ran out, {fallback['warnings']} warnings, "
        f"layers that kept {fallback['kept']}, then {same} gradients equal"
    )
    if options.json:
        device = torch.cuda.get_device_name()
        options.json.write_text(json.dumps({"device": device, "rows": rows, "fallback": fallback}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
