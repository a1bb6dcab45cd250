"""The stores of the tiny models, made once a session."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from tiny_models import write_store

from nybble._library import lib


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """The models are tiny: threads only wait for each other."""
    before = torch.get_num_threads(), lib.nybble_num_threads()
    torch.set_num_threads(1)
    lib.nybble_set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    lib.nybble_set_num_threads(before[1])


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    made = {}

    def get(family: str = "llama") -> str:
        if family not in made:
            made[family] = write_store(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get
