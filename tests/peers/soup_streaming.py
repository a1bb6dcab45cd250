"""Nybble's multiply inside the streaming runtime of the published soup-cli 0.77: a tiny Llama on the CPU, two slots.

    python tests/peers/soup_streaming.py        in an environment that has soup-cli and nybble (make peer-test)

Two module globals of the runtime are replaced: its gate and its multiply. Arms: stock; nybble mode "dequant", which
must equal stock to the bit in every LoRA gradient; nybble mode "auto", within TOLERANCE. Each in the recompute mode
(checkpointing) and in the retained mode (no recomputation). Counted: forward calls, backward launches, and calls of
the runtime's own owner check. Controls: a wrong weight must be seen, and an owner check that says no must stop the
backward. Exit 0 only if all holds; prints a table.
"""

import importlib.metadata
import json
import pathlib
import sys
import tempfile

import peft
import torch
import transformers
from soup_cli.utils import layer_shard
from soup_cli.utils import layer_stream_runtime as runtime_module

import nybble

LAYERS, PROJECTIONS = 4, 7
LINEARS = LAYERS * PROJECTIONS
TOLERANCE = 2e-2  # relative, worst LoRA gradient, bfloat16
EXPECTED_VERSION = "0.77.0"


def write_checkpoint(folder: pathlib.Path) -> str:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def build(model_id: str, shards: str):
    """The runtime's own path: shard in NF4, meta skeleton, adapters, streaming through two slots."""
    skeleton = runtime_module.build_meta_skeleton(model_id, dtype="bfloat16", quant="nf4")
    index = layer_shard.shard_checkpoint(
        model_id,
        shards,
        dtype="bfloat16",
        arch="llama",
        quant="nf4",
        quant_suffixes=runtime_module.quantised_layer_suffixes(skeleton),
        quant_device="cpu",
    )
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model, runtime = runtime_module.build_streamed_model(
        model_id=model_id,
        shard_dir=shards,
        index=index,
        lora_config=adapters,
        device="cpu",
        dtype="bfloat16",
        buffers=2,
        pin=False,
        quant="nf4",
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train(), runtime


class Op:
    """What replaces the runtime's multiply. owner_check: the runtime's, counted, or one that says no in backward."""

    def __init__(self, mode, refuse=False, spoil=False):
        self.mode, self.refuse, self.spoil = mode, refuse, spoil
        self.calls = self.checks = self.checks_in_backward = 0
        self.forward = False

    def __call__(self, x, packed, state, bias=None):
        self.calls += 1
        owner_check = packed._soup_stream_owner_check

        def guard(unpacked):
            self.checks += 1
            if not self.forward:
                self.checks_in_backward += 1
                if self.refuse:
                    raise RuntimeError("control: not the owner")
            owner_check()

        nested = {}
        if state.nested:
            nested = dict(nested_absmax=state.state2.absmax, nested_code=state.state2.code, offset=state.offset)
        weight = packed.flip(0) if self.spoil else packed
        self.forward = True
        try:
            return nybble.nf4_linear(
                x, weight, state.absmax, tuple(state.shape), code=state.code, blocksize=state.blocksize,
                quant_type=state.quant_type, bias=bias, state_dtype=state.dtype, mode=self.mode, guard=guard, **nested,
            )  # fmt: skip
        finally:
            self.forward = False


class installed:
    """Replaces the two globals, and puts them back."""

    names = ("_can_use_checkpoint_visible_nf4_gemm", "checkpoint_visible_nf4_linear")

    def __init__(self, op):
        self.new = (lambda x, state: True, op) if op else None

    def __enter__(self):
        self.old = [getattr(runtime_module, name) for name in self.names]
        for name, value in zip(self.names, self.new or self.old, strict=True):
            setattr(runtime_module, name, value)

    def __exit__(self, *_):
        for name, value in zip(self.names, self.old, strict=True):
            setattr(runtime_module, name, value)


def step(model, op=None) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(5))
    with installed(op):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(found, expected) -> tuple[int, float]:
    """Tensors that differ in any bit, and the worst relative difference."""
    assert found.keys() == expected.keys()
    assert len(expected) == 1 + 4 * LAYERS
    assert all(tensor.count_nonzero() > 0 for tensor in expected.values())
    worst = max(((found[n].float() - t.float()).norm() / t.float().norm()).item() for n, t in expected.items())
    return sum(not torch.equal(found[n], t) for n, t in expected.items()), worst


def run_mode(model, pool, mode: str) -> list[dict]:
    recompute = mode == "recompute"
    assert runtime_module.set_stream_recompute(model, recompute) == LAYERS
    loads = pool.loads
    stock = step(model)
    assert pool.loads > loads, "nothing streamed"
    rows = [dict(mode=mode, arm="stock again", differ=compare(step(model), stock)[0], ok=True)]
    rows[0]["ok"] = rows[0]["differ"] == 0
    forwards = (2 if recompute else 1) * LINEARS
    for name in ("dequant", "auto"):
        nybble.reset_path_counters()
        op = Op(name)
        differ, worst = compare(step(model, op), stock)
        path = "cpu" if name == "auto" else name
        launches = nybble.path_counters()[path]
        backward = launches["grad_input"]
        counted = (
            op.calls == launches["forward"] == forwards
            and op.checks_in_backward == backward > 0
            and op.checks == op.calls + backward
        )
        close = differ == 0 if name == "dequant" else worst <= TOLERANCE
        rows.append(
            dict(mode=mode, arm=f"nybble {name}", differ=differ, worst=worst, calls=op.calls, backward=backward,
                 checks_in_backward=op.checks_in_backward, ok=counted and close)
        )  # fmt: skip
    differ, worst = compare(step(model, Op("dequant", spoil=True)), stock) if recompute else (None, None)
    if recompute:  # a copy of the weight is not what retained mode recognises as its own
        rows.append(dict(mode=mode, arm="control: wrong weight", differ=differ, worst=worst, ok=worst > TOLERANCE))
    op, raised = Op("dequant", refuse=True), False
    try:
        step(model, op)
    except RuntimeError as error:
        raised = "control: not the owner" in str(error)
    rows.append(dict(mode=mode, arm="control: owner check says no", ok=raised and op.checks_in_backward == 1))
    return rows


def main() -> int:
    version = importlib.metadata.version("soup-cli")
    if version != EXPECTED_VERSION:
        print(f"soup-cli {version} found, expected {EXPECTED_VERSION}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        model, runtime = build(write_checkpoint(path / "dense"), str(path / "shards"))
        rows = []
        for mode in ("recompute", "retained"):
            rows += run_mode(model, runtime.pool, mode)
    for row in rows:
        figures = ", ".join(f"{key} {value:.2g}" for key, value in row.items() if key not in ("mode", "arm", "ok"))
        print(f"{'ok ' if row['ok'] else 'BAD'} {row['mode']:9} {row['arm']:28} {figures}")
    print(json.dumps(dict(soup_cli=version, torch=torch.__version__, transformers=transformers.__version__)))
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
