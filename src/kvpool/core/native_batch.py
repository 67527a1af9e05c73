"""The requests that decode together, in the native core: a step is one call.

Owns: nothing but the order of the requests; their rows are the core's.
Knows nothing of: how a step is made. `DecodeBatch` says what it does.

A step changes rows, and nothing else. What requests and tables know of it is written down late: when somebody reads it,
when they leave the batch, and by `settle`.
"""

import sys
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool._native import NativeBlockPool, NativeRows
from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.decode_batch import DecodeBatch, StepResult, delete_rows, require_room
from kvpool.core.groups import Groups
from kvpool.core.hashing import BlockHasher
from kvpool.core.late import late_names
from kvpool.core.publisher import Publisher
from kvpool.core.request import Request, RequestLike
from kvpool.core.room import Room
from kvpool.plan.kinds import FullAttention, SlidingWindow
from kvpool.types import BlockId, GroupId

_NEVER = sys.maxsize


def can_be_native(pool: BlockPool, room: Room, groups: Groups, publisher: Publisher) -> bool:
    """Whether the native core has rows for such a cache.

    It does where all groups keep everything or a sliding window, in blocks of one size, and where what is published of
    a block that fills does not depend on where it is.
    """
    is_native = NativeRows is not None and NativeBlockPool is not None and isinstance(pool, NativeBlockPool)
    are_plain = all(isinstance(group.kind, FullAttention | SlidingWindow) for group in groups.all)
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
        self._block_ids: list[list[list[BlockId]]] = []
        self._num_computed: list[int] = []
        """Of each row when it joined: all tokens but the last at least."""
        self._num_eager = 0
        """Requests that cannot be written down late."""
        self._shown: list[tuple[RequestLike, BlockTable]] = []
        """Those about which all is written down."""

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """How many tokens each row has, the one to be computed next included. Changes with the next step."""
        return np.asarray(self._rows.lengths())

    @property
    def last_tokens(self) -> npt.NDArray[np.int64]:
        """See `DecodeBatch.last_tokens`."""
        tokens: npt.NDArray[np.int64] = np.asarray(self._rows.last_tokens())[0]
        return tokens

    def add(self, requests: Sequence[RequestLike], tables: Sequence[BlockTable]) -> None:
        """Rows at the end. UsageError, and nothing changes, when a token before the last has no room."""
        require_room(requests, tables)
        for request, table in zip(requests, tables, strict=True):
            tokens = request.token_ids
            limit = None if request.max_tokens is None else request.num_prompt_tokens + request.max_tokens
            first_held = table.first_held[: len(self._room.windows)]
            self._rows.add(len(tokens), limit, table.block_ids, first_held)
            self.requests.append(request)
            self._tables.append(table)
            self._tokens.append(tokens)
            self._shown.append((request, table))
            self._block_ids.append(table.block_ids)
            self._num_computed.append(table.num_computed)
            self._num_eager += not late_names(request)
            _keep(self, request, table)
        self._note_unserved()

    def publish_from(self, row: int, num_left: int) -> None:
        """All tokens of this and the following rows but the last `num_left` are computed."""
        super().publish_from(row, num_left)
        for at in range(row, len(self)):
            self._num_computed[at] = self._tables[at].num_computed
            self._follow(at)

    def remove(self, leaving: Collection[RequestLike]) -> None:
        """Take rows out, the others keep their order. Those that leave, and only they, are up to date again.

        UsageError, and nothing changes, when one of them has no row here.
        """
        rows, gone = self._require_rows(leaving), set(leaving)
        for row in rows:
            self._settle_row(row)
            _keep(None, self.requests[row], self._tables[row])
            self._num_eager -= not late_names(self.requests[row])
        self._rows.remove(rows)
        self.requests = self.requests.copy()
        for column in (self.requests, self._tables, self._tokens, self._block_ids, self._num_computed):
            delete_rows(column, rows)
        self._shown = [pair for pair in self._shown if pair[0] not in gone]
        self._note_unserved()

    def ending_rows(self) -> list[int]:
        """The rows whose next token is their last."""
        rows: list[int] = self._rows.ending_rows()
        return rows

    def step(self, token_ids: Sequence[int]) -> StepResult:
        """See `KVCacheManager.step`."""
        if self._shown:
            self._hide()
        answer = self._rows.step(token_ids, self.requests, False)
        if answer is False:
            answer = self._step_of_others(token_ids)
        if self._num_eager:
            self.settle()
        if answer is None:
            return StepResult([], self._nothing, [])
        grown, block_ids, self.unserved = answer
        return StepResult(grown, np.asarray(block_ids), self.unserved)

    def _rows_of(self, requests: Collection[RequestLike]) -> list[int]:
        rows: list[int] = self._rows.rows_of(self.requests, requests)
        return rows

    def _step_of_others(self, token_ids: Sequence[int]) -> Any:
        """The same where the core cannot tell what is right: all that is not common."""
        self.validate(token_ids)
        rows = self._rows.border_rows()
        for row in rows:
            self._settle_row(row)
            self._tables[row].num_computed = len(self._tokens[row])
        self._publisher.publish([self.requests[row] for row in rows], [self._tables[row] for row in rows])
        for row in rows:
            self._follow(row)
        self._hide()
        answer = self._rows.step(np.frombuffer(array("q", token_ids), dtype=np.int64), self.requests, True)
        assert answer is not False, "a step that was validated was refused"
        return answer

    def serve(self) -> bool:
        """See `KVCacheManager.serve`."""
        if self.unserved:
            self._hide()
            answer = self._rows.serve(self.requests)
            self.unserved = answer[2] if answer else []
        return not self.unserved

    def settle(self) -> None:
        """Write down what steps have done to requests and tables."""
        if len(self._shown) < len(self):
            for row in range(len(self)):
                self._settle_row(row)

    def block_tables(self, group_id: GroupId = 0) -> npt.NDArray[np.int32]:
        """See `DecodeBatch.block_tables`. Not a copy: it changes with the next step."""
        return np.asarray(self._rows.block_tables(group_id))

    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """See `DecodeBatch.slot_mapping`."""
        return np.asarray(self._rows.slot_mapping())

    def check(self) -> None:
        """Raise AssertionError when a request in the batch was moved by anything but `step`. O(rows)."""
        self.settle()
        super().check()

    def _follow(self, row: int) -> None:
        """The core learns what the row's next block is named after, and from where on it is like any other."""
        request, table, tokens = self.requests[row], self._tables[row], self._tokens[row]
        committed, extra, first = table.num_committed, None, _NEVER
        parent = self._hasher.root
        if isinstance(request, Request) and request.has_own_names:
            if committed:
                parent = request.block_hashes(self._hasher)[committed // self._hasher.block_size - 1]
            first, extra = request.common_keys()
            first = max(first, self._publisher.first_steady(table))
        self._rows.follow(row, tokens[committed:], parent, extra, first)

    def _hide(self) -> None:
        """What is written down may be true no longer: take it away."""
        for request, table in self._shown:
            for thing in (request, table):
                for name in late_names(thing):
                    delattr(thing, name)
        self._shown = []
        self._rows.hide()

    def _settle_row(self, row: int) -> None:
        news = self._rows.news(row)
        if news is None:
            return
        new_tokens, new_block_ids, first_held, num_committed = news
        request, table, tokens, block_ids = (
            self.requests[row],
            self._tables[row],
            self._tokens[row],
            self._block_ids[row],
        )
        tokens += new_tokens
        for name in late_names(request):
            setattr(request, name, tokens)
        for ids, new in zip(block_ids, new_block_ids, strict=True):
            ids += new
        table.block_ids = block_ids
        table.num_slots = len(block_ids[0]) * table.block_sizes[0]
        table.num_computed = max(self._num_computed[row], len(tokens) - 1)
        table.num_committed = num_committed
        table.last_stop = max(table.last_stop, num_committed)
        self._room.pass_over(table, first_held)
        self._shown.append((request, table))

    def _note_unserved(self) -> None:
        self.unserved = [self.requests[row] for row in self._rows.unserved()]


def _keep(batch: NativeDecodeBatch | None, *things: object) -> None:
    """The batch, or nobody, writes them down."""
    for thing in things:
        if late_names(thing):
            setattr(thing, "keeper", batch)  # noqa: B010
