"""Registers, shared memory, spills and loop instructions of CUDA kernels, per target, from the compiler alone: no GPU.

    python kernel_resources.py SOURCE... [--targets 80 86 89 90 120] [--nvcc nvcc] [--cuobjdump cuobjdump] [--json FILE]

A loop is an innermost backward branch; it counts when mma instructions (in kernels without any: fp32 products) lie
inside. Exit status 1 when a loop touches local memory, which is where spilled registers go.
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


def compile_cubin(nvcc, source, target, cubin):
    command = [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Iinclude", "-Isrc", "-Xptxas", "-v", "-cubin"]
    command += [f"-gencode=arch=compute_{target},code=sm_{target}"]
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


def opcode(instruction):
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")[0]


def read_loops(sass):
    """Kernel -> counts of the opcodes of its innermost loops that multiply."""
    loops = {}
    for text in re.split(r"\n\s*Function : ", sass)[1:]:
        name, instructions = text.split("\n", 1)[0], []
        for match in re.finditer(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", text):
            instructions.append((int(match[1], 16), match[2]))
        spans = []
        for address, instruction in instructions:
            target = re.search(r"\bBRA\S*\s.*?(0x[0-9a-f]+)", instruction)
            if target and int(target[1], 16) < address:
                spans.append((int(target[1], 16), address))
        inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
        counts = [collections.Counter(opcode(i) for a, i in instructions if low <= a <= high) for low, high in inner]
        unit = "HMMA" if any(c["HMMA"] for c in counts) else "FFMA"
        loops[name] = [c for c in counts if c[unit] >= 16]
    return loops


def short_name(symbol):
    text = subprocess.run(["c++filt", symbol], capture_output=True, text=True).stdout.strip() or symbol
    text = re.sub(r"nybble::(portable|row)::|nybble::|\(Params\)|void |\(.*?\)(?=[0-9])", "", text)
    return text.replace("__nv_bfloat16", "bf16").replace("__half", "fp16")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--targets", nargs="+", default=["80", "86", "89", "90", "120"])
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows, bad = [], 0
    for source in arguments.sources:
        for target in arguments.targets:
            with tempfile.TemporaryDirectory() as folder:
                cubin = f"{folder}/kernels.cubin"
                resources = read_ptxas(compile_cubin(arguments.nvcc, source, target, cubin))
                sass = subprocess.run([arguments.cuobjdump, "-sass", cubin], capture_output=True, text=True).stdout
            loops = read_loops(sass)
            for kernel, used in resources.items():
                local = sum(loop["LDL"] + loop["STL"] for loop in loops.get(kernel, []))
                bad += local > 0
                biggest = [
                    {k: loop[k] for k in ("HMMA", "FFMA", "LDSM", "LDS", "PRMT", "NOP")} | {"all": loop.total()}
                    for loop in loops.get(kernel, [])
                ]
                row = dict(kernel=short_name(kernel), target=target, local_in_loops=local, loops=biggest, **used)
                rows.append(row)
                print(json.dumps(row), flush=True)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} kernels, {bad} with local memory in a loop")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
