"""Dense checkpoints of the tiny models, made once a session, and one thread: the models are tiny."""

import pytest

from nybble.gate.runner import one_thread

from .models import write_dense


@pytest.fixture(scope="package", autouse=True)
def tiny_models_on_one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    made = {}

    def get(family: str = "Llama") -> str:
        if family not in made:
            made[family] = write_dense(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get
