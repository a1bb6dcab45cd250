"""Registers, shared memory, spills and loop instructions of CUDA kernels, per target, from the compiler alone: no GPU.

    python kernel_resources.py SOURCE... [--targets 80 86 89 90 120] [--nvcc nvcc] [--cuobjdump cuobjdump] [--json FILE]
    python kernel_resources.py --library LIB... [--targets 80 86 89 90a 100 120] [--json FILE] [--markdown FILE]

The first compiles sources; the second reads what is in a built library or program. A loop is the body of a backward
branch; it counts when it multiplies or decodes (mma, fp32 products or byte permutes inside) and holds no smaller loop
that does. Exit status 1 when a loop touches local memory, which is where spilled registers go, or when a wanted target
is missing from the library.
"""

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Least count in a loop that makes it one of the kernel's own: a wait or a copy has none of these.
WORK = {"HMMA": 16, "HGMMA": 4, "FFMA": 16, "FMUL": 16, "PRMT": 24}
SHOWN = ("HMMA", "HGMMA", "FFMA", "LDSM", "LDS", "PRMT", "NOP")


def compile_cubin(nvcc, source, target, cubin):
    command = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Iinclude", "-Isrc", "-Xptxas", "-v", "-cubin"]
    command += ["-Xcudafe", "--diag_suppress=177", f"-gencode=arch=compute_{target},code=sm_{target}"]
    return subprocess.run(command + ["-o", cubin, source], cwd=ROOT, capture_output=True, text=True, check=True).stderr


def read_ptxas(text):
    """Kernel -> registers and spilled bytes."""
    found, kernel = {}, None
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = found.setdefault(match[1], {})
        elif kernel is not None and (match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            kernel["spill_bytes"] = int(match[1])
        elif kernel is not None and (match := re.search(r"Used (\d+) registers", line)):
            kernel["registers"] = int(match[1])
    return found


def read_usage(text):
    """Kernel -> registers, stack bytes (spills, local arrays), static shared memory, from cuobjdump -res-usage."""
    found = {}
    pattern = r"Function (\S+?):\s*\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    for name, registers, stack, shared, local in re.findall(pattern, text):
        found[name] = dict(registers=int(registers), spill_bytes=int(stack) + int(local), static_shared=int(shared))
    return found


def opcode(instruction):
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def read_loops(sass):
    """Kernel -> counts of the opcodes of its innermost loops that work."""
    loops = {}
    for text in re.split(r"\n\s*Function : ", sass)[1:]:
        name, instructions = text.split("\n", 1)[0].strip(), []
        for match in re.finditer(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", text):
            instructions.append((int(match[1], 16), match[2]))
        spans = {}
        for address, instruction in instructions:
            target = re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", instruction)
            if not target or int(target[1], 16) >= address:
                continue
            low = int(target[1], 16)
            count = collections.Counter(opcode(i) for a, i in instructions if low <= a <= address)
            if any(count[work] >= least for work, least in WORK.items()):
                spans[(low, address)] = count
        loops[name] = [
            count
            for span, count in spans.items()
            if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans)
        ]
    return loops


def short_names(symbols):
    """symbol -> readable name."""
    text = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True).stdout
    names = {}
    for symbol, name in zip(symbols, text.splitlines(), strict=True):
        name = re.sub(r"nybble::(portable|row)::|nybble::|\(anonymous namespace\)::|void ", "", name)
        name = re.sub(r"\((Direction)\)0", "forward", name).replace("(Direction)1", "grad_x")
        name = re.sub(r"\(\w+\)(?=[0-9])", "", name)
        name = re.sub(r"\((?:(?!\)>).)*\)$", "", name)
        names[symbol] = name.replace("__nv_bfloat16", "bf16").replace("__half", "fp16")
    return names


def rows_of(target, resources, sass):
    loops, names = read_loops(sass), short_names(list(resources))
    rows = []
    for kernel, used in resources.items():
        own = loops.get(kernel, [])
        counts = [{k: loop[k] for k in SHOWN if loop[k]} | {"all": loop.total()} for loop in own]
        local = sum(loop["LDL"] + loop["STL"] for loop in own)
        rows.append(dict(kernel=names[kernel], target=target, local_in_loops=local, loops=counts, **used))
    return rows


def from_source(arguments, source, target):
    with tempfile.TemporaryDirectory() as folder:
        cubin = f"{folder}/kernels.cubin"
        resources = read_ptxas(compile_cubin(arguments.nvcc, source, target, cubin))
        sass = subprocess.run([arguments.cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return rows_of(target, resources, sass)


def from_library(arguments, library, target):
    def dump(what):
        command = [arguments.cuobjdump, what, "-arch", f"sm_{target}", str(library)]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        # sm_90 also gives what is there for sm_90a
        blocks = re.split(r"\nFatbin (?:elf|ptx) code:\n", text)
        return "\n".join(block for block in blocks if f"\narch = sm_{target}\n" in block and "Function" in block)

    return rows_of(target, read_usage(dump("-res-usage")), dump("-sass"))


def markdown(rows, targets, title):
    """One line a kernel, one column a target: registers (bytes of stack), instructions of its largest loop."""
    cells = {(row["kernel"], row["target"]): row for row in rows}
    lines = [f"# {title}", "", "Registers (bytes of stack, where there are any), instructions of the largest loop."]
    lines += ["`!`: a loop touches local memory. `-`: not built for the target.", ""]
    lines += [
        "| kernel | " + " | ".join(f"sm_{target}" for target in targets) + " |",
        "|---" * (len(targets) + 1) + "|",
    ]
    for kernel in dict.fromkeys(row["kernel"] for row in sorted(rows, key=lambda row: row["kernel"])):
        texts = []
        for target in targets:
            row = cells.get((kernel, target))
            if row is None:
                texts.append("-")
                continue
            spill = f" ({row['spill_bytes']})" if row.get("spill_bytes") else ""
            largest = max((loop["all"] for loop in row["loops"]), default=None)
            loop = "" if largest is None else f", {largest}"
            texts.append(f"{row['registers']}{spill}{loop}{' !' if row['local_in_loops'] else ''}")
        lines.append(f"| `{kernel}` | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*")
    parser.add_argument("--library", dest="built", type=pathlib.Path, nargs="+", help="read built objects instead")
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    arguments = parser.parse_args()
    if bool(arguments.sources) == bool(arguments.built):
        parser.error("give sources, or --library")
    rows, empty = [], []
    targets = arguments.targets or ["80", "86", "89", "90", *(["90a", "100"] if arguments.built else []), "120"]
    for target in targets:
        found = []
        for library in arguments.built or []:
            found += from_library(arguments, library, target)
        for source in arguments.sources:
            found += from_source(arguments, source, target)
        rows += found
        empty += [] if found else [target]
        spilling = sum(row["local_in_loops"] > 0 for row in found)
        print(f"sm_{target}: {len(found)} kernels, {spilling} with local memory in a loop", flush=True)
    bad = [row for row in rows if row["local_in_loops"]]
    for row in rows if arguments.sources else bad:
        print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows, targets, "CUDA kernels: registers, stack and loops per target"))
    print(
        f"{len(rows)} kernels, {len(bad)} with local memory in a loop"
        + (f"; none for {', '.join(empty)}" if empty else "")
    )
    return 1 if bad or empty else 0


if __name__ == "__main__":
    sys.exit(main())
