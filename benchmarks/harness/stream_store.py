"""A random NF4 store with the shape of a real model, written as fast as memory takes it.

Codes are uniform, scales such that a weight's standard deviation is about 0.02. Every layer has bytes of its own: a
stale read of another layer would otherwise go unseen.
"""

import concurrent.futures
import json
import pathlib

import torch
from safetensors.torch import save_file

from nybble.quant_state import nested_table, table

BLOCK = 64
SHAPES = {
    "8b": dict(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    "8b-16": dict(hidden=4096, ffn=14336, layers=16, heads=32, kv_heads=8, vocab=128256),  # half of its layers
    "70b-12": dict(hidden=8192, ffn=28672, layers=12, heads=64, kv_heads=8, vocab=32000),  # of 80
    "32b": dict(hidden=5120, ffn=27648, layers=8, heads=40, kv_heads=8, vocab=32000),
    "tiny": dict(hidden=64, ffn=192, layers=4, heads=4, kv_heads=2, vocab=256),
}


def config_of(shape: dict) -> dict:
    quantization = dict(
        quant_method="bitsandbytes",
        load_in_4bit=True,
        load_in_8bit=False,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bfloat16",
    )
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocab"],
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        use_cache=False,
        quantization_config=quantization,
    )


def projections(shape: dict) -> dict[str, tuple[int, int]]:
    """Name inside a layer -> (out_features, in_features)."""
    hidden, ffn = shape["hidden"], shape["ffn"]
    kv = hidden // shape["heads"] * shape["kv_heads"]
    rows = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    named = {f"self_attn.{name}": size for name, size in rows.items()}
    mlp = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    return named | {f"mlp.{name}": size for name, size in mlp.items()}


def weight_tensors(name: str, n: int, k: int, device: torch.device) -> dict[str, torch.Tensor]:
    blocks = -(-n * k // BLOCK)
    nested = -(-blocks // 256)
    state = dict(
        quant_type="nf4",
        blocksize=BLOCK,
        dtype="bfloat16",
        shape=[n, k],
        nested_blocksize=256,
        nested_dtype="float32",
        nested_offset=0.04,
    )
    key = f"{name}.weight"
    cpu = torch.device("cpu")
    return {
        key: torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8, device=device).cpu(),
        f"{key}.absmax": torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=device).cpu(),
        f"{key}.nested_absmax": (0.005 + 0.01 * torch.rand(nested, device=device)).cpu(),
        f"{key}.quant_map": table("nf4", cpu).clone(),
        f"{key}.nested_quant_map": nested_table(cpu).clone(),
        f"{key}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def write_store(folder: pathlib.Path, shape: dict, device: torch.device) -> pathlib.Path:
    """Config, one file a layer, one for the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    where, waiting = {}, []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:

        def put(name: str, tensors: dict) -> None:
            where.update(dict.fromkeys(tensors, name))
            waiting.append(pool.submit(save_file, tensors, folder / name, {"format": "pt"}))

        hidden = shape["hidden"]
        ones = torch.ones(hidden, dtype=torch.bfloat16)
        embedding = 0.02 * torch.randn(shape["vocab"], hidden, dtype=torch.bfloat16, device=device)
        put("rest.safetensors", {"model.embed_tokens.weight": embedding.cpu(), "model.norm.weight": ones})
        for layer in range(shape["layers"]):
            prefix = f"model.layers.{layer}"
            tensors = {}
            for name, (n, k) in projections(shape).items():
                tensors |= weight_tensors(f"{prefix}.{name}", n, k, device)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}.{norm}.weight"] = ones.clone()
            put(f"layer-{layer:03d}.safetensors", tensors)
        for job in waiting:
            job.result()
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
