"""The checking runner: no model, but every value where it belongs.

It writes a value derived from token, position, group and layer into each new token's slot, then reads all that the step
looks at back through the block tables, group by group: the whole history, or what lies in the window, or the state. It
raises at the first value that is foreign or stale.

Owns: one number a slot and layer, standing for keys and values.
Knows nothing of: how blocks are chosen. That is what it checks.
"""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvpool.core.groups import Group
from kvpool.core.manager import KVCacheManager
from kvpool.core.request import RequestLike
from kvpool.engine.batch import Batch, NextTokens
from kvpool.types import NULL_BLOCK

_UNWRITTEN = np.uint64(0)


def echo_tokens(requests: Sequence[RequestLike]) -> list[int]:
    """Tokens that depend on the last one and its position, so that equal histories go on alike."""
    return [(request.token_ids[-1] * 31 + request.num_tokens) % 32_000 for request in requests]


class CheckingRunner:
    """A runner for tests and for `replay --check`. Memory: 8 bytes a slot and layer.

    A state stands in the first slot of its block, as a number made of all tokens before.
    """

    def __init__(self, cache: KVCacheManager, num_layers: int = 2, next_tokens: NextTokens = echo_tokens) -> None:
        self._cache = cache
        self._next_tokens = next_tokens
        self._layers = np.arange(1, num_layers + 1, dtype=np.uint64)[:, None]
        self._num_block_slots = max(group.block_size for group in cache.groups.all)
        self._memory = np.full((num_layers, cache.num_blocks * self._num_block_slots), _UNWRITTEN)
        self.num_values_checked = 0

    def run(self, batch: Batch) -> list[int | None]:
        """Writes all new values, then reads what they look at. AssertionError names the first wrong value."""
        for request, start, stop in batch.loads:
            self._write_encoder(request)
            self.load(request, start, stop)
        for request, _, _ in islice(batch, len(batch) - batch.num_admitted, None):
            self._write_encoder(request)
        for request, start, count in batch:
            self._compute(request, start, start + count)
        for request, start, count in batch:
            self._check_history(request, start, start + count)
        return batch.sample(self._next_tokens)

    def load(self, request: RequestLike, start: int, stop: int) -> None:
        """Write tokens start .. stop - 1 as a connector does: where the request has blocks; of a state, the last."""
        for group in self._cache.groups.decoder:
            if group.is_state:
                self._write(request, group, [stop - 1], self._states(request, group, stop))
                continue
            blocks = np.array(self._ids(request, group))
            positions = np.arange(start, stop)
            kept = positions[blocks[positions // group.block_size] != NULL_BLOCK]
            self._write(request, group, kept, self._values(request, group, kept))

    def _compute(self, request: RequestLike, start: int, stop: int) -> None:
        for group in self._cache.groups.decoder:
            if group.is_state:
                if start:
                    self._expect(request, group, [start - 1], self._states(request, group, start))
                self._write(request, group, [stop - 1], self._states(request, group, stop))
            else:
                positions = np.arange(start, stop)
                self._write(request, group, positions, self._values(request, group, positions))

    def _check_history(self, request: RequestLike, start: int, stop: int) -> None:
        """All that tokens start .. stop - 1 look at, themselves included."""
        for group in self._cache.groups.all:
            if group.is_encoder:
                positions = np.arange(request.num_encoder_tokens)
                self._expect(request, group, positions, self._encoded(request, group, positions))
            elif not group.is_state:
                first = group.kind.first_live(start)
                positions = np.r_[: min(group.kind.num_sinks, first), first:stop]
                self._expect(request, group, positions, self._values(request, group, positions))

    def _write_encoder(self, request: RequestLike) -> None:
        for group in self._cache.groups.all:
            if group.is_encoder:
                positions = np.arange(request.num_encoder_tokens)
                self._write(request, group, positions, self._encoded(request, group, positions))

    def _write(
        self, request: RequestLike, group: Group, positions: Sequence[int] | npt.NDArray[np.int64], values: "_Values"
    ) -> None:
        slots = self._slots(request, group, positions)
        assert (slots >= self._num_block_slots).all(), (
            f"invariant 5: request {request.request_id!r} writes into the null block, group {group.group_id}"
        )
        self._memory[:, slots] = values

    def _expect(
        self, request: RequestLike, group: Group, positions: Sequence[int] | npt.NDArray[np.int64], values: "_Values"
    ) -> None:
        slots = self._slots(request, group, positions)
        self.num_values_checked += values.size
        wrong = np.argwhere(self._memory[:, slots] != values)
        if len(wrong):
            layer, at = (int(i) for i in wrong[0])
            kind = "an unwritten" if self._memory[layer, slots[at]] == _UNWRITTEN else "a foreign or stale"
            block, offset = divmod(int(slots[at]), self._num_block_slots)
            raise AssertionError(
                f"invariant 9: request {request.request_id!r} reads {kind} value at position {int(positions[at])}, "
                f"group {group.group_id}, layer {layer}: slot {block * group.block_size + offset} of block {block}"
            )

    def _slots(
        self, request: RequestLike, group: Group, positions: Sequence[int] | npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Where in the memory the values of these positions stand; a state stands at the start of its block."""
        table = self._cache.table(request)
        assert table is not None, f"request {request.request_id!r} runs without blocks"
        at = np.asarray(positions, dtype=np.int64)
        if not len(at):
            return at
        first = int(at.min())
        slots = table.slot_mapping(first, int(at.max()) + 1, group.group_id)[at - first]
        offsets = np.zeros_like(slots) if group.is_state else slots % group.block_size
        return slots // group.block_size * self._num_block_slots + offsets

    def _ids(self, request: RequestLike, group: Group) -> list[int]:
        table = self._cache.table(request)
        assert table is not None, f"request {request.request_id!r} runs without blocks"
        return table.block_ids[group.group_id]

    def _values(self, request: RequestLike, group: Group, positions: npt.NDArray[np.int64]) -> "_Values":
        """Another value for every token, position, group and layer; never 0."""
        tokens = np.array(request.token_ids, dtype=np.uint64)[positions]
        return self._mixed(tokens, positions, group)

    def _encoded(self, request: RequestLike, group: Group, positions: npt.NDArray[np.int64]) -> "_Values":
        """What the encoder makes of a request: of itself alone, since nobody shares it."""
        return self._mixed(np.full(len(positions), abs(hash(request.request_id)), np.uint64), positions, group)

    def _states(self, request: RequestLike, group: Group, num_tokens: int) -> "_Values":
        """The state after so many tokens: another one for every sequence of tokens."""
        tokens = np.array(request.token_ids[:num_tokens], dtype=np.uint64) + np.uint64(1)
        powers = np.cumprod(np.full(num_tokens, _STATE, dtype=np.uint64))
        return self._mixed((tokens * powers).sum(keepdims=True), np.array([num_tokens]), group)

    def _mixed(self, tokens: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], group: Group) -> "_Values":
        """uint64, shape (layers, positions)."""
        at = positions.astype(np.uint64) + np.uint64(1)
        mixed = (tokens + np.uint64(1)) * _TOKEN ^ at * _POSITION ^ np.array([group.group_id], np.uint64) * _GROUP
        values: _Values = mixed * np.uint64(2) * self._layers + np.uint64(1)
        return values


_Values = npt.NDArray[np.uint64]
_TOKEN, _POSITION = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_GROUP, _STATE = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)
