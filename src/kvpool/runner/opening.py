"""From the name of a model to a worker that computes it, and what is to be known of it elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np

from kvpool.engine.step_input import StepInput
from kvpool.errors import MissingExtraError
from kvpool.plan.layout import Layout
from kvpool.runner.loading import load, require_device
from kvpool.runner.memory import memory_of, peak_bytes
from kvpool.runner.packing import pack
from kvpool.runner.startup import CacheSettings, Start, start
from kvpool.runner.torch_worker import TorchWorker

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", "engine") from error

KV_DTYPES: Mapping[str, torch.dtype | None] = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Opened:
    """What was opened. `KVCacheManager.from_plan(opened.start.plan)` is the cache that the worker has memory for."""

    name: str
    folder: Path
    eos_token_ids: frozenset[int]
    vocab_size: int
    """The model knows the token ids below this."""
    start: Start


@dataclass(frozen=True, slots=True)
class Opening:
    """Call it where the worker is to be. ConfigError with the numbers for what cannot be served.

    `num_threads` None leaves it to torch.
    """

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    num_threads: int | None = None
    allow_download: bool = False
    settings: CacheSettings = field(default_factory=CacheSettings)
    max_num_seqs: int = 256
    requires_tokenizer: bool = False

    def __call__(self) -> tuple[TorchWorker, Opened]:
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        require_device(self.device)
        memory = memory_of(self.device)
        loaded = load(
            self.model,
            dtype=self.dtype,
            device=self.device,
            allow_download=self.allow_download,
            requires_tokenizer=self.requires_tokenizer,
        )
        pack(loaded.model)
        kv_dtype = KV_DTYPES.get(self.settings.kv_dtype)

        def peak(layout: Layout, num_tokens: int) -> int:
            step, num_blocks = largest_step(layout, num_tokens, self.max_num_seqs)
            worker = TorchWorker(loaded.model, layout, num_blocks, kv_dtype=kv_dtype)
            return peak_bytes(lambda: worker.execute(step), self.device)

        begun = start(loaded, memory, peak, self.settings)
        worker = TorchWorker(loaded.model, begun.plan.layout, begun.plan.num_blocks, kv_dtype=kv_dtype)
        return worker, Opened(loaded.name, loaded.folder, loaded.eos_token_ids, loaded.vocab_size, begun)


def largest_step(layout: Layout, num_tokens: int, num_rows: int) -> tuple[StepInput, int]:
    """A step of so many tokens, of as many new requests as can be, and the blocks that a pool needs for it."""
    rows = min(num_tokens, num_rows)
    counts = np.full(rows, num_tokens // rows)
    counts[0] += num_tokens - counts.sum()
    positions = np.concatenate([np.arange(count) for count in counts])
    row_of = np.repeat(np.arange(rows), counts)
    slots, tables, num_blocks = [], [], 1
    for kind in layout.kinds:
        assert kind.block_size is not None, "a layout gives every group a block size"
        columns = ceil(int(counts[0]) / kind.block_size)
        table = num_blocks + np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        num_blocks += rows * columns
        tables.append(table)
        slots.append(table[row_of, positions // kind.block_size] * kind.block_size + positions % kind.block_size)
    step = StepInput(
        np.ones(num_tokens, np.int64), positions, counts, 0, np.stack(slots).astype(np.int64), tuple(tables),
        np.ones(rows, bool),
    )  # fmt: skip
    return step, num_blocks
