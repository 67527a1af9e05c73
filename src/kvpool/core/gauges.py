"""What can be asked of a cache: nothing changes by asking.

Knows nothing of: how things came to be as they are.
"""

import logging
from collections.abc import Collection

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.groups import Groups
from kvpool.core.request import RequestLike
from kvpool.errors import UsageError
from kvpool.stats import Usage
from kvpool.types import NULL_BLOCK, BlockHash, BlockId, GroupId, RequestId

_LOG = logging.getLogger(__name__)
LARGE_HIT = 1024
"""A cache that cannot hit prefixes of so many tokens says so when it is made."""


class Gauges:
    """The questions that `KVCacheManager` answers about its blocks and its live requests."""

    def __init__(self, groups: Groups, pool: BlockPool) -> None:
        self.groups = groups
        self._pool = pool
        self._tables: dict[RequestId, BlockTable] = {}
        self._max_tokens: dict[int, int] = {}
        self._warn_of_large_hits()

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return self._pool.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self._pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds: what an allocation can take."""
        return self._pool.num_free

    @property
    def num_evictions(self) -> int:
        """Blocks whose content was given up for another request, since the cache was made."""
        return self._pool.num_evictions

    @property
    def policy(self) -> str:
        """The name of the eviction policy."""
        return self._pool.policy

    @property
    def num_live_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._tables)

    def free_block_ids(self) -> list[BlockId]:
        """The free queue, first to be reused first. O(blocks)."""
        return self._pool.free_block_ids()

    def holders(self, block_id: BlockId) -> int:
        """How many block tables the block stands in."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"there is no block {block_id}: the pool has {self.num_blocks}")
        return self._pool.holders(block_id)

    def findable(self, group_id: GroupId = 0) -> set[BlockHash]:
        """The names of all blocks that a match can find in the group. O(blocks)."""
        self.groups.require(group_id)
        return self._pool.names(group_id)

    def table(self, request: RequestLike) -> BlockTable | None:
        """The block table of a live request; None when it holds nothing."""
        table = self._tables.get(request.request_id)
        return table if table is not None and table.request is request else None

    def num_held_blocks(self, request: RequestLike) -> int:
        """The blocks that stand in a live request's table, shared ones too."""
        table = self._require_live(request)
        return sum(len(ids) - ids.count(NULL_BLOCK) for ids in table.block_ids) + len(table.scratch_ids)

    def max_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """The most blocks that one request of `num_tokens` tokens holds at any time.

        Holds while at most `max_in_flight_tokens` of them are allocated and not computed yet.
        """
        return self.groups.max_blocks(num_tokens, num_encoder_tokens)

    def max_tokens(self, num_encoder_tokens: int = 0) -> int:
        """The longest request that fits when it is alone; 2**31 - 1 where windows and states bound what it holds."""
        if num_encoder_tokens not in self._max_tokens:
            self._max_tokens[num_encoder_tokens] = self.groups.max_tokens(self.num_usable_blocks, num_encoder_tokens)
        return self._max_tokens[num_encoder_tokens]

    def max_concurrency(self, num_tokens: int) -> float:
        """How many requests of `num_tokens` tokens fit at once when they share nothing. UsageError below 1 token."""
        if num_tokens < 1:
            raise UsageError(f"a request of {num_tokens} tokens takes no block: at least 1")
        return self.num_usable_blocks / self.max_blocks(num_tokens)

    @property
    def alignment(self) -> int:
        """Hits end at multiples of this many tokens."""
        return self.groups.alignment

    @property
    def smallest_hit(self) -> int | None:
        """The smallest prefix, in tokens, that can hit; None when none ever can."""
        return self.groups.smallest_hit

    def usage(self) -> Usage:
        """What every block is doing now. O(live requests); O(held blocks) where block sizes differ."""
        return _usage(self._pool, self.groups, self._tables.values())

    def _warn_of_large_hits(self) -> None:
        if self.smallest_hit is None:
            _LOG.warning("no prefix can ever hit: a group of states keeps no checkpoints")
        elif self.smallest_hit > LARGE_HIT:
            sizes = sorted({group.block_size for group in self.groups.decoder})
            _LOG.warning("smallest prefix that can hit: %d tokens (block sizes %s)", self.smallest_hit, sizes)

    def _require_live(self, request: RequestLike) -> BlockTable:
        table = self._tables.get(request.request_id)
        if table is None:
            raise UsageError(f"request {request.request_id!r} holds no blocks: it was freed, or never allocated")
        if table.request is not request:
            raise UsageError(
                f"another live request has the id {request.request_id!r}: ids are unique while a request lives"
            )
        return table


def _usage(pool: BlockPool, groups: Groups, tables: Collection[BlockTable]) -> Usage:
    num_held = pool.num_usable - pool.num_free
    num_slots = _num_held_slots(groups, tables, num_held)
    unfilled = sum(_num_unfilled(groups, table) for table in tables)
    return Usage(
        num_usable=pool.num_usable,
        num_held=num_held,
        num_cached=pool.num_cached,
        num_empty=pool.num_free - pool.num_cached,
        num_filled_slots=num_slots - unfilled,
        num_held_slots=num_slots,
    )


def _num_unfilled(groups: Groups, table: BlockTable) -> int:
    """The slots of a request's last blocks that have no computed token; a state fills its block."""
    request, total = table.request, 0
    computed = max(table.num_computed, request.num_tokens - 1) if table.is_decoding else table.num_computed
    for group, ids in zip(groups.all, table.block_ids, strict=True):
        if not group.is_state:
            filled = request.num_encoder_tokens if group.is_encoder else computed
            first = filled // group.block_size
            total += sum(group.block_size for block in ids[first:] if block)
            total -= filled % group.block_size if first < len(ids) and ids[first] else 0
    return total


def _num_held_slots(groups: Groups, tables: Collection[BlockTable], num_held: int) -> int:
    sizes = {group.block_size for group in groups.all}
    if len(sizes) == 1:
        return num_held * sizes.pop()
    held: list[set[BlockId]] = [set() for _ in groups.all]
    for table in tables:
        for own, ids in zip(held, table.block_ids, strict=True):
            own.update(filter(None, ids))
    return sum(len(own) * group.block_size for own, group in zip(held, groups.all, strict=True))
