"""The first use of a device. Cards that are not here are injected as what the library would say of them."""

import ctypes
import types
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nybble
from nybble import devices

NOTE = "Tesla T4 has compute capability 7.5, and the fused multiply needs 8.0"


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch):
    monkeypatch.setattr(devices, "_seen", set())


@pytest.fixture
def library_says(monkeypatch):
    """library_says(text, status=0): the library's answer for every device. Returns the list of devices asked for."""
    asked = []

    def install(text: str, status: int = 0) -> list[int]:
        def answer(index, buffer, size):
            asked.append(index)
            ctypes.memmove(buffer, text.encode() + b"\0", len(text) + 1)
            return status

        monkeypatch.setattr(devices, "lib", types.SimpleNamespace(nybble_device_note=answer))
        return asked

    return install


def calls(device):
    weight = torch.randn(32, 64, device=device)
    packed, state = nybble.quantize_4bit(weight, quant_type="nf4")
    return [
        lambda: nybble.quantize_4bit(weight),
        lambda: nybble.dequantize_4bit(packed, state),
        lambda: nybble.linear(torch.randn(2, 64, device=device), packed, state),
        lambda: nybble.linear(torch.randn(2, 64, device=device).requires_grad_(), packed, state),
    ]


@pytest.mark.parametrize("first", range(4))
def test_a_note_is_said_once_whatever_comes_first(library_says, first):
    functions = calls("cpu")
    devices._seen.clear()
    asked = library_says(NOTE)
    with pytest.warns(UserWarning, match=f"^nybble: {NOTE}"):
        functions[first]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in functions:
            function()
    assert asked == [-1]


def test_a_device_with_nothing_to_note_is_silent(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in calls(device):
            function()
    assert len(devices._seen) == 1


def test_a_refusal_is_the_librarys_error_every_time(library_says, monkeypatch):
    functions = calls("cpu")
    devices._seen.clear()
    library_says("", status=1)
    words = "the NVIDIA driver takes CUDA up to 12.8"
    monkeypatch.setattr("nybble._library.last_error", lambda: (words, 5))
    for function in functions * 2:
        with pytest.raises(nybble.UnsupportedError, match=words):
            function()


def test_devices_of_other_makers_are_refused_before_the_library_is_asked(library_says, monkeypatch):
    asked = library_says("")
    for kind in ("xpu", "mps"):
        with pytest.raises(
            nybble.UnsupportedError, match=f"a tensor is on {kind}: nybble multiplies on CPUs and NVIDIA"
        ):
            devices.device_note(torch.device(kind))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(nybble.UnsupportedError, match=r"AMD GPU \(torch for ROCm 7\.0\)"):
        devices.device_note(torch.device("cuda", 0))
    assert asked == []


def test_a_gpu_that_is_not_there_is_an_error_from_the_library():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = "no NVIDIA driver is loaded|found 0 devices|built without CUDA"
    with pytest.raises(nybble.UnsupportedError, match=words):
        devices.device_note(torch.device("cuda", 0))


def test_meta_and_fake_tensors_need_no_device(library_says):
    asked = library_says("", status=1)
    packed, state = nybble.quantize_4bit(torch.empty(32, 64, device="meta"), quant_type="nf4")
    assert packed.shape == (1024, 1) and state.absmax.is_meta
    with FakeTensorMode():
        packed, _ = nybble.quantize_4bit(torch.empty(32, 64, device="cuda"), quant_type="nf4")
        assert packed.device.type == "cuda" and packed.shape == (1024, 1)
    assert asked == [] and not devices._seen
