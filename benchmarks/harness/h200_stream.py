#!/usr/bin/env python3
"""The record of streamed LoRA training on a GPU: time and memory beside the resident model, in one process.

    python h200_stream.py --out FOLDER [--cases 32b:qv:128,512 8b:all:512,1024,2048,8192] [--rounds 5] [--budget 240]
    python h200_stream.py --cases tiny:all:32 --device cpu              a trial without a GPU
    python h200_stream.py --merge A.json B.json --out FOLDER            one record of several runs

A case is shape:adapters:tokens. It has two models of the same random bytes and adapters: one streamed, one resident.
First every arm's peak memory, then the gradients bit for bit, after the resident model was compared with itself, then
times: arms in turn, the order shuffled in each round. Writes h200-stream.json and .md.

host_ms: time until a step is enqueued; near step_ms, the step waits for the host, not for the GPU. ratio_resident: time
of a resident step with our multiply / time of the arm. ratio_link: (bytes copied in a step / its time) / the rate of
page-locked copies measured in the same process. spread: (max - min) / median of the rounds. stack: the layers' seven
multiplies alone, forward and then forward and grad_x, without transformers, PEFT and autograd: what the ring itself
gets out of the link.
"""

import argparse
import gc
import json
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import time

import stream_report as report
import torch
from stream_arms import GARBAGE, RESIDENT, STREAMED, Resident, Streamed, with_adapters
from stream_store import SHAPES, write_store

import nybble
from nybble.gate.training.telemetry import Samples
from nybble.streaming import native

MIB = 1 << 20


class Case:
    """One shape and set of adapters."""

    def __init__(self, options, text: str, start: float, samples: Samples):
        self.options, self.start, self.samples = options, start, samples
        self.shape, self.targets, lengths = text.split(":")
        self.lengths = [int(length) for length in lengths.split(",")]
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.arms = options.arms or [*RESIDENT, *STREAMED]
        self.record = {"shape": self.shape, "adapters": self.targets, "rows": [], "skipped": [], "stack": []}

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.start:6.1f} s] {text}", flush=True)

    def tokens(self, count: int) -> torch.Tensor:
        """Sequences of at most 2048 tokens."""
        rows = max(1, count // 2048)
        vocabulary = SHAPES[self.shape]["vocab"]
        generator = torch.Generator().manual_seed(count)
        return torch.randint(3, vocabulary, (rows, count // rows), generator=generator).to(self.device)

    # ---- set-up

    def warm_up(self) -> int:
        """Workspaces that cuBLAS gets once, for the threads of forward and backward. Bytes allocated after it."""
        a = torch.randn(64, 64, dtype=torch.bfloat16, device=self.device, requires_grad=True)
        torch.mm(a, a).sum().backward()
        del a
        self.clean()
        return self.allocated()

    def make_models(self, folder: pathlib.Path) -> None:
        workspaces = self.warm_up()
        store = write_store(folder / "store", SHAPES[self.shape], self.device)
        self.say("store written")
        self.streamed = Streamed(self.model(store))
        stats = nybble.memory_stats(self.streamed.model)
        self.record["memory"] = {
            key: stats[key] for key in ("layers", "layer_bytes", "slot_bytes", "host_bytes", "pinned_bytes")
        }
        self.say(
            f"streamed model, {stats['host_bytes'] / MIB:.0f} MiB on the host, {stats['pinned_bytes'] / MIB:.0f} locked"
        )
        for tokens in self.lengths:
            self.measure_memory(self.streamed, self.wanted(STREAMED), tokens, workspaces, 0)
        self.clean()
        before = self.allocated(), self.reserved()
        self.resident = Resident(
            with_adapters(nybble.unstream(self.base_model(store)), self.options.rank, self.targets)
        )
        self.say("resident model")
        for tokens in self.lengths:
            self.measure_memory(self.resident, self.wanted(RESIDENT), tokens, *before)

    def wanted(self, arms) -> list[str]:
        return [arm for arm in arms if arm in self.arms]

    def base_model(self, store):
        return nybble.stream(None, store, device=self.device, window=self.options.window)

    def model(self, store):
        return with_adapters(self.base_model(store), self.options.rank, self.targets)

    def clean(self) -> None:
        if self.cuda:
            self.sync()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def reserved(self) -> int:
        return torch.cuda.memory_reserved() if self.cuda else 0

    # ---- measurements

    def row(self, arm: str, tokens: int) -> dict:
        for row in self.record["rows"]:
            if (row["arm"], row["tokens"]) == (arm, tokens):
                return row
        self.record["rows"].append({"arm": arm, "tokens": tokens, "garbage": arm in GARBAGE})
        return self.record["rows"][-1]

    def measure_memory(self, model, arms, tokens: int, allocated_before: int, reserved_before: int) -> None:
        """Peaks of the second step, less what the other model holds. Only one of the models runs meanwhile."""
        ids = self.tokens(tokens)
        for arm in arms:
            row = self.row(arm, tokens)
            model.switch(arm)
            try:
                model.step(ids)
                self.clean()
                nybble.reset_path_counters()
                copied = model.copied_bytes()
                model.step(ids)
                self.sync()
                row["copied_bytes"] = model.copied_bytes() - copied
            except torch.OutOfMemoryError:
                row["out_of_memory"] = True
                model.optimiser.zero_grad(set_to_none=True)
                continue
            finally:
                row["paths"] = {p: c for p, c in nybble.path_counters().items() if any(c.values())}
            if self.cuda:
                row["peak_allocated_mib"] = (torch.cuda.max_memory_allocated() - allocated_before) / MIB
                row["peak_reserved_mib"] = (torch.cuda.max_memory_reserved() - reserved_before) / MIB
            self.clean()
        self.say(f"memory at {tokens} tokens: " + ", ".join(report.peak(self.row(arm, tokens)) for arm in arms))

    def compare_gradients(self) -> None:
        """Exact: resident against itself, then every honest streamed arm against resident with our multiply."""
        ids = self.tokens(self.lengths[0])
        torch.use_deterministic_algorithms(True, warn_only=True)
        gradients = {}
        plan = [(self.resident, "resident", "resident"), (self.resident, "resident", "again")]
        plan += [
            (self.streamed, arm, arm) for arm in ("streamed", "streamed_reentrant", "streamed_keep", "streamed_dequant")
        ]
        names = [name for name, p in self.resident.model.named_parameters() if p.requires_grad]
        for model, arm, label in plan:
            self.load_adapters(model)
            model.switch(arm)
            model.optimiser.zero_grad(set_to_none=True)
            loss = model.gradients(ids)
            own = dict(model.model.named_parameters())
            gradients[label] = [loss, *[own[name].grad.clone() for name in names]]
            model.optimiser.zero_grad(set_to_none=True)
        torch.use_deterministic_algorithms(False)
        expected = gradients.pop("resident")
        zero = sum(not g.any().item() for g in expected)
        self.record["exact"] = {
            label: {
                "equal": sum(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
                "compared": len(expected),
                "zero": zero,
            }
            for label, found in gradients.items()
        }
        self.say(f"equal to resident: {report.exact_line(self.record['exact'])}")

    def load_adapters(self, model) -> None:
        """Both models' adapters become the streamed model's of the first call."""
        now = {n: p for n, p in model.model.named_parameters() if p.requires_grad}
        if not hasattr(self, "_adapters"):
            self._adapters = {n: p.detach().clone() for n, p in now.items()}
        for name, parameter in now.items():
            parameter.data.copy_(self._adapters[name])

    def measure_link(self) -> None:
        """Rate of copies of one layer from page-locked memory, and of a large bf16 multiply."""
        if not self.cuda:
            self.record.update(h2d_gb_s=None, gemm_tflops=None)
            return
        size = self.record["memory"]["layer_bytes"]
        host = torch.empty(size, dtype=torch.uint8).pin_memory()
        to = torch.empty(size, dtype=torch.uint8, device=self.device)
        seconds = self.seconds(lambda: to.copy_(host, non_blocking=True), 20)
        self.record["h2d_gb_s"] = size / seconds / 1e9
        a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=self.device)
        self.record["gemm_tflops"] = 2 * 8192**3 / self.seconds(lambda: torch.mm(a, a), 20) / 1e12
        self.say(f"link {self.record['h2d_gb_s']:.1f} GB/s, bf16 multiply {self.record['gemm_tflops']:.0f} TFLOP/s")

    def measure_stack(self, tokens: int) -> dict:
        """A training step's visits with nothing but the multiplies in them."""
        ring, layers, dtype = self.streamed.fetcher, self.record["memory"]["layers"], torch.bfloat16
        self.streamed.switch("streamed")
        sides = {side for weight in self.streamed.weights for side in weight.stored.shape}
        x = {side: torch.randn(tokens, side, dtype=dtype, device=self.device) for side in sides}

        def step():
            for layer in range(layers):
                visit(layer, native.FORWARD)
            for layer in reversed(range(layers)):
                visit(layer, native.BACKWARD)

        def visit(layer: int, order: int) -> None:
            ring.acquire(layer, order)
            for weight in self.streamed.streamed.weights[layer]:
                n, k = weight.stored.shape
                torch.ops.nybble.linear_4bit(x[k], *weight.tensors, None, weight.uid, *weight.spec)
                if order == native.BACKWARD:
                    torch.ops.nybble.linear_4bit_grad_input(x[n], *weight.tensors, weight.uid, *weight.spec)
            ring.release(layer)

        with torch.no_grad():
            step()
            copied = self.streamed.copied_bytes()
            step()
            copied = self.streamed.copied_bytes() - copied
            seconds = self.seconds(step, 5)
            for call in ("acquire", "release"):
                setattr(ring, call, lambda *_: None)
            checked = [weight.uid for weight in self.streamed.weights]
            for weight in self.streamed.weights:
                weight.uid = None
            without = self.seconds(step, 5)
            for weight, uid in zip(self.streamed.weights, checked, strict=True):
                weight.uid = uid
        self.streamed.switch("streamed")
        rate = self.record["h2d_gb_s"]
        return {
            "tokens": tokens,
            "step_ms": 1e3 * seconds,
            "no_copies_ms": 1e3 * without,
            "ratio_link": copied / seconds / (rate * 1e9) if rate else None,
        }

    def seconds(self, call, count: int) -> float:
        call()
        self.sync()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.sync()
        return (time.perf_counter() - start) / count

    def time_arms(self, tokens: int, save) -> None:
        """Every arm has run at this length before, for its memory."""
        ids = self.tokens(tokens)
        arms = [arm for arm in self.wanted((*RESIDENT, *STREAMED)) if not self.row(arm, tokens).get("out_of_memory")]
        times = {arm: [] for arm in arms}
        for _ in range(self.options.rounds):
            random.shuffle(arms)
            for arm in arms:
                model = self.resident if arm in RESIDENT else self.streamed
                model.switch(arm)
                for group in model.optimiser.param_groups:
                    group["lr"] = 0.0 if arm in GARBAGE else 1e-4
                self.sync()
                began, start = time.time(), time.perf_counter()
                loss = model.step(ids)
                enqueued = time.perf_counter() - start
                self.sync()
                times[arm].append((time.perf_counter() - start, enqueued, began, time.time(), loss.item()))
                self.row(arm, tokens)["gradient_norm"] = model.gradient_norm()
            for arm in arms:
                self.finish_row(arm, tokens, times[arm], statistics.median(t[0] for t in times["resident"]))
            save()
        self.say(f"{tokens} tokens: " + report.times_line([self.row(arm, tokens) for arm in arms]))

    def finish_row(self, arm: str, tokens: int, rounds: list[tuple], resident: float) -> None:
        row, times = self.row(arm, tokens), [seconds for seconds, *_ in rounds]
        seconds = statistics.median(times)
        row.update(
            step_ms=1e3 * seconds,
            host_ms=1e3 * statistics.median(enqueued for _, enqueued, *_ in rounds),
            tok_s=tokens / seconds,
            spread=(max(times) - min(times)) / seconds,
            rounds_ms=[1e3 * t for t in times],
            ratio_resident=resident / seconds,
            loss_first=rounds[0][-1],
            loss_last=rounds[-1][-1],
            **self.samples.during([(began, ended) for _, _, began, ended, _ in rounds]),
        )
        if self.record["h2d_gb_s"] and row.get("copied_bytes"):
            row["ratio_link"] = row["copied_bytes"] / seconds / (self.record["h2d_gb_s"] * 1e9)

    def run(self, save) -> None:
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.options.scratch))
        try:
            self.make_models(folder)
        finally:
            shutil.rmtree(folder)
        self.compare_gradients()
        self.measure_link()
        save()
        if self.options.stack:
            self.record["stack"] = [self.measure_stack(tokens) for tokens in self.options.stack]
            self.say(report.stack_line(self.record["stack"]))
            save()
        for tokens in self.lengths:
            if time.time() - self.start > self.options.budget:
                self.record["skipped"].append(tokens)
                continue
            self.time_arms(tokens, save)


def merged(paths: list[pathlib.Path]) -> dict:
    """The cases of several records, each with the command and commit that made it."""
    records = [json.loads(path.read_text()) for path in paths]
    cases = [{**r["machine"], **case} for r in records for case in r["cases"]]
    return {"machine": records[0]["machine"], "seconds": sum(r["seconds"] for r in records), "cases": cases}


def machine(options) -> dict:
    info = nybble.build_info()
    info.pop("library")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    local = {str(value) for value in ("--out", options.out, "--scratch", options.scratch)}  # paths of this machine
    command = " ".join(["h200_stream.py", *[argument for argument in sys.argv[1:] if argument not in local]])
    return {"device": name, "command": command, "commit": options.commit, **info}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--cases", nargs="+", default=["32b:qv:128,512", "8b:all:512,1024,2048,8192"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--budget", type=float, default=240, help="seconds; lengths that would start later are skipped")
    parser.add_argument("--arms", type=lambda text: text.split(","), help="only these; resident must be among them")
    parser.add_argument("--stack", type=lambda text: [int(t) for t in text.split(",") if t], default=[128, 512])
    parser.add_argument("--commit", help="of the code that is measured, for the record")
    parser.add_argument("--merge", type=pathlib.Path, nargs="+", metavar="JSON", help="measure nothing")
    parser.add_argument("--scratch", help="where the random store is written and removed again")
    return parser.parse_args()


def main() -> int:
    options = parse()
    start, samples = time.time(), Samples()
    record = {"machine": machine(options), "cases": []}
    options.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        record["seconds"] = time.time() - start
        (options.out / "h200-stream.json").write_text(json.dumps(record, indent=1) + "\n")

    for text in [] if options.merge else options.cases:
        case = Case(options, text, start, samples)
        record["cases"].append(case.record)
        case.run(save)
        del case
        gc.collect()
    samples.stop()
    if options.merge:
        record.update(merged(options.merge))
        (options.out / "h200-stream.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / "h200-stream.md").write_text(report.markdown(record))
    print(report.markdown(record))
    faults = report.faults(record)
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
