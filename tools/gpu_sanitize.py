"""compute-sanitizer over small random multiplies by every fused kernel, and over the codec's GPU tests.

    python tools/gpu_sanitize.py BUILD_DIR LOG_DIR [--faults LINEAR_STRESS_OF_A_FAULT_BUILD] [--record PATH]

Tools run side by side. Findings are counted by place. Exit code 1 when one is not explained in EXPLAINED below, when a
program fails, and when a control does not behave: a planted race that racecheck must report, a barrier more that must
silence it, and two warps that meet legally at one barrier, which synccheck must report.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import gpu_record

SMALL = "--streams 1 --batch 6 --size 0.03 --hang-seconds 300"
# The test's own float64 loops are slow under instrumentation.
SKIP_REFERENCE = "--kernel-name-exclude kernel_substring=check_outputs"
# The codec's GPU tests, in parts that run side by side: an allocation or a launch costs memcheck milliseconds.
CODEC = {
    "memcheck_dequantise": "CudaCodec.Dequant*:CudaCodec.Products*:CudaCodec.Wrong*",
    "memcheck_quantise": "CudaCodec.QuantisesRandom*",
    "memcheck_golden_dequantise": "CudaGolden.Dequant*",
    "memcheck_golden_quantise": "CudaGolden.Quant*",
}
NOT_HOPPER = "--kernels row,portable,small_m,strips"
MEETS = "warps wait at one barrier from two places of the code: PTX counts warps, not places; see barrier_probe"
# (check, pattern of a place) -> why it is no fault. Everything else that a tool reports is a failure.
EXPLAINED = {
    ("initcheck_hopper", r"load_acquire"): "flags may hold anything before a launch: they are compared with its nonce",
    ("synccheck_portable", r"run_stage"): MEETS,
    ("synccheck_small_m", r"named_barrier.*small_m::multiply"): MEETS,
    (
        "racecheck",
        r"Read access at .*load_matrices.* Write access at .*(copy_async_if|copy_async_fill|store_shared_u128)",
    ): (
        "after the last stage of a segment fragments are loaded that nobody uses, beside the first copies of the next "
        "one; a branch there would cost 10-30%; racecheck_followed ends these loads first and is silent"
    ),
    (
        "racecheck_rows",
        r"(Write access at .*store_shared_u32.* Read access at .*load_shared_(u128|f32)|"
        r"Read access at .*load_shared_(u128|f32).* Write access at .*store_shared_u32)",
    ): (
        "scales of row pairs: one lane arrives at the mbarrier for its warp, behind __syncwarp(), which racecheck does "
        "not follow; racecheck_followed lets every lane arrive and is silent"
    ),
}


def checks(build, faults, part):
    """name -> (sanitizer options, command, what must come out: clean, findings, stopped). part: of the usual cases."""

    def cases(count):
        return max(6, int(count * part))

    stress = f"{build}/tests/cpp/stress/linear_stress {SMALL}"
    codec = f"{build}/tests/cpp/format/format_test --gtest_brief=1 --gtest_filter="
    # initcheck does not see what TMA stores write, so for the Hopper kernel the comparison is left out.
    found = {
        "memcheck": (f"--tool memcheck {SKIP_REFERENCE}", f"{stress} --cases {cases(240)} --seed 11", "clean"),
        "initcheck": ("--tool initcheck", f"{stress} --cases {cases(120)} --seed 12 --poison 0 {NOT_HOPPER}", "clean"),
        "initcheck_hopper": (
            f"--tool initcheck {SKIP_REFERENCE}",
            f"{stress} --cases {cases(120)} --seed 13 --poison 0 --kernels hopper,hopper_rows,hopper_rows_96_160",
            "clean",
        ),
        "racecheck": (
            f"--tool racecheck {SKIP_REFERENCE}",
            f"{stress} --cases {cases(90)} --seed 14 --kernels hopper,small_m,strips,portable,row",
            "clean",
        ),
        "racecheck_rows": (
            f"--tool racecheck {SKIP_REFERENCE}",
            f"{stress} --cases {cases(30)} --seed 20 --kernels hopper_rows,hopper_rows_96_160",
            "clean",
        ),
        "synccheck": (
            f"--tool synccheck {SKIP_REFERENCE}",
            f"{stress} --cases {cases(240)} --seed 15 --kernels hopper,hopper_rows,hopper_rows_96_160,strips,row",
            "clean",
        ),
        "synccheck_portable": (
            f"--tool synccheck {SKIP_REFERENCE}",
            f"{stress} --cases 6 --seed 18 --kernels portable",
            "stopped",
        ),
        "barrier_probe": ("--tool synccheck", f"{build}/tests/cpp/stress/barrier_probe", "findings"),
        "synccheck_small_m": (
            f"--tool synccheck {SKIP_REFERENCE}",
            f"{stress} --cases 6 --seed 16 --kernels small_m",
            "stopped",
        ),
    }
    found |= {name: ("--tool memcheck", codec + tests, "clean") for name, tests in CODEC.items()}
    return found | (planted_checks(f"{faults} {SMALL}", cases) if faults else {})


def planted_checks(stress, cases):
    """The same of a fault build: faults that a tool must see, and kernels that racecheck can follow."""
    race = f"--tool racecheck {SKIP_REFERENCE}"
    found = {
        "racecheck_control": (
            race,
            f"{stress} --cases 6 --seed 17 --kernels portable --fault copy_not_awaited",
            "findings",
        )
    }
    for fault in ("copy_not_awaited", "sums_not_awaited"):
        command = f"{stress} --cases 6 --seed 19 --kernels strips --fault {fault}"
        found[f"racecheck_{fault}"] = race, command, "findings"
    found["racecheck_followed"] = race, f"{stress} --cases {cases(90)} --seed 14 --fault for_racecheck", "clean"
    return found


def findings(log):
    """{"what at which place": count} of a log of compute-sanitizer."""
    places = {}
    blocks = re.split(r"\n=+ *\n", log)
    for block in blocks:
        lines = [re.sub(r"^=+ ?", "", line) for line in block.splitlines()]
        titles = [
            i
            for i, line in enumerate(lines)
            if re.match(r"(Error|Barrier error|Uninit|Invalid|Warning|Race|Internal)", line)
        ]
        for i in titles:
            frames = [line.strip() for line in lines[i + 1 :] if re.match(r" +(at|and|Device Frame)", line)][:3]
            frames = [re.sub(r"\+0x[0-9a-f]+|\(unsigned.*?\)|\[\d+ hazards\]", "", frame) for frame in frames]
            place = f"{lines[i].strip()} {' | '.join(frames)}"
            places[place] = places.get(place, 0) + 1
    return places


def run(name, options, command, expected, logs, seconds):
    log = logs / f"{name}.log"
    sanitizer = ["compute-sanitizer", *options.split(), "--print-limit", "2000", "--error-exitcode", "9"]
    start = time.time()
    try:
        done = subprocess.run(
            [*sanitizer, "--log-file", str(log), *command.split()], capture_output=True, text=True, timeout=seconds
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        code, text = 124, f"{late.stdout or ''}"
    (logs / f"{name}.out").write_text(text)
    found = findings(log.read_text(errors="replace")) if log.exists() else {}
    reasons = {
        place: why
        for place in found
        for (check, pattern), why in EXPLAINED.items()
        if check == name and re.search(pattern, place)
    }
    open_findings = {place: count for place, count in found.items() if place not in reasons}
    ended = "RIGHT" in text or "PASSED" in text
    if expected == "findings":
        ok = bool(found)
    elif expected == "stopped":  # the tool stops the kernel at the finding
        ok = not open_findings and code != 124
    else:
        ok = not open_findings and ended and (code == 0 or bool(reasons))
    program = command.split("/")[-1]
    return dict(check=name, options=options, command=program, code=code, ok=ok, ended=ended) | dict(
        expected=expected,
        over=over(program),
        seconds=round(time.time() - start, 1),
        findings=found,
        explained=reasons,
        open=open_findings,
        last=text.strip()[-200:],
    )


def over(command):
    """What a check ran, in words."""
    given = dict(zip((words := command.split())[1:], words[2:], strict=False))
    if words[0] != "linear_stress":
        return command.partition("--gtest_filter=")[2] or words[0]
    text = f"{given['--cases']} cases on {given.get('--kernels', 'all kernels')}"
    return text + (f" with `{given['--fault']}`" if "--fault" in given else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("logs", type=pathlib.Path)
    parser.add_argument("--faults", type=pathlib.Path, help="linear_stress of a build with NYBBLE_FAULT_SWITCHES=ON")
    parser.add_argument("--part", type=float, default=1, help="of the usual numbers of cases")
    parser.add_argument("--only", help="names of checks, comma separated")
    parser.add_argument("--seconds", type=float, default=60, help="limit of one tool")
    parser.add_argument("--record", type=pathlib.Path, metavar="PATH", help="also write PATH.json and PATH.md")
    arguments = parser.parse_args()
    if not shutil.which("compute-sanitizer"):
        parser.exit(2, "no compute-sanitizer on PATH; it comes with the CUDA toolkit\n")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    todo = checks(arguments.build, arguments.faults, arguments.part)
    if arguments.only:
        todo = {name: todo[name] for name in arguments.only.split(",")}
    begun = time.time()
    with concurrent.futures.ThreadPoolExecutor(len(todo)) as pool:
        jobs = [pool.submit(run, name, *what, arguments.logs, arguments.seconds) for name, what in todo.items()]
        rows = [job.result() for job in jobs]
    print(f"{'check':24s} {'ok':3s} {'exit':>4s} {'s':>5s}  findings (explained)")
    for row in rows:
        total = sum(row["findings"].values())
        explained = sum(row["findings"][place] for place in row["explained"])
        verdict = "ok" if row["ok"] else "NO"
        print(f"{row['check']:24s} {verdict:3s} {row['code']:4d} {row['seconds']:5.1f}  {total} ({explained})")
        shown = row["explained"] | {place: "not explained" for place in list(row["open"])[:5]}
        for place, why in shown.items():
            print(f"    {row['findings'][place]} x {place[:230]}\n      {why}")
        if not row["ok"]:
            print(f"    output ends: {row['last']}")
    if arguments.record:
        faults = ["--faults LINEAR_STRESS_OF_A_FAULT_BUILD"] if arguments.faults else []
        only = [f"--only {arguments.only}"] if arguments.only else []
        words = [*faults, f"--part {arguments.part:g} --seconds {arguments.seconds:g}", *only]
        data = gpu_record.provenance() | {
            "question": "Do memcheck, initcheck, racecheck and synccheck find anything in the multiply and the codec?",
            "command": " ".join(["python tools/gpu_sanitize.py BUILD LOGS", *words]),
            "cores": os.cpu_count(),
            "seconds": round(time.time() - begun, 1),
            "rows": rows,
        }
        gpu_record.write(arguments.record, data, gpu_record.sanitize_page)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
