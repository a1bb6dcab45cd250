"""What a gate does not ask even where everything fits, and who asks it: stands under "not run" in every report."""

FORMATS = (
    "bf16 NF4 with nested scales of blocks of 64 is what this gate multiplies; the C++ tests and linear_stress draw "
    "the others"
)
MODELS = "a Llama in bf16; the tests of nybble.stream have other architectures"
FEW_LAYERS = "a few layers and a small vocabulary"

BEYOND = {
    "aliasing": {"models of transformers": "stacks of layers of its own; equality and exact have a Llama"},
    "numerics": {
        "fp16, FP4, plain scales, other blocks": FORMATS,
        "controls above 2048 tokens and of later seeds": "the product only",
    },
    "determinism": {"fp16, FP4, plain scales, other blocks": FORMATS},
    "memory": {"activations kept, several sequences": "one sequence of a Llama, every layer checkpointed"},
    "equality": {"other architectures": MODELS},
    "exact": {"other architectures": MODELS},
    "share": {"a whole model": FEW_LAYERS},
    "speed": {"a whole model": FEW_LAYERS},
}
