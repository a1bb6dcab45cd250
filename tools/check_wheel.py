#!/usr/bin/env python3
"""Fails when a wheel is larger, links more, or needs a newer system than Nybble promises.

    python tools/check_wheel.py dist/nybble-*.whl

Ubuntu 22.04 must load it: GLIBC 2.35 and GLIBCXX 3.4.30 are the newest symbol versions. At load no library of CUDA may
be needed: torch's CUDA symbols are weak, the CUDA runtime is static and opens the driver when it is first used.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

NEWEST = {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13)}
LARGEST_MB = 40
SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
TORCH = {"libtorch.so", "libtorch_cpu.so"}
NEEDS = {
    "libnybble_torch.so": SYSTEM | TORCH | {"libhwy.so.1"},
    "nybble": SYSTEM | {"libhwy.so.1"},
    "libhwy.so.1": SYSTEM,
}


def objdump(*args: str) -> str:
    return subprocess.run(["objdump", *args], capture_output=True, text=True, check=True).stdout


def needed_versions(path: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """The newest symbol version of each family that the file asks of the system."""
    newest: dict[str, tuple[int, ...]] = {}
    for family, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", objdump("-T", str(path))):
        number = tuple(int(part) for part in version.split("."))
        newest[family] = max(newest.get(family, ()), number)
    return newest


def faults_of(path: pathlib.Path) -> list[str]:
    needed = set(re.findall(r"NEEDED\s+(\S+)", objdump("-p", str(path))))
    faults = [f"{path.name} links {name}" for name in sorted(needed - NEEDS[path.name])]
    versions = needed_versions(path)
    for family, version in versions.items():
        if version > NEWEST[family]:
            newest = ".".join(map(str, NEWEST[family]))
            faults.append(f"{path.name} needs {family}_{'.'.join(map(str, version))}, at most {newest} expected")
    words = ", ".join(f"{family} {'.'.join(map(str, version))}" for family, version in sorted(versions.items()))
    if b"nybble_fault_switches_mark" in path.read_bytes():
        faults.append(f"{path.name} was built with NYBBLE_FAULT_SWITCHES=ON")
    size = path.stat().st_size / 1e6
    print(f"  {path.name}: {size:.1f} MB, newest symbols {words}; links {', '.join(sorted(needed))}")
    return faults


def check(wheel: pathlib.Path) -> list[str]:
    """Every fault of the wheel, in words."""
    size = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {size:.1f} MB")
    faults = [f"{size:.1f} MB, at most {LARGEST_MB} expected"] if size > LARGEST_MB else []
    if "-py3-none-manylinux_2_35_x86_64" not in wheel.name:
        faults.append(f"tag of {wheel.name}, expected py3-none-manylinux_2_35_x86_64")
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        binaries = {path.name: path for path in pathlib.Path(folder).rglob("*") if is_elf(path)}
        faults += [f"{name} is not in the wheel" for name in NEEDS.keys() - binaries.keys()]
        faults += [f"{name} is in the wheel, not expected" for name in binaries.keys() - NEEDS.keys()]
        for name in sorted(NEEDS.keys() & binaries.keys()):
            faults += faults_of(binaries[name])
        if not list(pathlib.Path(folder).glob("*.data/scripts/nybble")):
            faults.append("the script nybble is not in the wheel")
    return faults


def is_elf(path: pathlib.Path) -> bool:
    return path.is_file() and path.open("rb").read(4) == b"\x7fELF"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    faults = check(pathlib.Path(sys.argv[1]))
    for fault in faults:
        print(f"check_wheel: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
