"""Gates: claims about nybble, each with a control that must fail. `python -m nybble.gate NAME`.

A gate is a module or package here with `add_arguments(parser)` and `run(options) -> exit code`, built on runner.py.
"""

from nybble.gate import aliasing, determinism, equality, every, exact, memory, numerics, race, share, speed
from nybble.gate.runner import Report, Role, Verdict, run_gate

GATES = {
    "aliasing": aliasing,
    "numerics": numerics,
    "determinism": determinism,
    "memory": memory,
    "equality": equality,
    "exact": exact,
    "race": race,
    "share": share,
    "speed": speed,
    "all": every,
}

__all__ = ["GATES", "Report", "Role", "Verdict", "run_gate"]
