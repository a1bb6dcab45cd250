#!/usr/bin/env python3
"""The record of streamed LoRA training on a GPU: time and memory beside the resident model, in one process.

    python h200_stream.py --out FOLDER [--cases 32b:qv:128,512 8b:all:512,1024,2048,8192] [--rounds 5] [--budget 240]
    python h200_stream.py --cases tiny:all:32 --device cpu              a trial without a GPU
    python h200_stream.py --merge A.json B.json --out FOLDER            one record of several runs

A case is shape:adapters:tokens, then options of its own: 70b-12:qv:128:steps=10:arms=resident,streamed (of --arms,
--stack, --steps, --rounds, --length-seconds). It has two models of the same random bytes and adapters: one streamed,
one resident. First every arm's peak memory, then the gradients bit for bit, after the resident model was compared
with itself, then times: arms in turn, the order shuffled in each round. Writes h200-stream.json and .md. With
soup-cli 0.77 on the path, its streaming runtime over the same bytes takes part too (stream_peer.py).

A round of an arm is --steps steps, enqueued without waiting in between. Python's garbage collector runs between rounds
only, as its pauses are longer than steps. host_ms: time until a step is enqueued; near step_ms, the step waits for the
host, not for the GPU. ratio_resident: time of a resident step with our multiply / time of the arm. ratio_dequant,
ratio_peer: time of streamed / time of that arm, from pairs of one round, median and 95% bootstrap interval. ratio_link:
(bytes copied in a step / its time) / the rate of page-locked copies measured in the same process. spread: (max - min) /
median of the rounds, quartiles: the middle half's. stack: the layers' seven multiplies alone, forward and then forward
and grad_x, without transformers, PEFT and autograd: what the ring itself gets out of the link.

streamed_auto has a limit of its own, half way between what torch reserves when every layer recomputes and when every
layer keeps: the whole card would let all of them keep.
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
import traceback

import stream_limits as limits
import stream_peer as peer
import stream_report as report
import torch
from stream_arms import AUTO, GARBAGE, RESIDENT, STREAMED, Resident, Streamed, canonical, with_adapters
from stream_store import SHAPES, write_store
from stream_times import quiet_host, time_arms

import nybble
from nybble.gate.record import driver
from nybble.gate.training.telemetry import Samples

MIB = 1 << 20


def comma_list(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def tokens_list(text: str) -> list[int]:
    return [int(item) for item in comma_list(text)]


# What a case may set for itself.
OWN = {"arms": comma_list, "stack": tokens_list, "steps": int, "rounds": int, "length_seconds": float}


def with_own(options: argparse.Namespace, own: list[str]) -> argparse.Namespace:
    """The options with a case's own, each as name=value."""
    found = argparse.Namespace(**vars(options))
    for text in own:
        name, _, value = text.partition("=")
        name = name.replace("-", "_")
        if name not in OWN:
            raise ValueError(f"{text}: found {name}, expected one of {', '.join(OWN)}")
        setattr(found, name, OWN[name](value))
    return found


class Case:
    """One shape and set of adapters."""

    def __init__(self, options, text: str, start: float, samples: Samples):
        self.shape, self.targets, lengths, *own = text.split(":")
        self.options = options = with_own(options, own)
        self.start, self.samples = start, samples
        self.lengths = [int(length) for length in lengths.split(",")]
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.arms = list(options.arms or [*RESIDENT, *STREAMED, *peer.ARMS])
        if not self.cuda and AUTO in self.arms:
            self.arms.remove(AUTO)  # it measures the memory of a GPU
        self.models = dict.fromkeys(RESIDENT, "resident") | dict.fromkeys(peer.ARMS, "peer")
        self.record = {"shape": self.shape, "adapters": self.targets, "rows": [], "skipped": [], "stack": []}
        self.record["savings"] = {}
        self.record["steps"] = options.steps
        if self.wanted(peer.ARMS) and (why := peer.missing()) is not None:
            self.leave_out_peer(why)

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
        before = held, _ = self.allocated(), self.reserved()
        self.resident = Resident(
            with_adapters(nybble.unstream(self.base_model(store)), self.options.rank, self.targets)
        )
        self.say("resident model")
        for tokens in self.lengths:
            self.measure_memory(self.resident, self.wanted(RESIDENT), tokens, *before)
        if self.wanted(peer.ARMS):
            try:
                self.make_peer(store, folder / "peer")
            except Exception as error:  # other people's code: the record does without it, and says so
                traceback.print_exc()
                self.leave_out_peer(f"{type(error).__name__}: {error}")
        self.clean()
        self.streamed.meter.others = self.allocated() - held

    def leave_out_peer(self, why: str) -> None:
        self.record["no_peer"] = why
        self.arms = [arm for arm in self.arms if arm not in peer.ARMS]
        self.record["rows"] = [row for row in self.record["rows"] if row["arm"] not in peer.ARMS]

    def make_peer(self, store: pathlib.Path, folder: pathlib.Path) -> None:
        self.clean()
        before = self.allocated(), self.reserved()
        options = self.options
        self.peer = peer.Peer(store, folder, self.device, options.rank, self.targets, options.window)
        self.say("soup-cli's model")
        for tokens in self.lengths:
            self.measure_memory(self.peer, self.wanted(peer.ARMS), tokens, *before)

    def prepare(self, arm: str, tokens: int):
        """The arm's model, switched to it."""
        model = getattr(self, self.models.get(arm, "streamed"))
        if arm == AUTO:
            model.meter.limit_bytes = self.limit(tokens)
        model.switch(arm)
        return model

    def limit(self, tokens: int) -> float:
        """Bytes that AUTO may use."""
        ends = [self.row(arm, tokens).get("peak_reserved_mib") for arm in ("streamed", "streamed_keep")]
        return float("inf") if None in ends else MIB * sum(ends) / 2

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
            self.prepare(arm, tokens)
            try:
                for _ in range(2 if arm == AUTO else 1):  # it measures one step and keeps from the next on
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
            if arm == AUTO:
                row.update(limit_mib=self.limit(tokens) / MIB, layers_that_keep=model.auto.now.keeps)
            if self.cuda:
                row["peak_allocated_mib"] = (torch.cuda.max_memory_allocated() - allocated_before) / MIB
                row["peak_reserved_mib"] = (torch.cuda.max_memory_reserved() - reserved_before) / MIB
            self.clean()
        self.say(f"memory at {tokens} tokens: " + ", ".join(report.peak(self.row(arm, tokens)) for arm in arms))

    def compare_gradients(self) -> None:
        """Exact: resident against itself, then every honest streamed arm against resident with our multiply."""
        ids = self.tokens(self.lengths[0])
        # Where torch would only warn, SDPA's backward does not repeat its bits.
        torch.use_deterministic_algorithms(True)
        gradients = {}
        plan = [("resident", "resident"), ("resident", "again")]
        plan += [(arm, arm) for arm in ("streamed", "streamed_reentrant", "streamed_keep", "streamed_dequant")]
        plan += [(arm, arm) for arm in self.wanted([AUTO, *peer.ARMS])]
        names = [name for name, p in self.resident.model.named_parameters() if p.requires_grad]
        for arm, label in plan:
            model = self.prepare(arm, self.lengths[0])
            self.load_adapters(model)
            model.optimiser.zero_grad(set_to_none=True)
            try:
                loss = model.gradients(ids)
            except RuntimeError as error:  # other people's code may use what torch can't repeat
                if arm not in peer.ARMS:
                    raise
                self.record.setdefault("not_compared", {})[arm] = why = str(error).partition("\n")[0]
                self.say(f"{arm} was not compared: {why}")
                continue
            own = {canonical(name): p for name, p in model.model.named_parameters()}
            gradients[label] = [loss, *[own[name].grad.clone() for name in names]]
            model.optimiser.zero_grad(set_to_none=True)
        torch.use_deterministic_algorithms(False)
        expected = gradients.pop("resident")
        zero = sum(not g.any().item() for g in expected)
        self.record["exact"] = {
            label: {
                "equal": sum(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
                "differ": [
                    n for n, a, b in zip(["loss", *names], found, expected, strict=True) if not torch.equal(a, b)
                ][:9],
                "compared": len(expected),
                "zero": zero,
            }
            for label, found in gradients.items()
        }
        self.say(f"equal to resident: {report.exact_line(self.record['exact'])}")

    def load_adapters(self, model) -> None:
        """Both models' adapters become the streamed model's of the first call."""
        now = {canonical(n): p for n, p in model.model.named_parameters() if p.requires_grad}
        if not hasattr(self, "_adapters"):
            self._adapters = {n: p.detach().clone() for n, p in now.items()}
        for name, parameter in now.items():
            parameter.data.copy_(self._adapters[name])

    def run(self, save) -> None:
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.options.scratch))
        try:
            self.make_models(folder)
        finally:
            shutil.rmtree(folder)
        self.compare_gradients()
        self.record.update(h2d_gb_s=None, gemm_tflops=None)
        if self.cuda:
            found = limits.link_and_gemm(self.record["memory"]["layer_bytes"], self.device, self.sync)
            self.record.update(found)
            link = f"link {found['h2d_gb_s']:.1f} GB/s, from pageable memory {found['pageable_gb_s']:.1f}"
            self.say(f"{link}, bf16 multiply {found['gemm_tflops']:.0f} TFLOP/s")
        save()
        if self.options.stack:
            rate = self.record["h2d_gb_s"]
            self.record["stack"] = [limits.stack(self.streamed, n, rate, self.sync) for n in self.options.stack]
            self.say(report.stack_line(self.record["stack"]))
            save()
        with quiet_host(self.options):
            for tokens in self.lengths:
                if time.time() - self.start > self.options.budget:
                    self.record["skipped"].append(tokens)
                    continue
                time_arms(self, tokens, save)
                self.say(f"{tokens} tokens: " + report.times_line([self.row(arm, tokens) for arm in self.arms]))


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
    return {"device": name, "command": command, "commit": options.commit, **driver(), **info}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--cases", nargs="+", default=["32b:qv:128,512", "8b:all:512,1024,2048,8192"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5, help="of a length, at least")
    parser.add_argument("--length-seconds", type=float, default=0, help="a length gets more rounds until then")
    parser.add_argument("--pin", action="store_true", help="the calling thread to one core")
    parser.add_argument("--steps", type=int, default=1, help="of a round, without waiting in between")
    parser.add_argument("--calling-thread", action="store_true", help="backward on it, not on autograd's own")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--window", type=int, default=2)
    parser.add_argument("--budget", type=float, default=240, help="seconds; lengths that would start later are skipped")
    parser.add_argument("--arms", type=comma_list, help="only these; resident must be among them")
    parser.add_argument("--stack", type=tokens_list, default=[128, 512])
    parser.add_argument("--commit", help="of the code that is measured, for the record")
    parser.add_argument("--merge", type=pathlib.Path, nargs="+", metavar="JSON", help="measure nothing")
    parser.add_argument("--scratch", help="where the random store is written and removed again")
    return parser.parse_args()


def main() -> int:
    options = parse()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for strict repeats; what torch takes on Hopper anyway
    start, samples = time.time(), Samples()
    record = {"machine": {} if options.merge else machine(options), "cases": []}
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
