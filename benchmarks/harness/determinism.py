#!/usr/bin/env python3
"""The determinism gate as a script: same options and exit codes as `python -m nybble.gate determinism`. No downloads.

python benchmarks/harness/determinism.py [--device cpu|cuda] [--full] [--json] [--record PATH]
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["determinism", *sys.argv[1:]]))
