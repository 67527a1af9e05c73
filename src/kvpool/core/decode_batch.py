"""The requests that decode together: one row each, so that a step costs array operations and not a loop.

Owns: the length of each row, and the length at which it ends.
Knows nothing of: which requests are live. The manager looks them up, and is the one to call.
"""

import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.groups import Groups
from kvpool.core.hashing import BlockHasher
from kvpool.core.publisher import Publisher
from kvpool.core.request import RequestLike, plain_ids
from kvpool.core.room import Room
from kvpool.errors import UsageError
from kvpool.types import NULL_BLOCK, BlockId, GroupId


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `step` did: request `grown[i]` got block `block_ids[i, g]` at the end of its table of group g.

    int32, shape (grown, groups); the null block where that table had room. The new tokens of the requests `unserved`,
    in the order given, have no room.
    """

    grown: list[RequestLike]
    block_ids: npt.NDArray[np.int32]
    unserved: list[RequestLike]


class DecodeBatch:
    """Rows in the order in which requests joined. Made empty; read `requests`, give it to the manager's verbs.

    All tokens of a row but its last are computed. While a request is in a batch only `step` moves it: its token list is
    always up to date, its table's `num_computed` stands at the last block border, or further on, until it leaves.
    """

    def __init__(self, pool: BlockPool, room: Room, groups: Groups, publisher: Publisher, hasher: BlockHasher) -> None:
        self._requests: list[RequestLike] = []
        self._unserved: list[RequestLike] = []
        self._pool = pool
        self._room = room
        self._groups = groups
        self._publisher = publisher
        self._hasher = hasher
        self._tables: list[BlockTable] = []
        self._tokens: list[list[int]] = []
        self._lengths = np.zeros(0, dtype=np.int64)
        self._limits = np.zeros(0, dtype=np.int64)
        self._num_settled = 0
        """Rows before this one have let go of all that was out of their windows when they last got room."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def requests(self) -> list[RequestLike]:
        """In order of their rows. Read it, do not write it; it stays as it is when requests leave."""
        return self._requests

    @property
    def unserved(self) -> list[RequestLike]:
        """Those whose last token has no room, in order of their rows; a list of the caller's own."""
        return self._unserved.copy()

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """How many tokens each row has, the one to be computed next included. Changes with the next step."""
        return _read_only(self._lengths.view())

    @property
    def last_tokens(self) -> npt.NDArray[np.int64]:
        """The last token of each row, the one to be computed next: int64, shape (rows,)."""
        return np.fromiter((tokens[-1] for tokens in self._tokens), np.int64, len(self))

    def add(self, requests: Sequence[RequestLike], tables: Sequence[BlockTable]) -> None:
        """Rows at the end. UsageError, and nothing changes, when a token before the last has no room."""
        for request, table in zip(requests, tables, strict=True):
            require_room(request, table)
        tokens = list(map(list_of_tokens, requests))
        lengths = list(map(len, tokens))
        limits = list(map(longest, requests))
        self._requests += requests
        self._tables += tables
        self._tokens += tokens
        self._lengths = np.append(self._lengths, np.array(lengths, dtype=np.int64))
        self._limits = np.append(self._limits, np.array(limits, dtype=np.int64))
        rows = zip(requests, tables, lengths, strict=True)
        self._unserved += [request for request, table, length in rows if table.num_slots < length]

    def join(self, request: RequestLike, table: BlockTable) -> None:
        """A row at the end, all of whose tokens but the last are computed. Nothing changes when that raises."""
        self._publish_all_but_last(request, table)
        self.add([request], [table])
        table.is_decoding = True

    def remove(self, leaving: Iterable[RequestLike]) -> None:
        """Take rows out, the others keep their order. The tables of those that leave are up to date again.

        UsageError, and nothing changes, when one of them has no row here.
        """
        gone = set(leaving)
        rows = [row for row, request in enumerate(self._requests) if request in gone]
        if len(rows) < len(gone):
            stranger = gone.difference(self._requests).pop()
            raise UsageError(f"request {stranger.request_id!r} leaves a batch that it is not in")
        self.settle()
        for row in rows:
            self._tables[row].is_decoding = False
        self._unserved = [request for request in self._unserved if request not in gone]
        self._num_settled -= bisect_left(rows, self._num_settled)
        self._requests = self._requests.copy()
        for column in (self._requests, self._tables, self._tokens):
            delete_rows(column, rows)
        self._lengths = np.delete(self._lengths, rows)
        self._limits = np.delete(self._limits, rows)

    def ending_rows(self) -> list[int]:
        """The rows whose next token is their last."""
        rows: list[int] = (self._lengths >= self._limits - 1).nonzero()[0].tolist()
        return rows

    def step(self, token_ids: Iterable[int]) -> StepResult:
        """See `KVCacheManager.step`."""
        return self._move(self._tokens_of_step(token_ids))

    def only_step(self, token_ids: Iterable[int]) -> StepResult:
        """The same for a batch that is made for one step, of requests whose tables may be behind."""
        numbers = self._tokens_of_step(token_ids)
        self._publisher.publish(self._requests, self._tables, self._lengths.tolist())
        result = self._move(numbers)
        self.settle()
        return result

    def _move(self, token_ids: list[int]) -> StepResult:
        self._publish()
        rows, slides = self._turning_rows()
        deque(map(list.append, self._tokens, token_ids), maxlen=0)
        self._lengths += 1
        result = self._extend([self._requests[row] for row in rows], [self._tables[row] for row in rows], slides)
        self._unserved = result.unserved.copy()
        return result

    def serve(self) -> bool:
        """See `KVCacheManager.serve`."""
        if self._unserved:
            in_need = set(self._unserved)
            tables = [table for request, table in zip(self._requests, self._tables, strict=True) if request in in_need]
            self._unserved = self._extend(self._unserved, tables, repeat(True)).unserved
        return not self._unserved

    def settle(self) -> None:
        """Bring all tables up to date."""
        for tokens, table in zip(self._tokens, self._tables, strict=True):
            table.num_computed = max(table.num_computed, len(tokens) - 1)

    def block_tables(self, group_id: GroupId = 0) -> npt.NDArray[np.int32]:
        """The block ids of every row in a group: int32, shape (rows, columns), the null block behind a table's end.

        For an engine's kernels; read-only. It holds until the batch changes.
        """
        self._groups.require(group_id)
        tables = [table.block_ids[group_id] for table in self._tables]
        blocks = np.full((len(self), max(map(len, tables), default=0)), NULL_BLOCK, dtype=np.int32)
        for row, ids in enumerate(tables):
            blocks[row, : len(ids)] = ids
        return _read_only(blocks)

    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """The slot of every row's last token, the next to be computed: int64, shape (groups, rows).

        As in `BlockTable.slot_mapping`, slot = block id * block_size + offset. It lies in the null block where the
        token has no room, and in groups of cross attention, where it needs none.
        """
        slots = np.zeros((len(self._groups), len(self)), dtype=np.int64)
        last = self.num_tokens - 1
        for group in self._groups.all:
            blocks, offsets = last // group.block_size, last % group.block_size
            if not group.is_encoder:
                ids = [table.block_ids[group.group_id] for table in self._tables]
                found = [own[at] if at < len(own) else NULL_BLOCK for own, at in zip(ids, blocks.tolist(), strict=True)]
                slots[group.group_id] = np.array(found, dtype=np.int64) * group.block_size
            slots[group.group_id] += offsets
        return _read_only(slots)

    def belongs_to(self, pool: BlockPool) -> bool:
        """Whether its blocks come from this pool."""
        return self._pool is pool

    def check(self) -> None:
        """Raise AssertionError when a request in the batch was moved by anything but `step`. O(rows)."""
        for request, table, length in zip(self._requests, self._tables, self._lengths.tolist(), strict=True):
            check_row(request, table, length)

    def _tokens_of_step(self, token_ids: Iterable[int]) -> list[int]:
        """These, as plain numbers. UsageError unless a step can be made with them."""
        numbers = plain_ids(token_ids)
        if len(numbers) != len(self):
            raise UsageError(f"{len(self)} requests and {len(numbers)} tokens: a step takes one token a request")
        for request in self.unserved:
            raise UsageError(f"request {request.request_id!r} has no room for its last token: serve it first")
        return numbers

    def _publish_all_but_last(self, request: RequestLike, table: BlockTable) -> tuple[list[int], list[int], int]:
        """All that can be wrong with a request that joins is found here, before anything changes.

        Its tokens, the last of them as plain numbers, a block's worth at most, and how many it has at its end.
        """
        require_room(request, table)
        tokens, limit = list_of_tokens(request), longest(request)
        try:
            last = plain_ids(tokens[-self._groups.alignment :])
        except UsageError as error:
            raise UsageError(f"request {request.request_id!r}: {error}") from None
        self._publisher.publish((request,), (table,), (max(table.num_computed, len(tokens) - 1),))
        return tokens, last, limit

    def _publish(self) -> None:
        """Requests whose last block is full in all groups: all of it is computed."""
        rows = (self._lengths % self._groups.alignment == 0).nonzero()[0].tolist()
        requests, tables = [self._requests[row] for row in rows], [self._tables[row] for row in rows]
        lengths = [len(self._tokens[row]) for row in rows]
        encoded: Iterable[bytes | None] = repeat(None)
        if self._groups.unit == self._groups.alignment:
            encoded = self._hasher.encode(_last_blocks(requests, self._hasher.block_size))
        self._publisher.publish(requests, tables, lengths, encoded)

    def _turning_rows(self) -> tuple[list[int], list[bool]]:
        """The rows that may need or give up a block with their next token, and which may give one up.

        Their tables know how far they are.
        """
        lengths = self._lengths
        slides = np.zeros(len(self), dtype=bool)
        for block_size, remainder in self._room.slides:
            slides |= lengths % block_size == remainder
        if self._groups.are_windowed:
            slides[self._num_settled :] = True
            self._num_settled = len(self)
        turns = slides.copy()
        for block_size in self._groups.block_sizes:
            turns |= lengths % block_size == 0
        rows: list[int] = turns.nonzero()[0].tolist()
        for row in rows:
            self._tables[row].num_computed = len(self._tokens[row])
        return rows, slides[rows].tolist()

    def _extend(
        self, requests: Sequence[RequestLike], tables: Sequence[BlockTable], slides: Iterable[bool]
    ) -> StepResult:
        """Blocks for each request whose last token has no room, in order, for whom there are any.

        Those that slide let go of what fell out of their windows first.
        """
        if self._groups.is_plain:
            return self._extend_by_one(requests, tables)
        grown, new, unserved = [], list[list[BlockId]](), []
        for request, table, does_slide in zip(requests, tables, slides, strict=False):
            if does_slide:
                self._room.slide(table, 1)
            length = len(request.token_ids)
            if table.num_slots >= length:
                continue
            if self._room.is_uniform:
                blocks = self._room.grow_by_one(table)
                if blocks is None:
                    unserved.append(request)
                else:
                    grown.append(request)
                    new.append(blocks)
                continue
            before = list(map(len, table.block_ids))
            if self._room.grow(table, length - 1, length):
                grown.append(request)
                ends = zip(table.block_ids, before, strict=True)
                new.append([ids[-1] if len(ids) > count else NULL_BLOCK for ids, count in ends])
            else:
                unserved.append(request)
        return StepResult(grown, np.array(new, dtype=np.int32).reshape(-1, len(self._groups)), unserved)

    def _extend_by_one(self, requests: Sequence[RequestLike], tables: Sequence[BlockTable]) -> StepResult:
        """The same where one group keeps everything, so that all blocks are taken at once."""
        short = [(r, table) for r, table in zip(requests, tables, strict=True) if table.num_slots < len(r.token_ids)]
        num_served = min(len(short), self._pool.num_free)
        new = self._room.take(num_served)
        for (_, table), block in zip(short, new, strict=False):
            table.block_ids[0].append(block)
            table.num_slots += table.block_sizes[0]
        in_need = [request for request, _ in short]
        return StepResult(in_need[:num_served], np.array(new, dtype=np.int32)[:, None], in_need[num_served:])


def check_row(request: RequestLike, table: BlockTable, length: int) -> None:
    """AssertionError unless the request is as long as its row."""
    num_more = request.num_tokens - length
    assert num_more == 0, f"{request.request_id!r} grew by {num_more} tokens in a batch"
    assert table.is_decoding, f"{request.request_id!r} is in a batch, and its table does not know"


def delete_rows(column: list[Any], rows: Sequence[int]) -> None:
    """Take these rows, rising, out of a column."""
    for row in reversed(rows):
        del column[row]


def require_room(request: RequestLike, table: BlockTable) -> None:
    """UsageError when a token before the last of a request has no room."""
    if table.num_slots < request.num_tokens - 1:
        raise UsageError(
            f"request {request.request_id!r} has {request.num_tokens} tokens and room for {table.num_slots}: "
            "allocate for it before it decodes"
        )


def list_of_tokens(request: RequestLike) -> list[int]:
    """The list that a step appends to. UsageError when it is none of token ids, or not the same every time."""
    tokens = request.token_ids
    if not isinstance(tokens, list) or tokens is not request.token_ids:
        raise UsageError(f"request {request.request_id!r}: its token_ids are not one list, the same every time")
    return tokens


Array = TypeVar("Array", bound=npt.NDArray[Any])


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


_MOST = np.iinfo(np.int64).max


def longest(request: RequestLike) -> int:
    """How many tokens the request has at its end; as many as there can be where that is not known."""
    if request.max_tokens is None:
        return _MOST
    return min(request.num_prompt_tokens + operator.index(request.max_tokens), _MOST)


def _last_blocks(requests: Sequence[RequestLike], block_size: int) -> npt.NDArray[np.int64]:
    """The last `block_size` tokens of each request: int64, shape (requests, block_size)."""
    tokens = chain.from_iterable([request.token_ids[-block_size:] for request in requests])
    return np.fromiter(tokens, np.int64, len(requests) * block_size).reshape(-1, block_size)
