import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

import nybble
from nybble import _library


def run_python(code, **environment):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_build_info_says_what_runs():
    info = nybble.build_info()
    assert info["torch"] == torch.__version__ and info["version"] == nybble.__version__
    assert os.path.samefile(info["library"], _library.path)
    assert (info["cuda"] is None) == (info["cuda_targets"] == "")
    assert "-O" in info["flags"] and "-ffp-contract=off" in info["flags"]
    json.dumps(info)


def test_importing_nybble_costs_little_beyond_torch_and_brings_no_other_framework():
    code = (
        "import torch, time, sys; start = time.process_time(); import nybble; used = time.process_time() - start; "
        "print(used, [m for m in ('transformers', 'peft', 'bitsandbytes') if m in sys.modules])"
    )
    seconds, frameworks = run_python(code).stdout.split(maxsplit=1)
    assert float(seconds) < 0.3 and frameworks.strip() == "[]"


def test_a_library_that_is_not_built_is_an_import_error_with_advice(tmp_path):
    result = run_python("import nybble", NYBBLE_BUILD_DIR=str(tmp_path))
    assert result.returncode != 0
    assert "ImportError" in result.stderr and str(tmp_path) in result.stderr and "NYBBLE_BUILD_DIR" in result.stderr


def test_cuda_symbols_of_torch_are_weak_so_that_a_cpu_torch_loads_the_library():
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm here")
    symbols = subprocess.run([nm, "-D", str(_library.path)], capture_output=True, text=True, check=True).stdout
    undefined = [line.split() for line in symbols.splitlines() if " U " in line or " w " in line]
    torch_cuda = [kind for kind, name in undefined if "cuda" in name and name != "aoti_torch_device_type_cuda"]
    assert all(kind == "w" for kind in torch_cuda), undefined


def test_the_library_has_no_fault_switches():
    content = _library.path.read_bytes()
    assert b"nybble_fault_switches_mark" not in content
    assert b"nybble_version" in content, "the search finds what is there"
