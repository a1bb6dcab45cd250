"""Two processes over gloo: DDP and FSDP2 with patched modules give the gradients of one process."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nybble

from .models import LINEARS, assert_same, batch, load, qlora, step, with_adapters, worst_difference

RANKS = 2
F32 = torch.float32
# Two halves of a batch are summed in another order than the whole.
SUMMATION = 1e-5


def ddp_same_batch(path, rank):
    model = qlora(path, mode="auto", compute_dtype=F32)
    return step(DistributedDataParallel(model), batch())


def ddp_split_batch(path, rank):
    model = qlora(path, mode="auto", compute_dtype=F32)
    return step(DistributedDataParallel(model), batch()[rank : rank + 1])


def ddp_spoilt_rank(path, rank):
    """The control: one process multiplies with other weights."""
    model = qlora(path, mode="auto", compute_dtype=F32)
    ddp = DistributedDataParallel(model)
    if rank == 1:
        for module in model.modules():
            if hasattr(module, "nybble_mode"):
                module.weight.data = module.weight.data.flip(0)
    return step(ddp, batch())


def sharded(path, patch_first: bool):
    """A model under FSDP2, its weights stored as float32: one group holds one dtype."""
    model = with_adapters(load(path, F32, bnb_4bit_quant_storage=F32))
    if patch_first:
        nybble.patch(model, mode="auto")
    mesh = init_device_mesh("cpu", (RANKS,))  # without it a GPU of the machine would be taken
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not patch_first:
        nybble.patch(model, mode="auto")
    nybble.reset_path_counters()
    found = step(model.train(), batch())
    assert nybble.path_counters()["cpu"]["grad_input"] == LINEARS - 3  # nothing below the first q, k, v
    return {name: t.full_tensor() if name != "loss" else t for name, t in found.items()}


def fsdp_patched_before(path, rank):
    return sharded(path, True)


def fsdp_patched_after(path, rank):
    return sharded(path, False)


ARMS = [ddp_same_batch, ddp_split_batch, ddp_spoilt_rank, fsdp_patched_before, fsdp_patched_after]


def process(rank, path, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        for arm in ARMS:
            torch.save(arm(path, rank), folder / f"{arm.__name__} {rank}.pt")
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def results(dense, tmp_path_factory):
    """{arm: [what rank 0 found, what rank 1 found]}"""
    folder = tmp_path_factory.mktemp("ranks")
    # A fork has everything imported already; where there is a GPU it may not be used any more after one.
    method = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(
        process, (dense("Qwen2"), free_port(), folder), nprocs=RANKS, start_method=method
    )
    found = {}
    for arm in ARMS:
        ranks = [torch.load(folder / f"{arm.__name__} {rank}.pt") for rank in range(RANKS)]
        found[arm] = [{name.removeprefix("module."): t for name, t in rank.items()} for rank in ranks]
    return found


@pytest.fixture(scope="module")
def alone(dense):
    return step(qlora(dense("Qwen2"), mode="auto", compute_dtype=F32), batch())


def gradients(found):
    return {name: tensor for name, tensor in found.items() if name != "loss"}


def test_ddp_with_the_same_batch_gives_the_bits_of_one_process(results, alone):
    for found in results[ddp_same_batch]:
        assert_same(found, alone, at_least=29)
    for found in results[ddp_spoilt_rank]:
        assert worst_difference(gradients(found), gradients(alone)) > 0.1


def test_ddp_with_a_split_batch_differs_by_the_order_of_sums(results, alone):
    first, second = results[ddp_split_batch]
    assert_same(gradients(first), gradients(second), at_least=28)
    assert worst_difference(gradients(first), gradients(alone)) <= SUMMATION
    loss = (first["loss"] + second["loss"]) / 2
    assert torch.allclose(loss, alone["loss"], rtol=1e-6) and first["loss"] != second["loss"]


@pytest.mark.parametrize("arm", [fsdp_patched_before, fsdp_patched_after])
def test_fsdp2_gives_the_gradients_of_one_process(results, dense, arm):
    alone = with_adapters(load(dense("Qwen2"), F32, bnb_4bit_quant_storage=F32)).train()
    nybble.patch(alone, mode="auto")
    expected = step(alone, batch())
    for found in results[arm]:
        assert_same(found, expected, at_least=29)
