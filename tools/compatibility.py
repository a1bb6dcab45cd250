"""Tries nybble.patch with several versions of torch, transformers, PEFT, bitsandbytes and TRL, each set in an
environment of its own, and writes docs/compatibility.md.

    python tools/compatibility.py [--only NAME,...] [--build-dir build/dev] [--keep]      needs the network

A set passes when tests/python/patching passes in it on the CPU: models built from a BitsAndBytesConfig, PEFT, Trainer,
SFTTrainer, saved files, bad input. Rows of sets that are not tried keep their last result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "trl", "accelerate")
# From the oldest that is promised to the newest that exists ("": whatever the installer takes).
SETS = {
    "oldest": dict(
        torch="==2.10.0", transformers="==4.57.6", peft="==0.18.0", bitsandbytes="==0.49.2", trl="==0.24.0",
        accelerate="==1.11.0",
    ),
    "development": dict(
        torch="==2.11.0", transformers="==5.24.0", peft="==0.21.2", bitsandbytes="==0.50.2", trl="==1.16.0",
        accelerate="==1.15.0",
    ),
    "newest": dict.fromkeys(PACKAGES, ""),
}  # fmt: skip
TOOLS = ("pytest", "pytest-timeout", "numpy")
MARK = "<!-- results: {} -->"


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def install(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The interpreter of a set's environment; RuntimeError with the installer's words."""
    wanted = [package + version for package, version in SETS[name].items()]
    uv = [sys.executable, "-m", "uv"]
    python = folder / "bin" / "python"
    for command in (
        [*uv, "venv", "-q", "--clear", "--python", sys.executable, str(folder)],
        [*uv, "pip", "install", "-q", "--python", str(python), *wanted, *TOOLS],
    ):
        result = run(command)
        if result.returncode != 0:
            raise RuntimeError(result.stderr.strip()[-400:])
    return python


def versions(python: pathlib.Path) -> dict[str, str]:
    code = f"import importlib.metadata as m, json; print(json.dumps({{p: m.version(p) for p in {PACKAGES}}}))"
    return json.loads(run([str(python), "-c", code], check=True).stdout)


def test(python: pathlib.Path, build_dir: pathlib.Path) -> tuple[str, list[str]]:
    """pytest's closing line without its time, and the names of failed tests."""
    environment = dict(
        os.environ, PYTHONPATH="python", NYBBLE_BUILD_DIR=str(build_dir.resolve()), HF_HUB_OFFLINE="1",
        OMP_WAIT_POLICY="PASSIVE", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600", "tests/python/patching"]
    output = run(command, env=environment).stdout
    closing = re.findall(r"^(?:\d+ \w+(?:, )?)+.* in [\d.]+s.*$", output, re.M)
    failed = re.findall(r"^(?:FAILED|ERROR) \S+/(\S+)", output, re.M)
    if not closing:
        return "did not run: " + output.strip()[-200:].replace("\n", " "), failed
    return re.sub(r",? ?\d+ warnings?|,? in [\d.]+s.*", "", closing[-1]), failed


def try_set(name: str, build_dir: pathlib.Path, keep: bool) -> dict:
    folder = ROOT / "build" / "compatibility" / name
    row = dict(date=datetime.date.today().isoformat(), failed=[])
    try:
        python = install(name, folder)
        row["versions"] = versions(python)
        row["result"], row["failed"] = test(python, build_dir)
    except RuntimeError as error:
        row.update(versions=SETS[name], result=f"cannot be installed: {error}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return row


def previous() -> dict[str, dict]:
    if not PAGE.is_file():
        return {}
    found = re.search(MARK.format("(.*?)"), PAGE.read_text(), re.S)
    return json.loads(found.group(1)) if found else {}


def page(rows: dict[str, dict]) -> str:
    lines = [
        "# Versions that were tried",
        "",
        "Written by `python tools/compatibility.py`, which installs each set into an environment of its own and runs "
        "`tests/python/patching` in it on the CPU.",
        "",
        "| set | " + " | ".join(PACKAGES) + " | tests | date |",
        "|---" * (len(PACKAGES) + 3) + "|",
    ]
    for name, row in rows.items():
        cells = [row["versions"].get(package, "") for package in PACKAGES]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {row['result']} | {row['date']} |")
    for name, row in rows.items():
        if row["failed"]:
            lines += ["", f"{name}, failed: " + ", ".join(f"`{test}`" for test in row["failed"])]
    return "\n".join([*lines, "", MARK.format(json.dumps(rows)), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of sets, with commas: " + ", ".join(SETS))
    parser.add_argument("--build-dir", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--keep", action="store_true", help="keep the environments in build/compatibility")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(SETS)
    if unknown := set(names) - set(SETS):
        parser.error(f"unknown sets {sorted(unknown)}, expected some of {', '.join(SETS)}")
    rows = previous()
    for name in names:
        rows[name] = try_set(name, arguments.build_dir, arguments.keep)
        print(name, rows[name]["result"], *rows[name]["failed"], flush=True)
        rows = {key: rows[key] for key in SETS if key in rows}
        PAGE.write_text(page(rows))
    return 1 if any(rows[name]["failed"] for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
