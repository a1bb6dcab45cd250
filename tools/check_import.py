#!/usr/bin/env python3
"""Fails when `import nybble` adds more than 0.3 s of processor time to `import torch`, warns, or uses a checkout."""

from __future__ import annotations

import json
import subprocess
import sys

LONGEST_S = 0.3
CODE = """
import sys, time, warnings
warnings.simplefilter("error")
import torch
begin = time.process_time()  # a busy machine stretches the clock on the wall
import nybble
seconds = time.process_time() - begin
import json
print(json.dumps([seconds, nybble.build_info(), "transformers" in sys.modules]))
"""


def main() -> int:
    runs = []
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
        if result.returncode or result.stderr:
            print(f"check_import: import nybble failed or printed:\n{result.stderr}", file=sys.stderr)
            return 1
        runs.append(json.loads(result.stdout))
    seconds, info, heavy = min(runs)
    print(json.dumps(info))
    print(f"import nybble: {seconds:.3f} s after torch, at most {LONGEST_S} expected")
    if "site-packages" not in info["library"]:
        print(f"check_import: {info['library']} is not the installed package", file=sys.stderr)
        return 1
    if heavy:
        print("check_import: import nybble also imports transformers", file=sys.stderr)
        return 1
    return 0 if seconds <= LONGEST_S else 1


if __name__ == "__main__":
    sys.exit(main())
