import pytest
import torch

from nybble.support import reason_against, require_torch, torch_report


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0a0+git1234", "2.11.0+cu130", "2.15.1", "3.0.0"])
def test_torch_from_2_10_on_is_taken(version):
    require_torch(version)


@pytest.mark.parametrize("version", ["2.9.1+cu128", "1.13.0", "2.2.0"])
def test_an_older_torch_is_named_with_what_is_needed(version):
    with pytest.raises(ImportError, match=f"torch {version.replace('+', '.')} found, nybble needs 2.10 or newer: pip"):
        require_torch(version)


def test_devices(monkeypatch):
    cuda = torch.device("cuda")
    assert reason_against(torch.device("cpu"), built_for_cuda=False) is None
    assert reason_against(cuda, built_for_cuda=True) is None
    assert "built without CUDA" in reason_against(cuda, built_for_cuda=False)
    for kind in ("xpu", "mps"):
        assert reason_against(torch.device(kind), built_for_cuda=True).startswith(f"on {kind}: nybble multiplies on")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "AMD GPU (torch for ROCm 7.0)" in reason_against(cuda, built_for_cuda=True)
    assert reason_against(torch.device("cpu"), built_for_cuda=True) is None


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("hip", "7.0", "is built for ROCm 7.0"),
        ("xpu", "20250101", "is built for XPU"),
        ("mps", True, "is built for MPS"),
    ],
)
def test_torch_builds_for_other_makers_are_reported(monkeypatch, attribute, value, words):
    assert torch_report()["problem"] == ""
    if attribute == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: value)
    else:
        monkeypatch.setattr(torch.version, attribute, value, raising=False)
    report = torch_report()
    assert words in report["problem"] and "runs on the CPU only" in report["problem"]
    assert report["torch"] == torch.__version__
