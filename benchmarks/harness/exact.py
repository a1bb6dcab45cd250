#!/usr/bin/env python3
"""The exact gate as a script: same options and exit codes as `python -m nybble.gate exact`. No downloads.

python benchmarks/harness/exact.py [--device cpu|cuda] [--full] [--json] [--record PATH]
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["exact", *sys.argv[1:]]))
