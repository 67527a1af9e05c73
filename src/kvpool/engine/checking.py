"""The checking runner: no model, but every value where it belongs.

It writes a value derived from token, position and layer into each new token's slot, then reads every request's whole
history back through its block table, and raises at the first value that is foreign or stale.

Owns: one number a slot and layer, standing for keys and values.
Knows nothing of: how blocks are chosen. That is what it checks.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.core.manager import KVCacheManager
from kvpool.core.request import RequestLike
from kvpool.engine.scheduler import Batch, NextTokens

_UNWRITTEN = np.uint64(0)


def echo_tokens(requests: Sequence[RequestLike]) -> list[int]:
    """Tokens that depend on the last one and its position, so that equal histories go on alike."""
    return [(request.token_ids[-1] * 31 + request.num_tokens) % 32_000 for request in requests]


class CheckingRunner:
    """A runner for tests and for `replay --check`. Memory: 8 bytes a slot and layer."""

    def __init__(self, cache: KVCacheManager, num_layers: int = 2, next_tokens: NextTokens = echo_tokens) -> None:
        self._cache = cache
        self._next_tokens = next_tokens
        self._layers = np.arange(1, num_layers + 1, dtype=np.uint64)[:, None]
        self._memory = np.full((num_layers, cache.num_blocks * cache.block_size), _UNWRITTEN)
        self.num_values_checked = 0

    def run(self, batch: Batch) -> list[int | None]:
        """Writes all new values, then reads all histories. AssertionError names the first wrong value."""
        for request, start, count in batch:
            self._memory[:, self._slots(request, start, start + count)] = self._values(request, start, start + count)
        for request, start, count in batch:
            self._check_history(request, start + count)
        return batch.sample(self._next_tokens)

    def _slots(self, request: RequestLike, start: int, stop: int) -> npt.NDArray[np.int64]:
        table = self._cache.table(request)
        assert table is not None, f"request {request.request_id!r} runs without blocks"
        return table.slot_mapping(start, stop)

    def _values(self, request: RequestLike, start: int, stop: int) -> npt.NDArray[np.uint64]:
        """uint64, shape (layers, stop - start): another value for every token, position and layer; never 0."""
        tokens = np.array(request.token_ids[start:stop], dtype=np.uint64)
        positions = np.arange(start, stop, dtype=np.uint64)
        mixed = (tokens + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ (positions + np.uint64(1)) * np.uint64(
            0xC2B2AE3D27D4EB4F
        )
        return mixed * np.uint64(2) * self._layers + np.uint64(1)

    def _check_history(self, request: RequestLike, stop: int) -> None:
        slots = self._slots(request, 0, stop)
        wrong = np.argwhere(self._memory[:, slots] != self._values(request, 0, stop))
        if len(wrong):
            layer, position = (int(i) for i in wrong[0])
            slot = int(slots[position])
            kind = "an unwritten" if self._memory[layer, slot] == _UNWRITTEN else "a foreign or stale"
            raise AssertionError(
                f"invariant 9: request {request.request_id!r} reads {kind} value at position {position}, layer "
                f"{layer}: slot {slot} of block {slot // self._cache.block_size}"
            )
        self.num_values_checked += stop * len(self._layers)
