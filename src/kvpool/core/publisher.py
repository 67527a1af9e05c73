"""Making full blocks findable, and telling who wants to know.

Owns: the memory of first blocks that explains misses.
Knows nothing of: who decides that a block is computed.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.hashing import BlockHasher
from kvpool.core.hit import FirstBlocks, HitEnd
from kvpool.core.request import RequestLike
from kvpool.events import EventLog
from kvpool.types import BlockHash, BlockId


class Publisher:
    """Commits to the pool what tables say is computed."""

    def __init__(self, pool: BlockPool, hasher: BlockHasher, events: EventLog | None) -> None:
        self._pool = pool
        self._hasher = hasher
        self._events = events
        self._first_blocks = FirstBlocks()

    def publish(
        self,
        requests: Sequence[RequestLike],
        tables: Sequence[BlockTable],
        encoded: Iterable[bytes | None] = repeat(None),
    ) -> int:
        """Commit the blocks that are computed in full and not committed yet; how many.

        `encoded` has each request's last full block as `BlockHasher.encode` gives it, where that was done for all.
        """
        size = self._hasher.block_size
        block_ids: list[BlockId] = []
        names: list[BlockHash] = []
        for request, table, block in zip(requests, tables, encoded, strict=False):
            start, stop = table.num_committed // size, table.num_computed // size
            if start == stop:
                continue
            chain = request.block_hashes(self._hasher, block)
            if start == 0:
                self._first_blocks.add(chain[0], request.plain_name(self._hasher))
            block_ids += table.block_ids[0][start:stop]
            names += chain[start:stop]
            table.num_committed = stop * size
            if self._events is not None:
                self._events.stored(chain, start, stop, request.token_ids, size)
        self._pool.commit(block_ids, names)
        return len(names)

    def why_missing(self, request: RequestLike, name: BlockHash, *, is_first: bool) -> HitEnd:
        """Why this full block of the request cannot be found."""
        if self._pool.was_evicted(name):
            return HitEnd.EVICTED
        return self._first_blocks.miss(name, request.plain_name(self._hasher)) if is_first else HitEnd.NEVER_SEEN

    def forget(self) -> None:
        """The cache was cleared: old content is no longer a reason."""
        self._first_blocks = FirstBlocks()
