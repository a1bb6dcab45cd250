#!/usr/bin/env python3
"""The race gate as a script: same options and exit codes as `python -m nybble.gate race`. No downloads.

python benchmarks/harness/race.py [--device cpu|cuda] [--full] [--json] [--record PATH]
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["race", *sys.argv[1:]]))
