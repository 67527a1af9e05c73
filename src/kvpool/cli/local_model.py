"""A model that is computed here, from the options that a command line has, and servers of it."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.cli.model_options import max_num_seqs
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.runner.opening import Opened, Opening
from kvpool.runner.startup import CacheSettings
from kvpool.serving.app import ServerConfig
from kvpool.serving.async_engine import AsyncEngine
from kvpool.serving.engine_loop import EngineLoop
from kvpool.serving.local import serving_here
from kvpool.serving.opening import open_model
from kvpool.serving.served_model import ServedModel
from kvpool.serving.server import Server

__all__ = ["ServerConfig", "opened_model", "server_of", "serving_here"]


@contextmanager
def opened_model(options: argparse.Namespace) -> Iterator[tuple[ServedModel, Opened]]:
    """The model that the options say, until the end of the block. What cannot be is said before it is loaded."""
    _steps(options)
    print(f"kvpool: loading {options.model}", file=sys.stderr)
    model, opened = open_model(_opening(options), in_process=options.in_process)
    try:
        yield model, opened
    finally:
        model.close()


def server_of(
    model: ServedModel,
    options: argparse.Namespace,
    config: ServerConfig,
    *,
    max_waiting: int = 1024,
) -> Server:
    """A server of a model, not started yet."""
    most = options.max_model_len or model.max_model_len
    loop = EngineLoop(model.cache, model.worker, _steps(options))
    engine = AsyncEngine(loop, max_model_len=most, max_waiting=max_waiting)
    return Server(engine, model.tokenizer, config)


def _steps(options: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(options.max_num_batched_tokens, max_num_seqs(options), waits_for_prefix=True)


def _opening(options: argparse.Namespace) -> Opening:
    settings = CacheSettings(
        options.kv_dtype,
        options.block_size,
        options.max_model_len,
        options.max_num_batched_tokens,
        options.kv_gib,
        options.gpu_memory_utilization,
    )
    return Opening(
        options.model,
        options.dtype,
        options.device,
        options.threads,
        options.allow_download,
        settings,
        max_num_seqs(options),
    )
