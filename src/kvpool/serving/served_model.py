"""A model that is ready to be served: what the server needs of it, wherever it came from."""

from collections.abc import Callable
from dataclasses import dataclass

from kvpool.core.manager import KVCacheManager
from kvpool.engine.step_input import Worker
from kvpool.serving.tokenizer import Tokenizer


def _nothing() -> None:
    """There is nothing to close."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`worker` has the memory that the cache's block ids point into. `close` ends what has to be ended with it."""

    name: str
    cache: KVCacheManager
    worker: Worker
    tokenizer: Tokenizer
    max_model_len: int | None = None
    close: Callable[[], None] = _nothing
