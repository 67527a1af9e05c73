"""From an `Opening` to a model that is ready to be served, with its worker here or in a process of its own."""

from dataclasses import replace

from kvpool.core.manager import KVCacheManager
from kvpool.engine.step_input import Worker
from kvpool.runner.loading import load_tokenizer
from kvpool.runner.opening import Opened, Opening
from kvpool.serving.served_model import ServedModel
from kvpool.serving.tokenizer import TransformersTokenizer
from kvpool.serving.worker_process import RemoteWorker


def open_model(opening: Opening, *, in_process: bool = False) -> tuple[ServedModel, Opened]:
    """ConfigError for what cannot be served, a folder without a tokenizer among it."""
    opening = replace(opening, requires_tokenizer=True)
    if in_process:
        worker, opened = opening()
        return _served(worker, opened), opened
    remote: RemoteWorker[Opened] = RemoteWorker(opening)
    try:
        served = _served(remote, remote.facts)
    except BaseException:
        remote.close()
        raise
    return served, remote.facts


def _served(worker: Worker, opened: Opened) -> ServedModel:
    tokenizer = load_tokenizer(opened.folder)
    assert tokenizer is not None, "the opening requires one"
    plan = opened.start.plan
    return ServedModel(
        opened.name,
        KVCacheManager.from_plan(plan, events=False),
        worker,
        TransformersTokenizer(tokenizer, opened.eos_token_ids, opened.vocab_size, plan.max_model_len),
        plan.max_model_len,
        *((worker.close,) if isinstance(worker, RemoteWorker) else ()),
    )
