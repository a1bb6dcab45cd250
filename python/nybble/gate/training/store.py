"""A random NF4 store with the shape of a Llama or one of its kin, so that no gate needs a download; written as fast as
memory takes it.

Every layer has bytes of its own: a stale read of another layer would otherwise go unseen.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from nybble.quant_state import nested_table, table

BLOCK = 64
FAMILIES = {  # by model_type: the class, and what its config has beside a Llama's
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
}
WRITERS = 8  # threads that write files while the next layer is made


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, or of another family."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    family: str = "llama"

    def projections(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of a layer's linears, by name."""
        kv = self.hidden // self.heads * self.kv_heads
        attention = {"q_proj": self.hidden, "k_proj": kv, "v_proj": kv, "o_proj": self.hidden}
        sizes = {f"self_attn.{name}": (rows, self.hidden) for name, rows in attention.items()}
        sizes |= {f"mlp.{name}": (self.ffn, self.hidden) for name in ("gate_proj", "up_proj")}
        return sizes | {"mlp.down_proj": (self.hidden, self.ffn)}

    def dense(self) -> dict[str, int]:
        """Elements of a layer's tensors that are not in 4 bit, by name."""
        norms = {f"{name}.weight": self.hidden for name in ("input_layernorm", "post_attention_layernorm")}
        if self.family == "qwen3":
            norms |= {f"self_attn.{name}.weight": self.hidden // self.heads for name in ("q_norm", "k_norm")}
        if self.family != "qwen2":
            return norms
        rows = {name: n for name, (n, _) in self.projections().items()}
        return norms | {f"self_attn.{name}.bias": rows[f"self_attn.{name}"] for name in ("q_proj", "k_proj", "v_proj")}

    @property
    def weights(self) -> int:
        """4-bit weights of all layers."""
        return self.layers * sum(n * k for n, k in self.projections().values())

    def config(self) -> dict:
        """config.json of the store."""
        architecture, more = FAMILIES[self.family]
        return more | {
            "architectures": [architecture],
            "model_type": self.family,
            "head_dim": self.hidden // self.heads,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 16384,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "load_in_8bit": False,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_compute_dtype": "bfloat16",
            },
        }


def write_store(folder: Path, shape: Shape, device: torch.device, seed: int = 0) -> Path:
    """Writes the store: config, one file a layer, one for embedding and norm."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    generator = torch.Generator(device).manual_seed(seed)
    embedding = torch.randn(shape.vocab, shape.hidden, generator=generator, device=device) / shape.hidden**0.5
    where: dict[str, str] = {}
    waiting: list[Future] = []
    with ThreadPoolExecutor(WRITERS) as pool:

        def put(name: str, tensors: dict[str, torch.Tensor]) -> None:
            where.update(dict.fromkeys(tensors, name))
            waiting.append(pool.submit(save_file, tensors, folder / name, {"format": "pt"}))

        rest = {"model.embed_tokens.weight": embedding.bfloat16().cpu(), "model.norm.weight": _ones(shape.hidden)}
        put("rest.safetensors", rest)
        for layer in range(shape.layers):
            prefix, tensors = f"model.layers.{layer}", {}
            for name, (n, k) in shape.projections().items():
                tensors |= weight_tensors(f"{prefix}.{name}.weight", n, k, generator)
            for name, count in shape.dense().items():
                noise = 0.1 * torch.randn(count, generator=generator, device=device) if name.endswith("bias") else None
                tensors[f"{prefix}.{name}"] = _ones(count) if noise is None else noise.bfloat16().cpu()
            put(f"layer-{layer:03d}.safetensors", tensors)
        for job in waiting:
            job.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def weight_tensors(key: str, n: int, k: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One weight under its names: uniform codes, scales that give a standard deviation near k^-0.5."""
    blocks, device, cpu = -(-n * k // BLOCK), generator.device, torch.device("cpu")
    scale = 1.8 * k**-0.5  # uniform NF4 codes have a standard deviation of 0.55 of their scale
    state = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": "bfloat16",
        "shape": [n, k],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": scale,
    }

    def codes(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator, device=device)

    nested = 0.3 * scale * (0.5 + torch.rand(-(-blocks // 256), generator=generator, device=device))
    return {
        key: codes((n * k + 1) // 2).view(-1, 1).cpu(),
        f"{key}.absmax": codes(blocks).cpu(),
        f"{key}.nested_absmax": nested.cpu(),
        f"{key}.quant_map": table("nf4", cpu).clone(),
        f"{key}.nested_quant_map": nested_table(cpu).clone(),
        f"{key}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bfloat16)
