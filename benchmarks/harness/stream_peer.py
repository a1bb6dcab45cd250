"""The published soup-cli 0.77 as an arm of h200_stream.py: its streaming runtime over the same bytes and adapters.

Its shards are written straight from the store (its own quantiser would give other bytes). Arms: `peer` with its own
multiply, `peer_nybble` with ours in the place that docs/plug-in.md names. Needs soup-cli 0.77 on the path.
"""

import importlib.metadata
import json
import pathlib

import peft
import torch
from safetensors.torch import load_file, save_file
from stream_arms import TARGETS, Arms, set_adapters

import nybble
from nybble.quant_state import nested_table, table

ARMS = ("peer", "peer_nybble")
VERSION = "0.77.0"
NAMES = ("_can_use_checkpoint_visible_nf4_gemm", "checkpoint_visible_nf4_linear")
SIDECARS = {"absmax": "::absmax", "nested_absmax": "::nested_absmax"}


def missing() -> str | None:
    """Why these arms can't run here, or None."""
    try:
        version = importlib.metadata.version("soup-cli")
        import soup_cli.utils.layer_stream_runtime  # noqa: F401
    except Exception as error:  # not installed, or lacks a dependency
        return f"{type(error).__name__}: {error}"
    return None if version == VERSION else f"soup-cli {version} found, expected {VERSION}"


def write_shards(store: pathlib.Path, folder: pathlib.Path):
    """The store's layers in soup's layout, and a config without quantization. Returns the index."""
    from soup_cli.utils import layer_shard

    folder.mkdir(parents=True)
    config = json.loads((store / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    cpu = torch.device("cpu")
    codes = {
        layer_shard.NF4_CODE_KEY: table("nf4", cpu).clone(),
        layer_shard.NF4_NESTED_CODE_KEY: nested_table(cpu).clone(),
    }
    extras = load_file(store / "rest.safetensors") | codes
    save_file(extras, layer_shard.extras_shard_path(str(folder)))
    specs, keys, total = {}, set(), 0
    for layer in range(config["num_hidden_layers"]):
        tensors, specs = shard_of(store / f"layer-{layer:03d}.safetensors", f"model.layers.{layer}.", layer_shard)
        save_file(tensors, layer_shard.layer_shard_path(str(folder), layer))
        keys |= tensors.keys()
        total += sum(spec.shape[0] * spec.shape[1] for spec in specs.values())
    index = layer_shard.ShardIndex(
        n_layers=config["num_hidden_layers"],
        layer_keys=tuple(sorted(keys)),
        extra_keys=tuple(sorted(extras)),
        dtype="bfloat16",
        total_params=total,
        arch="llama",
        soup_version=VERSION,
        quant="nf4",
        double_quant=True,
        quant_device="cuda",
        quant_specs=specs,
    )
    layer_shard._atomic_write_index(index, str(folder))
    return layer_shard.read_shard_index(str(folder))


def shard_of(path: pathlib.Path, prefix: str, layer_shard) -> tuple[dict, dict]:
    """One layer's tensors under soup's names, and what its index says of the quantised ones."""
    tensors, specs = {}, {}
    for key, tensor in load_file(path).items():
        short = key.removeprefix(prefix)
        weight, _, field = short.partition(".weight.")
        if field.startswith("quant_state"):
            state = json.loads(bytes(tensor.tolist()))
            tensors[f"{weight}.weight::nested_offset"] = torch.tensor(state["nested_offset"])
            specs[f"{weight}.weight"] = layer_shard.NF4WeightSpec(
                tuple(state["shape"]), state["dtype"], state["blocksize"], "nf4", True, state["nested_blocksize"]
            )
        elif field in SIDECARS:
            tensors[f"{weight}.weight{SIDECARS[field]}"] = tensor
        elif not field:
            tensors[short] = tensor
    return tensors, specs


def nybble_multiply(x, packed, state, bias=None):
    """What replaces the runtime's multiply: the same bytes, with the runtime's own check of who owns the slot."""
    owner_check = packed._soup_stream_owner_check
    return nybble.nf4_linear(
        x, packed, state.absmax, tuple(state.shape), code=state.code, blocksize=state.blocksize,
        quant_type=state.quant_type, bias=bias, state_dtype=state.dtype, guard=lambda _: owner_check(),
        nested_absmax=state.state2.absmax, nested_code=state.state2.code, offset=state.offset,
    )  # fmt: skip


class Peer(Arms):
    def __init__(
        self, store: pathlib.Path, folder: pathlib.Path, device: torch.device, rank: int, targets: str, window: int
    ):
        from soup_cli.utils import layer_stream_runtime as runtime_module

        self.module = runtime_module
        self.stock = {name: getattr(runtime_module, name) for name in NAMES}
        index = write_shards(store, folder)
        self.layer_bytes = sum(
            (folder / f"layer_{layer:03d}.safetensors").stat().st_size for layer in range(index.n_layers)
        ) // index.n_layers  # fmt: skip
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS[targets], task_type="CAUSAL_LM")
        model, self.runtime = runtime_module.build_streamed_model(
            model_id=str(folder), shard_dir=str(folder), index=index, lora_config=config, device=device.type,
            dtype="bfloat16", buffers=window, pin=device.type == "cuda", quant="nf4",
        )  # fmt: skip
        set_adapters(model)
        model.train()
        model.enable_input_require_grads()
        super().__init__(model)

    def copied_bytes(self) -> int:
        return self.runtime.pool.loads * self.layer_bytes

    def switch(self, arm: str) -> None:
        """Its default: every layer recomputed. Its multiply is looked up at each call."""
        ours = {NAMES[0]: lambda x, state: True, NAMES[1]: nybble_multiply}
        for name, value in (ours if arm == "peer_nybble" else self.stock).items():
            setattr(self.module, name, value)
