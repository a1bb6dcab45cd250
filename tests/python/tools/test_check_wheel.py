"""The check of a built wheel sees each fault that it looks for."""

import importlib.util
import pathlib
import shutil
import sys
import zipfile

import pytest

from nybble import _library

SCRIPT = pathlib.Path(__file__).resolve().parents[3] / "tools" / "check_wheel.py"
NAME = "nybble-0.1.0-py3-none-manylinux_2_35_x86_64.whl"

pytestmark = pytest.mark.skipif(
    shutil.which("objdump") is None or not SCRIPT.is_file(), reason="needs objdump and a checkout"
)


@pytest.fixture
def check():
    spec = importlib.util.spec_from_file_location("check_wheel", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.NEWEST = dict.fromkeys(module.NEWEST, (99,))  # this build may be for a newer system than a wheel's
    return module


@pytest.fixture
def wheel(tmp_path):
    """wheel(**changes): a wheel of this build's own library, Python in the place of the command. None leaves out."""

    def make(name=NAME, **changes):
        files = {
            "nybble/_lib/libnybble_torch.so": _library.path,
            "nybble/_lib/libhwy.so.1": _library.path.parent / "libhwy.so.1",
            "nybble/_lib/nybble": _library.path.parent / "libhwy.so.1",
            "nybble-0.1.0.data/scripts/nybble": SCRIPT,
        } | changes
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:  # as wheels are
            for inside, path in files.items():
                if path is not None:
                    archive.write(path, inside)
        return tmp_path / name

    return make


def test_the_library_of_this_build_has_no_fault(check, wheel):
    assert check.check(wheel()) == []


def test_every_fault_is_named(check, wheel, monkeypatch):
    (fault,) = check.check(wheel(name=NAME.replace("manylinux_2_35", "linux")))
    assert "tag" in fault and "expected py3-none-manylinux_2_35_x86_64" in fault
    assert check.check(wheel(**{"nybble/_lib/nybble": None})) == ["nybble is not in the wheel"]
    assert check.check(wheel(**{"nybble-0.1.0.data/scripts/nybble": None})) == ["the script nybble is not in the wheel"]
    (fault,) = check.check(wheel(**{"nybble/_lib/libother.so": sys.executable}))
    assert fault == "libother.so is in the wheel, not expected"
    faults = check.check(wheel(**{"nybble/_lib/libhwy.so.1": _library.path}))
    assert "libhwy.so.1 links libtorch.so" in faults
    monkeypatch.setitem(check.NEWEST, "GLIBC", (2, 1))
    assert any("needs GLIBC_2." in fault and "expected" in fault for fault in check.check(wheel()))
    monkeypatch.setattr(check, "LARGEST_MB", 0)
    assert any("at most 0 expected" in fault for fault in check.check(wheel()))
