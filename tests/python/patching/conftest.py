"""Dense checkpoints of the tiny models, made once a session, and one thread: the models are tiny."""

import pytest
import torch

from nybble._library import lib

from .models import write_dense


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads(), lib.nybble_num_threads()
    torch.set_num_threads(1)
    lib.nybble_set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    lib.nybble_set_num_threads(before[1])


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    made = {}

    def get(family: str = "Llama") -> str:
        if family not in made:
            made[family] = write_dense(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get
