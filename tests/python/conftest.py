"""Set-up of all Python tests: says when the library is not built, prints the build, and offers every device there is.

NYBBLE_REQUIRE_GPU=1 turns "no GPU here" into a failure, so that a GPU run can't pass by skipping.
"""

import gc
import os

import pytest

try:
    import nybble
except ImportError as error:
    raise pytest.UsageError(f"nybble cannot be imported: {error}") from error

import torch

REQUIRE_GPU = os.environ.get("NYBBLE_REQUIRE_GPU") == "1"


def has_gpu() -> bool:
    return torch.cuda.is_available() and nybble.build_info()["cuda"] is not None


def pytest_report_header(config):
    info = nybble.build_info()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"nybble: {info} gpu: {gpu}"


def pytest_sessionstart(session):
    if REQUIRE_GPU and not has_gpu():
        cuda, gpus = nybble.build_info()["cuda"], torch.cuda.device_count()
        raise pytest.UsageError(
            f"NYBBLE_REQUIRE_GPU=1, but torch sees {gpus} GPUs and nybble was built for CUDA {cuda}"
        )


def pytest_collection_finish(session):
    """What was imported stays: the collector, which many tests call, no longer walks through it (0.5 s a time)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> torch.device:
    """Each test that asks for a device runs on the CPU and, where there is one, on the GPU."""
    if request.param == "cuda" and not has_gpu():
        pytest.skip("no GPU, or nybble was built without CUDA")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
