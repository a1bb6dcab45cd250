#!/usr/bin/env python3
"""The numerics gate as a script: same options and exit codes as `python -m nybble.gate numerics`. No downloads.

python benchmarks/harness/numerics.py [--device cpu|cuda] [--full] [--json] [--record PATH]
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["numerics", *sys.argv[1:]]))
