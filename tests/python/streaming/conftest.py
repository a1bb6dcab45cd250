"""The stores of the tiny models, made once a session."""

import gc
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from tiny_models import Store, write_store

import nybble
from nybble.gate.runner import one_thread


@pytest.fixture(scope="package", autouse=True)
def tiny_models_on_one_thread():
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def no_hooks_left():
    """A failed checkpointed forward keeps its saved-tensor hooks on until its traceback is collected; the next test
    would run under them.
    """
    yield
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def stores(request, tmp_path_factory):
    """stores(family): its folder, on each device in turn."""
    if request.param == "cuda" and not (torch.cuda.is_available() and nybble.build_info()["cuda"] is not None):
        pytest.skip("no GPU, or nybble was built without CUDA")

    def get(family: str = "llama") -> Store:
        if family not in _folders:
            _folders[family] = write_store(tmp_path_factory.mktemp(family), family)
        store = Store(_folders[family])
        store.device = torch.device(request.param)
        return store

    # Other attention backends add in an order that changes from run to run.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield get


_folders: dict[str, str] = {}  # by family; the bytes are the same for every device
