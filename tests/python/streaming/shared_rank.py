"""One rank of test_shared.py: streams with a shared arena and writes what it found.

shared_rank.py RANK RANKS FOLDER DEVICE STORE...
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import torch
import torch.distributed as dist
from tiny_models import Store, checkpointed, step, streamed_model, with_adapters

import nybble

rank, world, folder, device, *stores = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]), *sys.argv[4:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
store = Store(stores[rank % len(stores)])
store.device = torch.device(device)
try:
    model = checkpointed(with_adapters(streamed_model(store, share=True, poison=True, land_at_wait=True)))
except Exception as error:
    result = {"error": f"{type(error).__name__}: {error}"}
else:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.save(step(model), folder / f"gradients-{rank}.pt")
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split() for line in maps if "memfd:nybble" in line]
    result = {
        "files": sorted({fields[4] for fields in mapped}),
        "ranges": len(mapped),
        "pinned_bytes": nybble.memory_stats(model)["pinned_bytes"],
        "host_bytes": nybble.memory_stats(model)["host_bytes"],
        "keys": len(model.get_base_model().state_dict()),
    }
    dist.barrier()
(folder / f"result-{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
