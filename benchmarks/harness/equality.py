#!/usr/bin/env python3
"""The equality gate as a script: same options and exit codes as `python -m nybble.gate equality`. No downloads.

python benchmarks/harness/equality.py [--device cpu|cuda] [--full] [--json] [--record PATH]
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["equality", *sys.argv[1:]]))
