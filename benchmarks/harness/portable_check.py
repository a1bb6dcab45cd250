"""Whether the portable and row kernels, and on compute capability 9.0 its own, are right on the GPU at hand.

    python portable_check.py LIBRARY [--seconds S] [--json FILE] [--tiny]

Random packed bytes and scales. Identity inputs must give back every weight bit for bit, from every kernel: portable,
row, and of compute capability 9.0 each tile and schedule of the Hopper kernel, the small-M kernel of each size and its
strips, in both directions; there a flipped bit of a code must be seen (identity_check.py). Of the portable and row
kernels random inputs must be as close to float64 as cuBLAS (ratio <= 1.05) and repeats bit-equal. Outputs start as NaN
between guard values. --seconds: no new group of cases after. --tiny: a few small cases of the portable and row kernels,
for compute-sanitizer. Exit status 1 when something is wrong.
"""

import argparse
import json
import sys
import time

import torch
from identity_check import check_group, groups_of
from portable_kernels import GENERAL, PORTABLE, ROW, TILES, Kernels, Weight


def relative_error(out, reference):
    return ((out.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def poisoned(rows, columns, dtype):
    memory = torch.full((rows * columns + 64,), 77.0, dtype=dtype, device="cuda")
    out = memory[32 : 32 + rows * columns].view(rows, columns)
    out.fill_(float("nan"))
    return memory, out


def guards_intact(memory):
    return bool((memory[:32] == 77).all() and (memory[-32:] == 77).all())


def odd_rows(m, columns, dtype, gap):
    """A view whose rows start anywhere: `gap` elements between them and before the first."""
    memory = torch.randn(m * (columns + gap) + gap, dtype=dtype, device="cuda")
    return memory[gap:].as_strided((m, columns), (columns + gap, 1))


def check_case(kernels, weight, m, direction, dtype, bias, options, gap=0):
    """Empty, or what is wrong."""
    dense = weight.dense(dtype)
    w = dense if direction else dense.t()
    reduction, columns = w.shape
    x = odd_rows(m, reduction, dtype, gap)
    b = torch.randn(columns, dtype=dtype, device="cuda") if bias and not direction else None
    reference = x.double() @ w.double() + (b.double() if b is not None else 0)
    cublas = torch.addmm(b, x, w) if b is not None else x @ w
    outs = []
    for _ in range(3):
        memory, out = poisoned(m, columns, dtype)
        c = kernels.call(weight, x, out, direction, bias=b, **options)
        kernels.plan(c)
        kernels.run(c)
        torch.cuda.synchronize()
        if not guards_intact(memory):
            return "wrote outside its output"
        outs.append(out)
    error, limit = relative_error(outs[0], reference), relative_error(cublas, reference)
    factor = 1.05 if outs[0].numel() >= 4096 else 1.5
    if not error <= factor * limit + 1e-9:
        return f"error {error:.3e}, cuBLAS {limit:.3e}"
    if not all(torch.equal(outs[0], other) for other in outs[1:]):
        return "repeats differ"
    return ""


def portable_options():
    return [dict(path=PORTABLE, variant=v, cut=cut) for v in TILES for cut in (0, 1)]


def check_cases():
    """(weight arguments, tokens, directions, dtype, bias, options)"""
    b, h = torch.bfloat16, torch.float16
    every = portable_options()
    for block in (64, 128, 256, 512, 1024, 2048, 4096):
        yield dict(n=640, k=512, block=block), (70,), (0, 1), b, False, every[::3]
    for nested, dtype, quant_type in ((False, b, 0), (True, h, 0), (False, h, 1), (True, b, 1)):
        yield dict(n=648, k=576, nested=nested, quant_type=quant_type), (1, 33, 200), (0, 1), dtype, True, every
    yield dict(n=1000, k=704), (1, 3, 17, 127, 129, 257), (0, 1), b, True, every
    yield dict(n=333, k=448), (65,), (0,), b, True, every
    yield dict(n=8, k=64), (1, 300), (0, 1), b, False, every
    yield dict(n=4096, k=4096), (16, 100, 512), (0, 1), b, False, every
    general = [dict(path=PORTABLE, variant=GENERAL, cut=cut) for cut in (0, 1)]
    for n, k, block, shift in (
        (300, 1000, 64, 1),
        (257, 129, 32, 3),
        (77, 33, 128, 2),
        (1, 1, 64, 0),
        (513, 1002, 4096, 5),
    ):
        for nested, dtype in ((True, b), (False, h)):
            yield dict(n=n, k=k, block=block, shift=shift, nested=nested), (1, 70, 130), (0, 1), dtype, True, general
    row = [dict(path=ROW)]
    for block in (32, 64, 4096):
        yield dict(n=301, k=1056, block=block), (1, 2, 3, 4, 5, 8), (0, 1), b, True, row
    for nested, dtype, quant_type in ((False, b, 0), (True, h, 0), (False, h, 1)):
        yield dict(n=513, k=2080, nested=nested, quant_type=quant_type), (1, 2, 4, 7), (0, 1), dtype, True, row
    for n, k in ((1, 32), (5, 96), (14336, 4096), (4096, 14336), (4096, 4096)):
        yield dict(n=n, k=k), (1, 2, 4, 8), (0, 1), b, False, row


def check_tiny(kernels):
    failures, cases = [], 0
    arms = [(options, (1, 20)) for options in portable_options()] + [(dict(path=ROW), (1, 2, 3, 8))]
    for options, tokens in arms:
        for m in tokens:
            for direction in (0, 1):
                cases += 1
                wrong = check_case(kernels, Weight(136, 320), m, direction, torch.bfloat16, True, options)
                if wrong:
                    failures.append((m, direction, options, wrong))
    print("TINY", cases, "cases, wrong:", failures)
    return dict(cases=cases, failures=[str(f) for f in failures])


def check_identities(kernels, over):
    """Every group, until over() says that the time is. As check() returns."""
    cases, failures, skipped = 0, [], 0
    for group in groups_of(kernels.sm):
        if over():
            skipped += 1
            continue
        checks, wrong = check_group(kernels, Weight(**group.weight), group)
        cases += checks
        failures += [(group.weight, *failure) for failure in wrong]
    return dict(cases=cases, failures=failures, skipped=skipped)


def check_random(kernels, over):
    cases, failures, skipped = 0, [], 0
    for arguments, tokens, directions, dtype, bias, arms in check_cases():
        if over():
            skipped += 1
            continue
        for m in tokens:
            for direction in directions:
                weight = Weight(**arguments)
                for options in arms:
                    cases += 1
                    odd = options["path"] == ROW or options["variant"] == GENERAL
                    wrong = check_case(kernels, weight, m, direction, dtype, bias, options, gap=m % 3 if odd else 0)
                    if wrong:
                        failures.append((arguments, m, direction, str(dtype), options, wrong))
    return dict(cases=cases, failures=failures, skipped=skipped)


def check(kernels, seconds):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    start, parts = time.time(), {}
    for name, part in (("identity", check_identities), ("random", check_random)):
        begin = time.time()
        parts[name] = result = part(kernels, lambda: time.time() - start > seconds)
        for failure in result["failures"][:20]:
            print("WRONG", name, failure)
        counts = f"{result['cases']} cases, {len(result['failures'])} wrong, {result['skipped']} groups skipped"
        print(f"CHECK {name}: {counts}, {time.time() - begin:.1f} s")
    failures = [str(failure) for result in parts.values() for failure in result["failures"]]
    totals = {count: sum(result[count] for result in parts.values()) for count in ("cases", "skipped")}
    return dict(**totals, identities=parts["identity"]["cases"], failures=failures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(int(time.time()))
    kernels = Kernels(arguments.library)
    print(torch.cuda.get_device_name(), "sm", kernels.sm, "SMs", kernels.sms, "torch", torch.__version__)
    result = check_tiny(kernels) if arguments.tiny else check(kernels, arguments.seconds)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, result=result), file)
    return 1 if result.get("failures") else 0


if __name__ == "__main__":
    sys.exit(main())
