"""The requests that decode together, in the native core: a step is one call.

Owns: nothing; rows, and which request each is of, are the core's.
Knows nothing of: how a step is made. `DecodeBatch` says what it does.

A step changes rows, and nothing else. What requests and tables know of it is written down late: when somebody reads it,
when they leave the batch, and by `settle`. Each change is one call into the core, which nothing can interrupt: not
another thread, not a signal.
"""

import sys
from collections.abc import Iterable
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvpool._native import NativeBlockPool, NativeRows
from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.decode_batch import DecodeBatch, StepResult, check_row
from kvpool.core.groups import Groups
from kvpool.core.hashing import BlockHasher
from kvpool.core.late import late_name
from kvpool.core.publisher import Publisher
from kvpool.core.request import Request, RequestLike
from kvpool.core.room import Room
from kvpool.errors import UsageError
from kvpool.plan.kinds import FullAttention, SlidingWindow
from kvpool.types import GroupId

_NEVER = sys.maxsize
_LARGEST_BLOCK = 1 << 20


def can_be_native(pool: BlockPool, room: Room, groups: Groups, publisher: Publisher) -> bool:
    """Whether the native core has rows for such a cache.

    It does where all groups keep everything or a sliding window, in blocks of one size, of a million tokens at most,
    and where what is published of a block that fills does not depend on where it is.
    """
    is_native = NativeRows is not None and NativeBlockPool is not None and isinstance(pool, NativeBlockPool)
    are_plain = all(isinstance(group.kind, FullAttention | SlidingWindow) for group in groups.all)
    are_plain &= groups.unit <= _LARGEST_BLOCK
    return is_native and are_plain and room.is_uniform and publisher.steady is not None


class NativeDecodeBatch(DecodeBatch):
    """A `DecodeBatch` whose rows are the native core's. Only for caches that `can_be_native`."""

    def __init__(self, pool: BlockPool, room: Room, groups: Groups, publisher: Publisher, hasher: BlockHasher) -> None:
        super().__init__(pool, room, groups, publisher, hasher)
        assert NativeRows is not None, "a native batch without a native core"
        self._rows = NativeRows(
            pool,
            hasher.block_size,
            room.keeps_last_border,
            [
                (bundle[0].kind.window, bundle[0].num_sink_blocks, [group.group_id for group in bundle])
                for bundle in room.windows
                if isinstance(bundle[0].kind, SlidingWindow)
            ],
            publisher.steady,
            [remainder for _, remainder in room.slides],
            publisher.on_stored,
            publisher.on_named,
        )
        self._nothing = np.zeros((0, len(groups)), dtype=np.int32)

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a native decode batch cannot be copied or pickled, and its cache neither")

    @property
    def requests(self) -> list[RequestLike]:
        """See `DecodeBatch.requests`."""
        requests: list[RequestLike] = self._rows.requests()
        return requests

    @property
    def unserved(self) -> list[RequestLike]:
        """See `DecodeBatch.unserved`."""
        requests = self._rows.requests()
        return [requests[row] for row in self._rows.unserved()]

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """How many tokens each row has, the one to be computed next included. Changes with the next step."""
        return np.asarray(self._rows.lengths())

    @property
    def last_tokens(self) -> npt.NDArray[np.int64]:
        """See `DecodeBatch.last_tokens`."""
        tokens: npt.NDArray[np.int64] = np.asarray(self._rows.last_tokens())[0]
        return tokens

    def join(self, request: RequestLike, table: BlockTable) -> None:
        """See `DecodeBatch.join`."""
        tokens, last, limit = self._publish_all_but_last(request, table)
        behind = last[len(last) - (len(tokens) - table.num_committed) :]
        held = table.first_held[: len(self._room.windows)]
        name, ids, num_computed = late_name(request), table.block_ids, table.num_computed
        parts = self._following(request, table)
        self._rows.add(request, table, name, tokens, ids, held, num_computed, limit, behind, *parts)

    def remove(self, leaving: Iterable[RequestLike]) -> None:
        """Take rows out, the others keep their order. Those that leave, and only they, are up to date again.

        UsageError, and nothing changes, when one of them has no row here.
        """
        self._rows.remove(leaving)

    def ending_rows(self) -> list[int]:
        """The rows whose next token is their last."""
        rows: list[int] = self._rows.ending_rows()
        return rows

    def step(self, token_ids: Iterable[int]) -> StepResult:
        """See `KVCacheManager.step`."""
        answer = self._rows.step(token_ids, False)
        if answer is False:
            answer = self._step_of_others(token_ids)
        if answer is None:
            return StepResult([], self._nothing, [])
        grown, block_ids, unserved = answer
        return StepResult(grown, np.asarray(block_ids), unserved)

    def _step_of_others(self, token_ids: Iterable[int]) -> Any:
        """The same where the core cannot tell what is right: all that is not common."""
        numbers = self._tokens_of_step(token_ids)
        answer = self._rows.step(numbers, False)
        if answer is not False:
            return answer
        borders = self._rows.borders()
        requests, tables = [request for _, request, _ in borders], [table for _, _, table in borders]
        lengths = [request.num_tokens for request in requests]
        self._publisher.publish(requests, tables, lengths)
        for (row, request, table), length in zip(borders, lengths, strict=True):
            behind = request.token_ids[table.num_committed :]
            self._rows.follow(row, request, length, behind, *self._following(request, table))
        answer = self._rows.step(numbers, True)
        if answer is False:
            raise UsageError("the batch was changed by others during its step, which was not made")
        return answer

    def serve(self) -> bool:
        """See `KVCacheManager.serve`."""
        are_served: bool = self._rows.serve()
        return are_served

    def settle(self) -> None:
        """Write down what steps have done to requests and tables."""
        self._rows.settle()

    def block_tables(self, group_id: GroupId = 0) -> npt.NDArray[np.int32]:
        """See `DecodeBatch.block_tables`. Not a copy: it changes with the next step."""
        self._groups.require(group_id)
        return np.asarray(self._rows.block_tables(group_id))

    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """See `DecodeBatch.slot_mapping`."""
        return np.asarray(self._rows.slot_mapping())

    def check(self) -> None:
        """Raise AssertionError when a request in the batch was moved by anything but `step`. O(rows)."""
        for row, length in enumerate(self.num_tokens.tolist()):
            request, table = self._rows.member(row)
            check_row(request, table, length)

    def _following(self, request: RequestLike, table: BlockTable) -> tuple[bytes, bytes | None, int]:
        """What the row's next block is named after, its extra keys, and from where on these hold."""
        if not isinstance(request, Request) or not request.has_own_names:
            return self._hasher.root, None, _NEVER
        first, extra = request.common_keys()
        parent, size = self._hasher.root, self._hasher.block_size
        if table.num_committed:
            parent = request.block_hashes(self._hasher)[table.num_committed // size - 1]
        return parent, extra, max(first, self._publisher.first_steady(table))
