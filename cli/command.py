#!python
"""Starts the installed package's `nybble` command without importing the package (and with it torch)."""

import importlib.util
import os
import pathlib
import sys

package = importlib.util.find_spec("nybble")
if package is None or package.origin is None:
    sys.exit("nybble: the nybble package is not installed for " + sys.executable)
command = pathlib.Path(package.origin).parent / "_lib" / "nybble"
os.environ.setdefault("NYBBLE_PYTHON", sys.executable)  # bench and tune run the package
os.execv(command, [str(command), *sys.argv[1:]])
