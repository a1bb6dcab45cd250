#!/usr/bin/env python3
"""The memory gate as a script: same options and exit codes as `python -m nybble.gate memory`. No downloads.

python benchmarks/harness/memory.py [--device cpu|cuda] [--full] [--json] [--record PATH]
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["memory", *sys.argv[1:]]))
