"""The record "resident step, patched against unpatched": one LoRA training step of a Llama-8B-shaped model whose base
stays on the GPU, with bitsandbytes' multiply and with nybble's, in one process.

    python h200_resident_step.py --out FOLDER [--budget SECONDS]     measures, writes h200-resident-step.json and .md
    python h200_resident_step.py --extend RECORD.json --tokens 512   measures some sizes again, keeps the others
    python h200_resident_step.py --judge RECORD.json                 the verdict on a record, without a GPU
    python h200_resident_step.py --out FOLDER --tiny --device cpu    the same code on a toy, to try the script

One model serves both arms: nybble.patch before an arm's step, nybble.unpatch after it, both outside of the clock. A
round runs bitsandbytes, nybble and bitsandbytes again (the A/A control) in an order that rotates. A step is forward,
backward, norm of the gradients and AdamW on the adapters; Python's garbage collector is off meanwhile. Ratio: geometric
mean over rounds of nybble / bitsandbytes, with a 95% bootstrap interval over rounds.

Two summation orders round differently, and 32 layers of random bf16 weights amplify that. So the measure for the
gradients is a third order: dense weights multiplied with K (in backward N) reversed. Exit 1 when a size is slower
(ratio above 1.01 and the interval above 1), when losses differ beyond the tolerance or gradients more than with the
third order, or when nothing trained.
"""

import argparse
import gc
import json
import math
import pathlib
import random
import statistics
import sys
import time

import resident_step_report as report

TOKENS = (512, 1024, 2048, 4096, 8192)
ARMS = ("bitsandbytes", "nybble", "bitsandbytes again")
REVERSED = "dense, sums reversed"
LARGE = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32)
TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_attention_heads=4)
RANK = 16
BOOTSTRAPS = 10000


def build_model(arguments):
    """A Llama of random NF4 weights (nested scales), LoRA on all seven linears with B not zero, all in bf16."""
    import bitsandbytes as bnb
    import peft
    import torch
    import transformers

    shape = TINY if arguments.tiny else LARGE
    config = transformers.LlamaConfig(
        num_hidden_layers=arguments.layers,
        num_key_value_heads=2 if arguments.tiny else 8,
        max_position_embeddings=max(arguments.tokens),
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
        **shape,
    )
    device = torch.device(arguments.device)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            weight = torch.randn(module.out_features, module.in_features, dtype=torch.bfloat16, device=device) * 0.02
            with torch.device("meta"):
                linear = bnb.nn.Linear4bit(
                    module.in_features,
                    module.out_features,
                    bias=False,
                    compute_dtype=torch.bfloat16,
                    quant_type="nf4",
                )
            linear.weight = bnb.nn.Params4bit(weight, quant_type="nf4", compress_statistics=True, module=linear)
            linear.weight = linear.weight.to(device)
            model.model.layers.set_submodule(name, linear)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                value = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
                if parameter.dim() > 1:
                    value.normal_(std=0.02)
                setattr(module, name, torch.nn.Parameter(value))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    model.is_loaded_in_4bit = True
    model.requires_grad_(False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    adapters = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
        if "lora_B" in name:
            parameter.data.normal_(std=0.01)
    return wrapped.train()


def reversed_linear(bnb):
    """A Linear4bit that multiplies with a dense weight; K, and N in backward, are summed in reverse."""
    import torch

    class Reversed(bnb.nn.Linear4bit):
        def forward(self, x):
            weight = bnb.functional.dequantize_4bit(self.weight, self.weight.quant_state)
            return torch.nn.functional.linear(x.flip(-1), weight.flip(0, 1)).flip(-1)

    return Reversed


class Bench:
    """The model, its adapters' start values, and single steps of either arm."""

    def __init__(self, arguments):
        import bitsandbytes as bnb
        import torch

        import nybble

        self.torch, self.nybble = torch, nybble
        torch.manual_seed(0)
        self.cuda = arguments.device == "cuda"
        self.vocab = (TINY if arguments.tiny else LARGE)["vocab_size"]
        self.device = arguments.device
        self.model = build_model(arguments)
        self.adapters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.start = {name: p.detach().clone() for name, p in self.adapters.items()}
        self.linear_class, self.reversed_class = bnb.nn.Linear4bit, reversed_linear(bnb)
        self.linears = [module for module in self.model.modules() if isinstance(module, bnb.nn.Linear4bit)]
        self.report = str(nybble.patch(self.model))
        nybble.unpatch(self.model)

    def restart(self):
        """Adapters as they were made, a new optimizer."""
        for name, parameter in self.adapters.items():
            parameter.data.copy_(self.start[name])
        self.optimizer = self.torch.optim.AdamW(self.adapters.values(), lr=1e-4, fused=self.cuda)

    def set_classes(self, cls):
        for module in self.linears:
            module.__class__ = cls

    def synchronize(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    def step(self, ids, arm):
        """Seconds, loss and norm of the gradients of one step."""
        if arm == "nybble":
            self.nybble.patch(self.model)
        elif arm == REVERSED:
            self.set_classes(self.reversed_class)
        try:
            self.synchronize()
            begin = time.perf_counter()
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = self.torch.nn.utils.get_total_norm([p.grad for p in self.adapters.values()])
            self.optimizer.step()
            self.synchronize()
            seconds = time.perf_counter() - begin
        finally:
            self.nybble.unpatch(self.model)
            self.set_classes(self.linear_class)
        return seconds, loss.item(), norm.item()

    def equality(self, ids):
        """One step of each arm from the same start: losses, gradients apart, peak memory, counters of the op."""
        torch, row, gradients = self.torch, {}, {}
        for arm in (*ARMS[:2], REVERSED):
            self.restart()
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            self.nybble.reset_path_counters()
            self.optimizer.zero_grad(set_to_none=True)
            _, loss, norm = self.step(ids, arm)
            row[arm] = dict(loss=loss, gradient_norm=norm, launches=sum_launches(self.nybble.path_counters()))
            if self.cuda:
                row[arm].update(allocated_bytes=torch.cuda.max_memory_allocated())
                row[arm].update(reserved_bytes=torch.cuda.max_memory_reserved())
            gradients[arm] = {name: p.grad.float().cpu() for name, p in self.adapters.items()}
            changed = sum(not torch.equal(p.data, self.start[name]) for name, p in self.adapters.items())
            row[arm].update(adapters_changed=changed, nonzero=sum(bool(g.any()) for g in gradients[arm].values()))
        theirs = gradients["bitsandbytes"]
        norm = math.sqrt(sum(float(g.square().sum()) for g in theirs.values()))
        for key, arm in (("gradient_difference", "nybble"), ("gradient_noise", REVERSED)):
            apart = sum(float((gradients[arm][name] - theirs[name]).square().sum()) for name in theirs)
            row[key] = math.sqrt(apart) / norm
        row["loss_difference"] = abs(row["nybble"]["loss"] - row["bitsandbytes"]["loss"])
        row["compared"] = len(theirs)
        return row

    def timed(self, ids, rounds, deadline):
        """Seconds of every arm in every round, and the losses of the run."""
        self.restart()
        times, losses = {arm: [] for arm in ARMS}, []
        for arm in ARMS[:2]:  # warm-up: the allocator's pools of this size
            self.optimizer.zero_grad(set_to_none=True)
            self.step(ids, arm)
        gc.collect()
        gc.disable()
        for index in range(rounds):
            for arm in [ARMS[(index + i) % len(ARMS)] for i in range(len(ARMS))]:
                self.optimizer.zero_grad(set_to_none=True)
                seconds, loss, _ = self.step(ids, arm)
                times[arm].append(seconds)
                losses.append(loss)
            if index >= 4 and time.perf_counter() > deadline:
                break
        gc.enable()
        return times, losses


def sum_launches(counters):
    return {path: sum(counts.values()) for path, counts in counters.items() if any(counts.values())}


def interval(logs):
    """Geometric mean of ratios and its 95% bootstrap interval, from their logarithms."""
    generator = random.Random(0)
    means = sorted(statistics.fmean(generator.choices(logs, k=len(logs))) for _ in range(BOOTSTRAPS))
    low, high = means[int(0.025 * BOOTSTRAPS)], means[int(0.975 * BOOTSTRAPS)]
    return math.exp(statistics.fmean(logs)), [math.exp(low), math.exp(high)]


def summary(times):
    """The figures of one size from the seconds per round."""
    ours, theirs, again = (times[arm] for arm in ("nybble", "bitsandbytes", "bitsandbytes again"))
    ratio, bounds = interval([math.log(mine / other) for mine, other in zip(ours, theirs, strict=True)])
    control, control_bounds = interval([math.log(mine / other) for mine, other in zip(again, theirs, strict=True)])
    seconds = {arm: statistics.median(values) for arm, values in times.items()}
    spread = {arm: (max(values) - min(values)) / seconds[arm] for arm, values in times.items()}
    return dict(
        rounds=len(ours), ratio=ratio, interval=bounds, control=control, control_interval=control_bounds,
        seconds=seconds, spread=spread, times=times,
    )  # fmt: skip


def measure(arguments):
    import bitsandbytes
    import peft
    import torch
    import transformers
    from h200_linear import ClockMonitor

    begin = time.perf_counter()
    bench = Bench(arguments)
    bench.synchronize()
    print(f"model built in {time.perf_counter() - begin:.1f} s\n{bench.report}", flush=True)
    run = dict(
        device=torch.cuda.get_device_name() if bench.cuda else "cpu",
        torch=torch.__version__, transformers=transformers.__version__, peft=peft.__version__,
        bitsandbytes=bitsandbytes.__version__, layers=arguments.layers, tiny=arguments.tiny, rank=RANK,
        command="python benchmarks/harness/h200_resident_step.py " + " ".join(sys.argv[1:]),
        commit=arguments.commit or report.commit(), report=bench.report,
    )  # fmt: skip
    earlier = json.loads(arguments.extend.read_text()) if arguments.extend else dict(runs=[], rows=[])
    record = dict(layers=run["layers"], rank=RANK, device=run["device"], runs=earlier["runs"], rows=[])
    clocks = ClockMonitor() if bench.cuda else None
    share = (arguments.budget - (time.perf_counter() - begin)) / len(arguments.tokens)
    for index, tokens in enumerate(arguments.tokens):
        ids = torch.randint(3, bench.vocab, (1, tokens), device=bench.device)
        row = dict(tokens=tokens, run=len(record["runs"]), **bench.equality(ids))
        start, deadline = time.time(), begin + arguments.budget - share * (len(arguments.tokens) - 1 - index)
        times, losses = bench.timed(ids, arguments.rounds, deadline)
        row.update(summary(times), losses=[losses[0], losses[-1]])
        if clocks:
            row["clock_mhz"], row["power_w"] = clocks.since(start)
        record["rows"].append(row)
        print(report.line(row), flush=True)
    if clocks:
        clocks.stop()
    run["seconds"] = time.perf_counter() - begin
    record["runs"].append(run)
    record["rows"] += [row for row in earlier["rows"] if row["tokens"] not in arguments.tokens]
    record["rows"].sort(key=lambda row: row["tokens"])
    return record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder for the record")
    parser.add_argument("--budget", type=float, default=60, help="seconds; fewer rounds (at least 5) where it is short")
    parser.add_argument("--rounds", type=int, default=12, help="at most")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--tiny", action="store_true", help="hidden size 64")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit", help="its name, where git does not know it")
    parser.add_argument("--extend", type=pathlib.Path, metavar="RECORD", help="keep its rows of other sizes")
    parser.add_argument("--judge", type=pathlib.Path, metavar="RECORD", help="judge a record, measure nothing")
    arguments = parser.parse_args()
    if arguments.judge:
        record = json.loads(arguments.judge.read_text())
    else:
        record = measure(arguments)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "h200-resident-step.json").write_text(json.dumps(record, indent=1) + "\n")
        (arguments.out / "h200-resident-step.md").write_text(report.markdown(record))
    found = report.faults(record)
    print("\n".join(found) or f"ok: {report.NOT_SLOWER}, losses and gradients agree, everything trained")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
