#!/usr/bin/env python3
"""The speed gate as a script: same options and exit codes as `python -m nybble.gate speed`. No downloads.

python benchmarks/harness/speed.py [--device cpu|cuda] [--full] [--json] [--record PATH]
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["speed", *sys.argv[1:]]))
