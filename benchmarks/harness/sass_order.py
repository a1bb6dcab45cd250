"""Have all loads from shared memory arrived before the same thread starts a TMA load? From SASS alone: no GPU.

    python sass_order.py LIBRARY [--kernels PART_OF_A_NAME] [--cuobjdump cuobjdump]

A warp that refills the buffer which it has just read relies on it (src/linear/hopper_decode.cuh): to the compiler the
two have nothing to do with each other, and the TMA unit does not wait for loads that are under way. A load has arrived
where an instruction names a register that it fills, since that waits for it. Follows every path through a kernel.
Exit status 1 when a path reaches a TMA load with a load under way, or when no kernel has both.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

REFILLS = ("UTMALDG", "UBLKCP.S.G")
WORDS = {"64": 2, "128": 4}


@dataclass(frozen=True)
class Instruction:
    address: int
    guarded: bool  # by a predicate
    name: str
    operands: str
    registers: frozenset[int]

    def filled(self) -> frozenset[int]:
        """Registers that a load from shared memory fills."""
        if not re.match(r"LDSM?\b", self.name):
            return frozenset()
        first = re.match(r"R(\d+)", self.operands)
        words = next((count for width, count in WORDS.items() if width in self.name.split(".")), 1)
        if self.name.startswith("LDSM"):
            words = int(re.search(r"\.(\d)$", self.name)[1]) if re.search(r"\.[24]$", self.name) else 1
        return frozenset(range(int(first[1]), int(first[1]) + words)) if first else frozenset()


def read_kernels(sass):
    """Kernel -> its instructions."""
    kernels = {}
    for text in re.split(r"\n\s*Function : ", sass)[1:]:
        kernel = kernels.setdefault(text.split("\n", 1)[0].strip(), [])
        for address, guard, name, operands in re.findall(
            r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+ +)?([A-Z][\w.]*)(.*?);", text
        ):
            registers = frozenset(int(number) for number in re.findall(r"\bR(\d+)\b", operands))
            kernel.append(Instruction(int(address, 16), bool(guard), name, operands.strip(), registers))
    return kernels


def successors(kernel, places, i):
    one, base = kernel[i], kernel[i].name.split(".")[0]
    found = [i + 1] if i + 1 < len(kernel) else []
    if base in ("BRA", "CALL", "JMP", "WARPSYNC"):
        target = re.search(r"\b0x([0-9a-f]+)\)?$", one.operands)
        always = base in ("BRA", "JMP") and not one.guarded and re.fullmatch(r"0x[0-9a-f]+", one.operands)
        if target and int(target[1], 16) in places:
            found = ([] if always else found) + [places[int(target[1], 16)]]
    elif base in ("EXIT", "RET") and not one.guarded:
        found = []
    return found


def loads_under_way(kernel):
    """([(address of the load, address of the TMA load)], number of loads, number of TMA loads)."""
    places = {one.address: i for i, one in enumerate(kernel)}
    filled = [one.filled() for one in kernel]
    before = [None] * len(kernel)  # loads that may be under way in front of an instruction
    before[0], todo = frozenset(), [0]
    while todo:
        i = todo.pop()
        after = frozenset(load for load in before[i] if not filled[load] & kernel[i].registers)
        if filled[i]:
            after |= {i}
        for j in successors(kernel, places, i):
            joined = after if before[j] is None else before[j] | after
            if joined != before[j]:
                before[j] = joined
                todo.append(j)
    refills = [i for i, one in enumerate(kernel) if one.name.startswith(REFILLS)]
    found = [(kernel[load].address, kernel[i].address) for i in refills for load in sorted(before[i] or ())]
    return found, sum(map(bool, filled)), len(refills)


def check(sass, part):
    """(number of kernels with loads and TMA loads, lines about those that are wrong)."""
    seen, lines = 0, []
    for name, kernel in read_kernels(sass).items():
        if part not in name or not kernel:
            continue
        found, loads, refills = loads_under_way(kernel)
        seen += bool(loads and refills)
        lines += [f"{name}: the load at 0x{load:x} may be under way at the TMA load at 0x{at:x}" for load, at in found]
    return seen, lines


def listing(cuobjdump, file, part):
    """SASS of the sm_90a code in a file; of a library only units that name the kernels: the rest takes minutes."""
    with tempfile.TemporaryDirectory() as folder:
        extract = [cuobjdump, "-xelf", "all", "-arch", "sm_90a", str(file.resolve())]
        subprocess.run(extract, cwd=folder, capture_output=True, check=False)  # a cubin has nothing to extract
        units = sorted(pathlib.Path(folder).iterdir()) or [file]
        dumps = [[cuobjdump, "-sass", str(unit)] for unit in units if part.encode() in unit.read_bytes()]
        return "".join(subprocess.run(dump, capture_output=True, text=True, check=True).stdout for dump in dumps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--kernels", default="", help="only those whose mangled name contains this")
    parser.add_argument("--cuobjdump", default="cuobjdump")
    arguments = parser.parse_args()
    sass = listing(arguments.cuobjdump, arguments.library, arguments.kernels)
    seen, lines = check(sass, arguments.kernels)
    print("\n".join([*lines, f"{seen} kernels with loads and TMA loads, {len(lines)} loads under way"]))
    return 1 if lines or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
