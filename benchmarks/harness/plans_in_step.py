"""The plans that `auto` takes for large M against the best others of a run of hopper_plans.py, in a resident training
step: an 8B-shaped LoRA step, forward, backward and optimizer, in which only the plan of the multiply differs.

    python plans_in_step.py LIBRARY PLANS.json [--tokens 8192] [--layers 8] [--rounds N] [--json FILE]

PLANS.json: of hopper_plans.py, with a row of each shape and direction at so many tokens. Arms, interleaved, their order
rotating: auto, other (in each row the best plan that is not auto's), auto again (the A/A control). Both go through the
same library. Ratio: geometric mean over rounds of other / auto, 95% bootstrap interval.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import time

import h200_resident_step as resident
import torch
from hopper_plans import AUTO_GROUP, GROUPS, SCALES, SCHEDULES, TILES, WORKSPACE, clock, variant, words
from portable_kernels import HOPPER, Kernels

ARMS = ("auto", "other", "auto again")


class Call:
    """A weight as Kernels.call wants it, from the arguments of the op."""

    nested, quant_type, block = True, 0, 64

    def __init__(self, packed, absmax, nested_absmax, nested_code, offset, n, k):
        self.packed, self.codes, self.nested_absmax = packed, absmax, nested_absmax
        self.nested_code, self.offset, self.n, self.k = nested_code, offset, n, k


class Plans:
    """The op's CUDA kernel while it lives: every multiply by the plan of the current arm."""

    def __init__(self, library, others):
        self.kernels, self.others, self.arm, self.taken = Kernels(library, WORKSPACE), others, "auto", {}
        self.library = torch.library.Library("nybble", "IMPL")
        self.library.impl("linear_4bit", self.forward, "CUDA", allow_override=True)
        self.library.impl("linear_4bit_grad_input", self.backward, "CUDA", allow_override=True)

    def forward(self, x, packed, absmax, code, nested_absmax, nested_code, offset, bias, uid, n, k, *spec):
        return self.multiply(x, Call(packed, absmax, nested_absmax, nested_code, offset, n, k), "forward", bias)

    def backward(self, x, packed, absmax, code, nested_absmax, nested_code, offset, uid, n, k, *spec):
        return self.multiply(x, Call(packed, absmax, nested_absmax, nested_code, offset, n, k), "grad_x", None)

    def multiply(self, x, weight, direction, bias):
        backward = direction == "grad_x"
        columns = weight.k if backward else weight.n
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(flat.shape[0], columns, dtype=x.dtype, device=x.device)
        key = (weight.n, weight.k, flat.shape[0], direction)
        plan = self.others[key] if self.arm == "other" else (-1, 0)
        call = self.kernels.call(weight, flat, out, backward, HOPPER, variant=plan[0], cut=plan[1], bias=bias)
        text = self.kernels.plan(call)
        self.taken.setdefault(self.arm, {})[f"{weight.n}x{weight.k} {direction}"] = text
        self.kernels.run(call)
        return out.view(*x.shape[:-1], columns)


def others_of(record, tokens):
    """(n, k, m, direction) -> (variant, group) of the best plan that is not auto's; its name."""
    names = {}
    for tile in range(len(TILES)):
        for schedule in range(len(SCHEDULES)):
            for scales in range(len(SCALES)):
                v = variant(tile, schedule, scales)
                names.update({words(v, group): (v, group) for group in (AUTO_GROUP, *GROUPS)})
    plans, chosen = {}, {}
    for row in record["rows"]:
        if row["m"] != tokens:
            continue
        best = min((arm for arm in row["ratio"] if arm in names), key=row["ratio"].get)
        plans[row["n"], row["k"], tokens, row["direction"]] = names[best]
        chosen[f"{row['n']}x{row['k']} {row['direction']}"] = dict(
            plan=best, ratio=row["ratio"][best], auto=row["ratio"]["auto"]
        )
    return plans, chosen


def measure(arguments):
    resident.LARGE["vocab_size"] = 32000  # the head is no 4-bit multiply
    arguments.tiny, arguments.device = False, "cuda"
    record = json.loads(arguments.plans.read_text())
    plans, chosen = others_of(record, arguments.tokens[0])
    bench = resident.Bench(arguments)
    overridden = Plans(arguments.library, plans)
    ids = torch.randint(3, bench.vocab, (1, arguments.tokens[0]), device="cuda")
    seconds, losses = {arm: [] for arm in ARMS}, {arm: set() for arm in ARMS}
    bench.restart()
    for index in range(-1, arguments.rounds):
        for arm in [ARMS[(index + i) % len(ARMS)] for i in range(len(ARMS))]:
            overridden.arm = "other" if arm == "other" else "auto"
            bench.optimizer.zero_grad(set_to_none=True)
            value, loss, _ = bench.step(ids, "nybble")
            if index >= 0:
                seconds[arm].append(value)
                losses[arm].add(round(loss, 4))
    found = {}
    for name, arm in (("other / auto", "other"), ("auto again / auto", "auto again")):
        logs = [math.log(a / b) for a, b in zip(seconds[arm], seconds["auto"], strict=True)]
        found[name] = resident.interval(logs)
    medians = {arm: round(1e3 * statistics.median(values), 2) for arm, values in seconds.items()}
    return dict(
        **dict(device=torch.cuda.get_device_name(), tokens=arguments.tokens[0], layers=arguments.layers),
        **dict(ms=medians, ratios=found, rounds=arguments.rounds, chosen=chosen, taken=overridden.taken),
        **dict(losses={arm: sorted(values) for arm, values in losses.items()}, clock=clock()),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("plans", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, nargs=1, default=[8192])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    begin = time.time()
    found = measure(arguments)
    found["seconds"] = round(time.time() - begin, 1)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['tokens']} tokens, {found['layers']} layers, ms {found['ms']}, losses {found['losses']}")
    for name, (ratio, (low, high)) in found["ratios"].items():
        print(f"{name}: {ratio:.4f} ({low:.4f} to {high:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
