"""Options of a model that is computed here.

Knows nothing of: models. What computes one takes seconds to import, and help and clients do without it.
"""

import argparse
import signal
import sys
from importlib import import_module
from typing import Any

from kvpool.cli.numbers import count, gib, length, share

HOW = "a local folder in Hugging Face form, or demo"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """All but --model, which commands explain in their own words."""
    model = parser.add_argument_group("the model")
    model.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu or cuda (cpu)")
    model.add_argument("--dtype", default="auto", metavar="TYPE", help="of the weights: float32, bfloat16, … (auto)")
    model.add_argument("--kv-gib", type=_gib, metavar="GIB", help="memory for the cache")
    model.add_argument("--kv-dtype", default="auto", metavar="TYPE", help="of keys and values: fp8, bfloat16, … (auto)")
    model.add_argument(
        "--gpu-memory-utilization", type=share, metavar="SHARE", help="of the memory that is free, instead (0.5 on cpu)"
    )
    model.add_argument("--threads", type=count, metavar="N", help="of torch, on a CPU")
    model.add_argument("--allow-download", action="store_true", help="fetch a model from its hub by its name")
    model.add_argument("--block-size", type=count, default=16, metavar="TOKENS", help="tokens a block (16)")
    model.add_argument("--max-model-len", type=length, metavar="TOKENS", help="of prompt and outputs of a request")
    model.add_argument("--in-process", action="store_true", help="compute in this process, not in one of its own")
    steps = parser.add_argument_group("steps")
    steps.add_argument("--max-num-seqs", type=count, metavar="N", help="most running requests (256, or fewer)")
    steps.add_argument("--max-num-batched-tokens", type=length, default=2048, metavar="N", help="tokens a step (2048)")


def max_num_seqs(options: argparse.Namespace) -> int:
    """As many as are asked for, otherwise 256 where a step has so many tokens."""
    asked: int | None = options.max_num_seqs
    return min(256, options.max_num_batched_tokens) if asked is None else asked


def local_model() -> Any:
    """The module `kvpool.cli.local_model`. MissingExtraError for what is not installed."""
    return import_module("kvpool.cli.local_model")


def exit_on_sigterm(code: int) -> None:
    """So that what is open is closed then too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))


def _gib(text: str) -> int:
    try:
        [one] = gib(text)
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no memory in GiB: one figure, such as 4 or 0.5") from None
    return one
