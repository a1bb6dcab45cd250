"""nybble plan: what a streamed LoRA run would need, before it runs.

    nybble plan MODEL --gpu-memory 8GiB --tokens 4096 --rank 16 [--batch N] [--targets q_proj,v_proj] [--window 2]
                      [--activations recompute|keep|N] [--loss whole|chunked] [--optimiser adamw|adamw8bit|sgd] [--json]

MODEL: a store, or a Hugging Face folder with config.json. Only the config and the headers of its files are read.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings

from .choices import DTYPES, OPTIMISERS


def parse(argv: list[str] | None) -> dict:
    parser = argparse.ArgumentParser(
        prog="nybble plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--gpu-memory", help="of the card, such as 8GiB; default: this machine's card")
    add("--tokens", type=int, default=4096, help="of one batch, all rows together")
    add("--batch", type=int, default=1, help="rows of a batch")
    add("--rank", type=int, default=16)
    add("--targets", default="all-linear", help="projections with adapters")
    add("--adapter-dtype", default="bfloat16", choices=list(DTYPES))
    add("--window", type=int, default=2, help="slots")
    add("--activations", default="recompute", help="recompute, keep, or how many of the last layers keep")
    add("--reentrant", action="store_true", help="the other variant of checkpointing")
    add("--loss", default="whole", choices=["whole", "chunked"])
    add("--optimiser", "--optimizer", default="adamw", choices=OPTIMISERS)
    add("--accumulate", type=int, default=1, help="batches per step")
    add("--host-memory", help="default: what is available here")
    add("--context", help="GPU memory outside of torch's allocator; default: measured here, else 512MiB assumed")
    add("--link-gb-s", type=float, help="rate of page-locked copies; default: measured here, else assumed")
    add("--gemm-tflops", type=float, help="rate of 16-bit multiplies; likewise")
    add("--memory-gb-s", type=float, help="rate of copies on the card; likewise")
    add("--json", action="store_true")
    return vars(parser.parse_args(argv))


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    from .forecast import plan_training  # transformers and peft take seconds

    as_json = options.pop("json")
    warnings.simplefilter("ignore", FutureWarning)
    try:
        plan = plan_training(options.pop("model"), **options)
    except FileNotFoundError as error:
        print(f"nybble plan: {error}", file=sys.stderr)
        return 4
    except (ValueError, OSError) as error:
        print(f"nybble plan: {error}", file=sys.stderr)
        return 3
    print(json.dumps(plan.as_dict(), indent=1) if as_json else plan)
    return 0 if plan.fits is not False else 1


if __name__ == "__main__":
    sys.exit(main())
