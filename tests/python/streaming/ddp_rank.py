"""One rank of test_ddp.py, started by torchrun: a streamed model over one host arena, under DDP.

torchrun --nproc-per-node 2 ddp_rank.py FOLDER STORE [--device cuda] [--fail-rank R]

Writes FOLDER/rank-<r>.json. --fail-rank: that rank then raises, after it wrote the time, where the others go on to a
step that they can't finish without it.
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch
import torch.distributed as dist
from tiny_models import checkpointed, with_adapters
from torch.nn.parallel import DistributedDataParallel

import nybble


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("store")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--fail-rank", type=int)
    return parser.parse_args()


def gradients(model, ids) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def equal(found, expected) -> int:
    assert found.keys() == expected.keys() and all(t.any() and t.isfinite().all() for t in expected.values())
    return sum(torch.equal(found[name], tensor) for name, tensor in expected.items())


def difference(found, expected) -> float:
    """Norm of the difference by norm, the worst of all tensors."""
    return max(((found[n].float() - t.float()).norm() / t.float().norm()).item() for n, t in expected.items())


def whole_difference(found, expected) -> float:
    """Norm of the difference by norm, of all tensors together."""
    apart = sum((found[n].double() - t.double()).square().sum() for n, t in expected.items())
    return (apart / sum(t.double().square().sum() for t in expected.values())).sqrt().item()


class Broadcasts:
    """Bytes that DDP broadcasts at its start and in its forwards, while this is in force."""

    def __enter__(self):
        self.bytes, self.real = 0, dist._broadcast_coalesced
        dist._broadcast_coalesced = self.count
        return self

    def count(self, group, tensors, *rest):
        self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return self.real(group, tensors, *rest)

    def __exit__(self, *_):
        dist._broadcast_coalesced = self.real


def deterministic(cuda: bool) -> contextlib.ExitStack:
    """Attention that adds in one order, and the same algorithms in every step."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
    torch.use_deterministic_algorithms(cuda, warn_only=True)
    return stack


def main() -> None:
    options = parse()
    with deterministic(options.device == "cuda"):
        run(options)


def run(options) -> None:
    rank, cuda = int(os.environ["RANK"]), options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    late = {} if cuda else {"poison": True, "land_at_wait": True}
    model = checkpointed(with_adapters(nybble.stream(None, options.store, device=device, share=True, **late)))
    if cuda:  # large adapters make a deep random model in bfloat16 chaotic
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data.mul_(0.05)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 96, (2, options.tokens), generator=generator).to(device)
    own = ids[rank : rank + 1]

    alone, again, half_alone = gradients(model, ids), gradients(model, ids), gradients(model, own)
    with Broadcasts() as broadcasts:
        ddp = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
        same, split = gradients(ddp, ids), gradients(ddp, own)
    halves = {name: tensor / 2 for name, tensor in half_alone.items()}  # DDP divides before it adds
    for tensor in halves.values():
        dist.all_reduce(tensor)

    maps = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "memfd:nybble" in line]
    result = {
        "compared": len(alone),
        "again": equal(again, alone),
        "same": equal(same, alone),
        "split": equal(split, halves),
        "split_difference": difference(split, alone),
        "split_whole_difference": whole_difference(split, alone),
        "half_whole_difference": whole_difference(half_alone, alone),
        "half_difference": difference(half_alone, alone),  # what split would be without the reduction
        "broadcast_bytes": broadcasts.bytes,
        "adapter_bytes": sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in model.buffers()),
        "files": sorted({fields[4] for fields in maps}),
        **{k: v for k, v in nybble.memory_stats(model).items() if k in ("host_bytes", "pinned_bytes", "refills")},
    }
    (options.folder / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    if options.fail_rank == rank:
        (options.folder / "failed-at").write_text(str(time.time()))
        raise RuntimeError("this rank fails, as it was told to")
    if options.fail_rank is not None:
        gradients(ddp, own)
        if cuda:
            torch.cuda.synchronize()
        (options.folder / "went-on").write_text("")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
