"""The demo model on blocks of a given number, without measuring how many would fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from kvpool import KVCacheManager
from kvpool.engine.engine import Engine
from kvpool.engine.generation import Generation
from kvpool.engine.model_runner import ModelRunner
from kvpool.engine.scheduler import Scheduler, SchedulerConfig
from kvpool.models.huggingface import read_model
from kvpool.plan.grouping import group_layers
from kvpool.plan.layout import Layout
from kvpool.plan.model import named
from kvpool.runner.loading import LoadedModel, load
from kvpool.runner.opening import KV_DTYPES
from kvpool.runner.packing import pack
from kvpool.runner.torch_worker import TorchWorker

LOW_ID = 100
"""Token ids below may be special."""


@dataclass(frozen=True, slots=True)
class Demo:
    """One torch thread computes, greedily."""

    loaded: LoadedModel

    @property
    def model(self) -> Any:
        return self.loaded.model

    def tokens(self, rng: Random, count: int) -> list[int]:
        return [rng.randrange(LOW_ID, self.loaded.config.vocab_size) for _ in range(count)]

    def layout(self, kv_dtype: str = "auto", block_size: int = 16) -> Layout:
        config = {**self.loaded.config.to_dict(), "model_type": self.loaded.config.model_type}
        model = read_model(config, name=self.loaded.name, kv_dtype=kv_dtype, dtype=self.loaded.dtype)
        return group_layers(dict(named(model.layers)), block_size)

    def worker(self, num_blocks: int, kv_dtype: str = "auto", block_size: int = 16) -> TorchWorker:
        return TorchWorker(self.model, self.layout(kv_dtype, block_size), num_blocks, kv_dtype=KV_DTYPES[kv_dtype])

    def cache(self, num_blocks: int, block_size: int = 16) -> KVCacheManager:
        return KVCacheManager(num_blocks, groups=self.layout(block_size=block_size).kinds, events=False)

    def engine(self, num_tokens: int = 32_000, kv_dtype: str = "auto", block_size: int = 16) -> Engine:
        config = SchedulerConfig(max_num_batched_tokens=8192, waits_for_prefix=True)
        num_blocks = num_tokens // block_size
        scheduler = Scheduler(self.cache(num_blocks, block_size), config)
        return Engine(scheduler, ModelRunner(scheduler, self.worker(num_blocks, kv_dtype, block_size)))


def open_demo() -> Demo:
    torch.set_num_threads(1)
    loaded = load("demo")
    pack(loaded.model)
    return Demo(loaded)


def answers(engine: Engine, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[list[int]]:
    """The outputs to prompts that come at once."""
    requests = [Generation(f"r{number}", prompt, max_tokens=num_outputs) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_work:
        engine.step()
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]
