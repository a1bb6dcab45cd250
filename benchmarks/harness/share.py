#!/usr/bin/env python3
"""The share gate as a script: same options and exit codes as `python -m nybble.gate share`. No downloads.

python benchmarks/harness/share.py [--device cpu|cuda] [--full] [--json] [--record PATH]
"""

import sys

from nybble.gate.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["share", *sys.argv[1:]]))
