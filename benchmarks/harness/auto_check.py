#!/usr/bin/env python3
"""activations="auto" on a GPU: how many layers keep under a limit of memory, what it makes torch reserve, and whether
every gradient equals the recomputing model's, bit for bit.

    python auto_check.py [--shape 8b] [--layers 8] [--tokens 4096] [--shares 0.25,0.5,0.75,1.1] [--attention sdpa]
        [--lenient] [--trace] [--record h200-auto]

The limits lie between what recomputing every layer reserves and what keeping every layer does. The last arm shrinks
the limit behind auto's back after its measured step, so that memory runs out, and counts the steps until one passes.
"itself": the arm's last step beside its step before, in which no other number of layers kept. recompute runs twice,
each time with a model of its own, which says whether torch repeats its bits. Torch has to repeat where it can;
--lenient: it only warns, and cuBLAS keeps its usual workspaces. --trace names the first value that differs.
"""

import argparse
import gc
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import warnings

import peft
import torch
from plan_check import MIB, MORE_SHAPES, clean
from step_trace import Trace, first_difference
from stream_store import SHAPES, write_store

import nybble

DEVICE = "cuda"


def make(store, activations, attention: str):
    model = nybble.stream(None, store, device=DEVICE, activations=activations)
    model.set_attn_implementation(attention)
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator(DEVICE).manual_seed(3)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            values = 0.02 * torch.randn(parameter.shape, generator=generator, device=DEVICE)
            parameter.data = values.to(torch.bfloat16)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return nybble.chunk_loss(model)


def gradients(model, ids) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def run(options, store, activations, ids, limit: int | None, steps: int = 4) -> dict:
    clean()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / total)
    model = make(store, activations, options.attention)
    trace = Trace(model) if options.trace else None
    found, values = {}, []
    for _ in range(steps):
        before, before_values = found, values
        start = time.perf_counter()
        found = gradients(model, ids)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        values = trace.take() if trace else []
        found = {name: grad.cpu() for name, grad in found.items()}
    row = dict(
        limit=limit,
        keeps=nybble.memory_stats(model)["layers_that_keep"],
        reserved=torch.cuda.max_memory_reserved(),
        ms=1e3 * seconds,
        gradients=found,
        trace=values,
        itself=equal(found, before),
        first_itself=first_difference(values, before_values),
    )
    torch.cuda.set_per_process_memory_fraction(1.0)
    return row


def fall_back(options, store, ids, roomy: int, tight: int) -> dict:
    """The measured step has room, then what auto believes is wrong: the device gives less than its meter says."""
    clean()
    total = torch.cuda.mem_get_info()[1]
    model = make(store, "auto", options.attention)
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


def differing(found: dict, expected: dict) -> dict[str, int]:
    """Tensor -> elements that differ."""
    return {n: int((found[n] != t).sum()) for n, t in expected.items() if n in found and not torch.equal(found[n], t)}


def check(options, store, ids) -> dict:
    """Every arm's row, and the fallback's."""
    rows = {arm: run(options, store, arm, ids, None) for arm in ("recompute", "keep")}
    rows["recompute again"] = run(options, store, "recompute", ids, None)
    rows["the last layer keeps"] = run(options, store, 1, ids, None)
    low, high = (rows[arm]["reserved"] for arm in ("recompute", "keep"))
    for share in (float(text) for text in options.shares.split(",")):
        limit = int(low + share * (high - low))
        rows[f"auto, {share:.0%} of the way"] = run(options, store, "auto", ids, limit)
    fallback = fall_back(options, store, ids, high * 2, int(low + 0.5 * (high - low)))
    expected, values = rows["recompute"]["gradients"], rows["recompute"]["trace"]
    for row in [*rows.values(), fallback]:
        found = row.pop("gradients")
        row.update(equal=equal(found, expected), differing=differing(found, expected))
        row["first"] = first_difference(row.pop("trace", []), values)
    return {"rows": rows, "fallback": fallback, "tensors": len(expected)}


def wrong(found: dict) -> int:
    """Rows that break a promise: gradients, the limit, the warning after memory ran out."""
    rows, all_equal = found["rows"], f"{found['tensors']}/{found['tensors']}"
    failed = sum(row["equal"] != all_equal for row in rows.values())
    failed += sum(row["limit"] is not None and row["limit"] < row["reserved"] for row in rows.values())
    last = found["fallback"]
    return failed + (last["equal"] != all_equal or not 0 < last["failures"] <= last["warnings"])


def markdown(options, found: dict) -> str:
    lines = [
        "| activations | limit MiB | layers keep | reserved MiB | step ms | gradients equal | itself |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, row in found["rows"].items():
        limit = "-" if row["limit"] is None else f"{row['limit'] / MIB:.0f}"
        cells = [
            arm,
            limit,
            row["keeps"],
            f"{row['reserved'] / MIB:.0f}",
            f"{row['ms']:.1f}",
            row["equal"],
            row["itself"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    last = found["fallback"]
    lines += [
        "",
        f"Memory behind auto's back: {last['failures']} steps ran out, {last['warnings']} warnings, layers that kept "
        f"{last['kept']}, then {last['equal']} gradients equal.",
    ]
    for arm, row in (found["rows"] | {"after memory ran out": last}).items():
        if row["differing"]:
            few = ", ".join(f"{name} ({count})" for name, count in list(row["differing"].items())[:4])
            lines.append(f"* {arm}: {len(row['differing'])} tensors differ: {few}. First value: {row['first']}.")
        if row.get("first_itself"):
            lines.append(f"* {arm}, beside its own step before: first value that differs: {row['first_itself']}.")
    return "\n".join(lines) + "\n"


def write_record(options, found: dict, text: str) -> None:
    device = torch.cuda.get_device_name()
    command = "auto_check.py" + (f" --attention {options.attention}" if options.attention != "sdpa" else "")
    command += " --lenient" * options.lenient + " --trace" * options.trace
    info = {"device": device, "command": command, "commit": options.commit, "torch": torch.__version__}
    info |= {"shape": options.shape, "layers": options.layers, "tokens": options.tokens}
    options.record.parent.mkdir(parents=True, exist_ok=True)
    options.record.with_suffix(".json").write_text(json.dumps(info | found, indent=1) + "\n")
    head = (
        f'# `activations="auto"` under limits of memory, {device}\n\n`{command}`, commit {options.commit}; torch '
        f"{torch.__version__}; {options.layers} layers of the {options.shape} shape, {options.tokens} tokens, LoRA on "
        "all seven. What the columns mean: `benchmarks/harness/auto_check.py`.\n\n"
    )
    options.record.with_suffix(".md").write_text(head + text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--shares", default="0.25,0.5,0.75,1.1")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--lenient", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--record", type=pathlib.Path, help="writes this name with .json and .md")
    parser.add_argument("--commit", help="of the code that is measured, for the record")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    if not options.lenient:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=options.lenient)
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        shape = (SHAPES | MORE_SHAPES)[options.shape] | {"layers": options.layers}
        store = write_store(folder / "store", shape, torch.device(DEVICE))
        ids = torch.randint(3, shape["vocab"], (1, options.tokens), device=DEVICE)
        found = check(options, store, ids)
    finally:
        shutil.rmtree(folder)
    text = markdown(options, found)
    print(text)
    if options.record:
        write_record(options, found, text)
    return 1 if wrong(found) else 0


if __name__ == "__main__":
    sys.exit(main())
