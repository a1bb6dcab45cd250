#!/usr/bin/env python3
"""Can the gates fail? Every mutation of the product against every gate, on the CPU, at the smallest sizes.

    python tests/python/gate/selftest.py [--only NAME,...] [--red]

Prints a table mutation x gate of exit codes. A cell is right when it is exactly the predicted one, and the row without
a mutation is green. --red leaves out the cells that a mutation must leave green. Exit code 1 when a cell is not as
predicted.
"""

import argparse
import contextlib
import io
import pathlib
import sys
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from made_up_times import made_up
from mutations import MUTATIONS

from nybble.gate.aliasing import cells
from nybble.gate.aliasing.gate import AliasingGate, run_on_one_thread
from nybble.gate.aliasing.stacks import Sizes as StackSizes
from nybble.gate.checks import run_checks
from nybble.gate.determinism.gate import DeterminismGate
from nybble.gate.determinism.gate import Sizes as DeterminismSizes
from nybble.gate.memory.gate import MemoryGate
from nybble.gate.memory.gate import Sizes as MemorySizes
from nybble.gate.numerics.gate import NumericsGate
from nybble.gate.numerics.gate import Sizes as NumericsSizes
from nybble.gate.runner import one_thread, run_gate
from nybble.gate.training.needs import missing
from nybble.gate.training.store import Shape

SMALL = Shape(64, 64, 3, 2, 1, 32)
WEIGHTS: dict = {}  # of the memory gate, which takes longest to draw them; no mutation touches them


def aliasing():
    with mock.patch.object(cells, "GROUPS", cells.GROUPS[:1]):
        return run_on_one_thread(AliasingGate(slots=(2,), sizes=StackSizes(layers=4, tokens=4)))


def numerics():
    return run_checks(NumericsGate("cpu", NumericsSizes(((33, 65),), (1, 6), 6)))


def determinism():
    return run_checks(DeterminismGate("cpu", DeterminismSizes(((64, 128),), (1, 5), 3, 6, 12)))


def memory():
    gate = MemoryGate("cpu", MemorySizes(((6144, 8192, 1),), (3,), 64, 4))
    gate.cells = [cell for cell in gate.cells if not cell.name.endswith("grad_input")]
    gate._weights |= WEIGHTS
    report = run_checks(gate)
    WEIGHTS.update(gate._weights)
    return report


def equality():
    return equality_on("cpu", SMALL, 4)


def equality_on(device, shape, tokens):
    """The first cell of the gate, on a Llama of this shape."""
    from nybble.gate.equality.gate import EqualityGate

    with one_thread(device == "cpu"):
        gate = EqualityGate(device, shape, tokens, (2,))
        try:
            gate.cells = gate.cells[:1]
            return run_gate(gate, algorithms="warn")
        finally:
            gate.close()


def exact():
    """One shape, one length: every pair of adapters and policy."""
    from nybble.gate.exact.command import ON_CPU
    from nybble.gate.exact.gate import ExactGate, Sizes

    with (
        one_thread(),
        contextlib.closing(ExactGate("cpu", Sizes({"small": SMALL}, (4,), (2,), ON_CPU, ON_CPU))) as gate,
    ):
        return run_gate(gate, algorithms="warn")


def race():
    """Copies are half as late as in the gate: most of its time is sleep."""
    from nybble.gate.race import gate as race

    late = mock.patch.dict(race.LATE_VISITS, cpu=race.LATE_VISITS["cpu"] / 2)
    with one_thread(), late, contextlib.closing(race.RaceGate("cpu", SMALL, 4, (0.0,), repeats=1)) as gate:
        return run_gate(gate, algorithms="warn")


def timed(kind):
    """Training is real, the times are made up: a CPU's say nothing about a card."""
    from nybble.gate.training.timed import Sizes

    with one_thread(), made_up(), contextlib.closing(kind("cpu", Sizes(SMALL, (4,), 5, 1e-12, "eager"))) as gate:
        return run_checks(gate)


def share():
    from nybble.gate.share.gate import ShareGate

    return timed(ShareGate)


def speed():
    from nybble.gate.speed.gate import SpeedGate

    return timed(SpeedGate)


TRAINING = {"equality": equality, "exact": exact, "race": race, "share": share, "speed": speed}
GATES = {"aliasing": aliasing, "numerics": numerics, "determinism": determinism, "memory": memory, **TRAINING}


def verdict(gate) -> int:
    """The exit code of a gate; a crash is no verdict, as on the command line."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return int(gate().verdict)
    except Exception as error:
        print(f"  {gate.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
        return 3


def rows(names, red):
    """(mutation, {gate: (found, expected)}) one after the other."""
    gates = {name: gate for name, gate in GATES.items() if name not in TRAINING or missing() is None}
    for mutation in MUTATIONS:
        if names is None or mutation.name in names:
            wanted = mutation.expected if red and mutation.expected else gates
            with mutation.plant():
                found = {name: verdict(gate) for name, gate in gates.items() if name in wanted}
            yield mutation, {name: (code, mutation.codes(name)) for name, code in found.items()}


def shown(codes) -> str:
    return "/".join(map(str, sorted(codes)))


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...")
    parser.add_argument("--red", action="store_true", help="only the gates that a mutation must turn red")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.only or ()) - {mutation.name for mutation in MUTATIONS}):
        parser.error(f"--only {','.join(unknown)}: no such mutation; there are {[m.name for m in MUTATIONS]}")
    wrong = 0
    print(f"{'mutation':<28}" + "".join(f"{name:<12}" for name in GATES))
    for mutation, found in rows(options.only, options.red):
        marks = {name: f"{got}" if got in want else f"{got} not {shown(want)}" for name, (got, want) in found.items()}
        wrong += sum(got not in want for got, want in found.values())
        print(f"{mutation.name:<28}" + "".join(f"{marks.get(name, '-'):<12}" for name in GATES), flush=True)
    print("0 ok, 1 product wrong, 2 a control did not fail, 3 no verdict, - not run")
    print("share and speed: real training, made-up times")
    print(
        f"gate-selftest: {wrong} cells are not as predicted" if wrong else "gate-selftest: every cell is as predicted"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
