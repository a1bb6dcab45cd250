"""Processes of one host keep one copy of the streamed base, and each computes what it would alone."""

import concurrent.futures
import json
import pathlib
import shutil
import threading

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny_models import LAYERS, Store, assert_equal, checkpointed, resident_model, step, streamed_model, with_adapters

import nybble
from nybble.streaming import model, sharing


def shared_memory() -> list[list[str]]:
    """The lines of this process's map that are a host arena's."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return [line.split() for line in maps if "memfd:nybble" in line]


def process(rank: int, folder: pathlib.Path, store: str, device: str) -> None:
    """One of two ranks: streams with a shared arena and writes what it found."""
    torch.set_num_threads(1)
    before = shared_memory()  # a fork has its parent's
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    own = Store(store)
    own.device = torch.device(device)
    streamed = checkpointed(with_adapters(streamed_model(own, share=True, poison=True, land_at_wait=True)))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.save(step(streamed), folder / f"gradients-{rank}.pt")
    mapped = [line for line in shared_memory() if line not in before]
    result = {
        "files": sorted({fields[4] for fields in mapped}),
        "ranges": len(mapped),
        "host_bytes": nybble.memory_stats(streamed)["host_bytes"],
        "keys": len(streamed.get_base_model().state_dict()),
    }
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run(folder: pathlib.Path, store: Store) -> list[dict]:
    """What each of two ranks found."""
    # A fork has everything imported already; where there is a GPU it may not be used any more after one.
    method = "spawn" if torch.cuda.is_available() else "fork"
    torch.multiprocessing.start_processes(
        process, (folder, str(store), str(store.device)), nprocs=2, daemon=True, start_method=method
    )
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_map_one_arena_and_compute_the_same_bits(stores, tmp_path):
    first, second = run(tmp_path, stores())
    assert first["files"] == second["files"] and len(first["files"]) == 1  # the inode of the one memory
    assert first["ranges"] >= 1 and second["ranges"] >= 1
    assert first["host_bytes"] == second["host_bytes"] > 0
    assert first["keys"] == second["keys"] > 0
    expected = step(checkpointed(with_adapters(resident_model(stores()))))
    for rank in range(2):
        assert_equal(torch.load(tmp_path / f"gradients-{rank}.pt"), expected, at_least=4 * LAYERS)


class Ranks:
    """Two ranks as threads of this process: what they tell each other goes through a barrier."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=120)
        self.values = [None, None]
        self.mine = threading.local()

    def of_group(self, rank: int) -> sharing.Shared:
        def gather(value) -> list:
            self.values[rank] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return sharing.Shared(rank, gather)

    def stream(self, *stores: Store) -> list:
        """Per rank, its model or what it raised."""

        def one(rank: int):
            try:
                return streamed_model(stores[rank], share=rank)
            except Exception as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))


@pytest.fixture
def ranks(monkeypatch):
    found = Ranks()
    monkeypatch.setattr(sharing, "of_group", found.of_group)
    return found


def test_only_the_first_rank_of_a_host_fills_the_arena(stores, ranks, monkeypatch):
    filled = []
    monkeypatch.setattr(
        model.Streamed, "_fill", lambda self, store, real=model.Streamed._fill: filled.append(real(self, store))
    )
    models = ranks.stream(stores(), stores())
    assert len(filled) == 1
    expected = step(checkpointed(with_adapters(resident_model(stores()))))
    for streamed in models:
        assert_equal(step(checkpointed(with_adapters(streamed))), expected, at_least=4 * LAYERS)


def test_another_store_on_a_rank_is_an_error_on_every_rank(stores, ranks):
    first, second = ranks.stream(stores(), stores("mistral"))
    assert isinstance(first, ValueError) and "can't be shared: {1:" in str(first)
    assert isinstance(second, ValueError)


def shortened(absmax: torch.Tensor) -> torch.Tensor:
    return absmax[:-1].clone()


def not_a_number(nested: torch.Tensor) -> torch.Tensor:
    return torch.full_like(nested, float("nan"))


# Values are looked at by the rank that fills the arena, the only one that reads them.
@pytest.mark.parametrize(
    "broken_rank,part,change", [(0, "absmax", shortened), (1, "absmax", shortened), (0, "nested_absmax", not_a_number)]
)
def test_a_damaged_store_on_one_rank_ends_all(stores, ranks, tmp_path, broken_rank, part, change):
    broken = Store(tmp_path / "broken")
    shutil.copytree(stores(), broken)
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    key = f"model.layers.3.mlp.up_proj.weight.{part}"
    tensors[key] = change(tensors[key])
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    given = [stores(), stores()]
    given[broken_rank] = broken
    broken.device = stores().device
    found = ranks.stream(*given)
    assert all(isinstance(error, (ValueError, RuntimeError)) for error in found)
    if broken_rank == 0:
        assert f"{key}: found" in str(found[0]) and f"{key}: found" in str(found[1])
