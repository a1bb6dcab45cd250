"""Two ranks under torchrun: DDP over one host arena gives one process's gradients, and a rank that fails ends both."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

SCRIPT = pathlib.Path(__file__).with_name("ddp_rank.py")
SUMMATION = 1e-5  # two halves of a batch are summed in another order than the whole, in float32
LIMIT = 500  # seconds; mostly imports, on a busy machine


@pytest.fixture(scope="module")
def store(stores):
    if stores().device.type != "cpu":
        pytest.skip("the ranks of this test share no GPU; a job with two GPUs runs the same script")
    return stores()


class Run:
    """Two ranks, of which one fails after both have written what they found."""

    def __init__(self, folder: pathlib.Path, store: str):
        launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, SCRIPT, folder, store, "--fail-rank", "1"]
        with open(folder / "log", "w+") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            try:
                self.code = process.wait(timeout=LIMIT)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        ended = time.time()
        self.printed = (folder / "log").read_text()
        assert (folder / "failed-at").exists(), self.printed[:4000]
        self.seconds_after_failure = ended - float((folder / "failed-at").read_text())
        self.went_on = (folder / "went-on").exists()
        self.ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    return Run(tmp_path_factory.mktemp("ddp"), store)


@pytest.fixture
def ranks(run):
    return run.ranks


def test_the_same_batch_on_both_ranks_gives_the_bits_of_one_process(ranks):
    for found in ranks:
        assert found["same"] == found["again"] == found["compared"] >= 20


def test_a_split_batch_gives_the_mean_of_its_halves_and_the_whole_but_for_the_order_of_sums(ranks):
    for found in ranks:
        assert found["split"] == found["compared"]
        assert found["split_difference"] <= SUMMATION
        assert found["half_difference"] > 0.1  # the control: without the reduction it would be this


def test_nothing_of_the_base_is_broadcast_or_held_twice(ranks):
    first, second = ranks
    assert first["files"] == second["files"] and len(first["files"]) == 1
    for found in ranks:
        assert 0 < found["adapter_bytes"] <= found["broadcast_bytes"]
        assert found["broadcast_bytes"] <= found["adapter_bytes"] + 8 * found["buffer_bytes"] < found["host_bytes"]


def test_a_rank_that_fails_ends_the_other(run):
    assert run.code != 0 and "as it was told to" in run.printed
    assert run.seconds_after_failure < 60 and not run.went_on


def test_ddp_is_told_of_every_frozen_parameter_and_of_no_trained_one(stores):
    import peft
    from tiny_models import streamed_model, with_adapters

    base = streamed_model(stores())
    model = with_adapters(base)
    for outer in (model, base):
        left = set(outer._ddp_params_and_buffers_to_ignore)
        named = dict(outer.named_parameters())
        assert {name for name, p in named.items() if not p.requires_grad} <= left
        assert not left & {name for name, p in named.items() if p.requires_grad}
    assert isinstance(model, peft.PeftModel) and torch.is_tensor(next(model.parameters()))
