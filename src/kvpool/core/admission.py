"""A request's first allocation: what it takes, and the block table that it gets.

Owns: the counters of hits.
Knows nothing of: which other requests are live.
"""

from collections.abc import Sequence

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.groups import Groups
from kvpool.core.hashing import BlockHasher
from kvpool.core.hit import Hit, HitEnd
from kvpool.core.publication import Publication
from kvpool.core.request import RequestLike
from kvpool.core.room import Room
from kvpool.errors import UsageError
from kvpool.plan.kinds import cdiv
from kvpool.stats import CacheStats
from kvpool.types import NULL_BLOCK, BlockHash, BlockId


class Admission:
    """Turns hits into block tables."""

    def __init__(
        self, pool: BlockPool, room: Room, groups: Groups, publication: Publication, hasher: BlockHasher
    ) -> None:
        self.stats = CacheStats()
        self.no_hit = Hit(0, tuple([] for _ in groups.all), HitEnd.NOT_READ, 0)
        """Stands where a request is admitted without one."""
        self._pool = pool
        self._room = room
        self._groups = groups
        self._publication = publication
        self._hasher = hasher
        self._block_sizes = tuple(group.block_size for group in groups.all)
        self._num_scratch_blocks = sum(group.num_scratch_blocks for group in groups.all)

    def num_blocks(self, request: RequestLike, num_tokens: int, hit: Hit, num_external: int, num_ahead: int) -> int:
        """What `admit` would take out of the free queue."""
        start = hit.num_tokens + num_external
        missing = self._room.missing(request, hit.block_ids, start, start + num_tokens, num_ahead)
        found = _real_blocks(self._first_blocks(hit, start))
        return sum(map(len, missing)) + self._num_scratch_blocks + self._pool.num_idle(found)

    def most_blocks(self, request: RequestLike, num_tokens: int, hit: Hit) -> int:
        """The most that the request takes out of the free queue until `num_tokens` after the hit are computed."""
        total = self._num_scratch_blocks
        for group, ids in zip(self._groups.all, hit.block_ids, strict=True):
            stop = request.num_encoder_tokens if group.is_encoder else hit.num_tokens + num_tokens
            taken = group.num_blocks(stop) - len(ids) + self._pool.num_idle(filter(None, ids))
            total += min(taken, self._groups.max_live_blocks(group, stop))
        return total

    def admit(
        self, request: RequestLike, num_tokens: int, hit: Hit, num_external: int, num_ahead: int
    ) -> BlockTable | None:
        """The table of a request that begins with this hit; None, and nothing changes, when the pool is short."""
        self._validate(request, num_tokens + num_external, hit)
        if self._groups.is_plain:
            table = self._plain_table(request, num_tokens + num_external, hit, num_ahead)
        else:
            table = self._table(request, num_tokens, hit, num_external, num_ahead)
        if table is not None:
            table.num_outside = hit.num_tokens + num_external
            self._count(request, hit.num_tokens)
        return table

    def _plain_table(self, request: RequestLike, num_tokens: int, hit: Hit, num_ahead: int) -> BlockTable | None:
        """The table where one group keeps everything."""
        found, size = hit.block_ids[0], self._block_sizes[0]
        num_new = max(cdiv(hit.num_tokens + num_tokens + num_ahead, size) - len(found), 0)
        if self._is_short(num_new, found):
            return None
        if found:
            self._pool.touch(found)
        table = BlockTable(request, [found + self._room.take(num_new)], self._block_sizes, hit.num_tokens)
        table.num_slots = (len(found) + num_new) * size
        return table

    def _table(
        self, request: RequestLike, num_tokens: int, hit: Hit, num_external: int, num_ahead: int
    ) -> BlockTable | None:
        start = hit.num_tokens + num_external
        missing = self._room.missing(request, hit.block_ids, start, start + num_tokens, num_ahead)
        num_new = sum(map(len, missing)) + self._num_scratch_blocks
        ids = self._first_blocks(hit, start)
        found = _real_blocks(ids)
        if self._is_short(num_new, found):
            return None
        table = BlockTable(request, ids, self._block_sizes, hit.num_tokens, self._publication.boundaries(request, hit))
        self._pool.touch(found)
        self._room.fill(table, missing, start + num_tokens)
        table.scratch_ids = self._room.take(self._num_scratch_blocks)
        return table

    def _is_short(self, num_new: int, found: Sequence[BlockId]) -> bool:
        """Whether fewer blocks are free than the new ones and those found that nobody holds."""
        num_free = self._pool.num_free
        return num_new + len(found) > num_free and num_new + self._pool.num_idle(found) > num_free

    def _first_blocks(self, hit: Hit, start: int) -> list[list[BlockId]]:
        """The blocks of the hit, but for those that the token at `start`, behind tokens from outside, looks past."""
        tables = [list(ids) for ids in hit.block_ids]
        for group, ids in zip(self._groups.all, tables, strict=True):
            if group.is_windowed and start > hit.num_tokens:
                live = min(group.first_live_block(start), len(ids))
                sinks = min(group.num_sink_blocks, live)
                ids[sinks:live] = [NULL_BLOCK] * (live - sinks)
        return tables

    def _validate(self, request: RequestLike, num_tokens: int, hit: Hit) -> None:
        if num_tokens < 0 or (num_tokens == 0 and not hit.num_tokens):
            raise UsageError(
                f"request {request.request_id!r} asks for room for {num_tokens} tokens: at least 1, or 0 beside a hit"
            )
        if hit is not self.no_hit and not self._is_current(request, hit):
            raise UsageError(
                f"request {request.request_id!r}: the hit is stale or of another request; match again before allocate"
            )

    def _is_current(self, request: RequestLike, hit: Hit) -> bool:
        """Whether these are the request's first blocks, as far as each group needs them."""
        try:
            return self._carries(request, hit)
        except IndexError:
            return False  # a block that this pool does not have

    def _carries(self, request: RequestLike, hit: Hit) -> bool:
        if len(hit.block_ids) != len(self._groups) or hit.num_tokens % self._groups.alignment:
            return False
        if not hit.num_tokens:
            return not any(hit.block_ids)
        hashes = request.block_hashes(self._hasher)
        if self._groups.is_plain:
            stop = hit.num_tokens // self._block_sizes[0]
            return len(hit.block_ids[0]) == stop and self._pool.carry(hit.block_ids[0], hashes[:stop])
        for group, ids in zip(self._groups.all, hit.block_ids, strict=True):
            stop = 0 if group.is_encoder else hit.num_tokens // group.block_size
            names: Sequence[BlockHash] = group.names(hashes, 0, stop)
            if not len(ids) == len(names) == stop:
                return False
            if group.is_windowed:
                live = group.first_live_block(hit.num_tokens)
                if not all(ids[live:]) or not all(ids[: min(group.num_sink_blocks, live)]):
                    return False
                names = [name for name, block in zip(names, ids, strict=True) if block]
                ids = [block for block in ids if block]
            if not self._pool.carry(ids, names, group.group_id):
                return False
        return True

    def _count(self, request: RequestLike, num_hit_tokens: int) -> None:
        stats = self.stats
        if not request.reads_cache:
            return
        if request.num_preemptions:
            stats.num_resumed_requests += 1
            stats.num_resumed_queried_tokens += request.num_tokens
            stats.num_resumed_hit_tokens += num_hit_tokens
        else:
            stats.num_requests += 1
            stats.num_queried_tokens += request.num_tokens
            stats.num_hit_tokens += num_hit_tokens


def _real_blocks(block_ids: Sequence[Sequence[BlockId]]) -> list[BlockId]:
    """The blocks of all groups, without the null block."""
    return [block for ids in block_ids for block in ids if block]
