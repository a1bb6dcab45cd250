"""`python -m nybble.gate NAME [options]`: runs one gate.

The exit code is its verdict: 0 ok, 1 product wrong, 2 a control did not fail as predicted, 3 no verdict (also after a
crash); 64 for a bad command line, which must not look like a verdict.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

USAGE = 64


class Parser(argparse.ArgumentParser):
    """argparse ends with 2 on a bad command line: that is a verdict here."""

    def error(self, message: str):
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the gate that `arguments` name (sys.argv without the program by default) and returns its exit code."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable cuBLAS; read when CUDA starts
    from nybble.gate import GATES, Verdict

    parser = Parser(prog="python -m nybble.gate", description="Runs one gate; the exit code is its verdict.")
    commands = parser.add_subparsers(dest="gate", required=True, metavar="NAME")
    for name, gate in GATES.items():
        gate.add_arguments(commands.add_parser(name, help=(gate.__doc__ or "").strip().splitlines()[0]))
    options = parser.parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return GATES[options.gate].run(options)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except Exception:
        traceback.print_exc()
        print(f"{options.gate}: NO VERDICT: the gate itself failed (exit {int(Verdict.NO_VERDICT)})", file=sys.stderr)
        return int(Verdict.NO_VERDICT)


if __name__ == "__main__":
    sys.exit(main())
