#!/usr/bin/env python3
"""Wrong gradients from recycled weight buffers, and nybble's right ones: the aliasing gate as a script.

    python benchmarks/harness/aliasing.py [--device cpu|cuda] [--json] [--slots 2,3] [--layers 8] [--bypass-pool]

Same options and exit codes as `python -m nybble.gate aliasing`. No downloads; kilobytes are enough.
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["aliasing", *sys.argv[1:]]))
