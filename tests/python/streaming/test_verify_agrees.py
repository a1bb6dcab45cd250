"""`nybble verify` and nybble.stream have one rule."""

import os
import pathlib
import shutil
import subprocess

import pytest
from store_faults import FAULTS, GOOD, PLAIN_FAULTS, damaged, plain

# verify is about any 4-bit tensor, streaming about matrices.
NO_FAULT_OF_A_TENSOR = ("shape of three",)


@pytest.fixture
def verify():
    """nybble verify of a folder: its exit code and what it says."""
    command = pathlib.Path(os.environ.get("NYBBLE_BUILD_DIR", "")) / "cli" / "nybble"
    if not command.is_file():
        pytest.skip("not run: the nybble command is not built here")

    def run(folder) -> tuple[int, str]:
        done = subprocess.run([command, "verify", folder], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_nybble_verify_finds_what_streaming_refuses_and_passes_its_good_twins(stores, verify, tmp_path):
    if stores().device.type != "cpu":
        pytest.skip("about files only")
    for fault, (change, tensor, *_) in (FAULTS | PLAIN_FAULTS).items():

        def both(tensors, fault=fault, change=change):
            if fault in PLAIN_FAULTS:
                plain(tensors)
            change(tensors)

        code, said = verify(damaged(stores(), tmp_path / "store", both))
        found = code != 0 and tensor in said
        assert found == (fault not in NO_FAULT_OF_A_TENSOR), (fault, said)
        shutil.rmtree(tmp_path / "store")
    for name, change in GOOD.items():
        assert verify(damaged(stores(), tmp_path / name, change))[0] == 0, name
