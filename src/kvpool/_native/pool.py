"""The native block pool as the rest of kvpool knows it. Can be imported only where it is built.

Owns: what blocks depend on where blocks of several sizes lie side by side, until another takes its place.
Knows nothing of: requests, layers, tokens, bytes, time.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, SupportsIndex, TypeAlias

from kvpool._native._core import SOURCES, Pool, Rows, encode_blocks, features, hash_blocks, hash_encoded, hash_into
from kvpool.events import EventLog
from kvpool.limits import MAX_BLOCKS, require_pool_size
from kvpool.types import BlockHash, BlockId

__all__ = [
    "SOURCES", "NativeBlockPool", "Rows", "encode_blocks", "features", "hash_blocks", "hash_encoded", "hash_into",
]  # fmt: skip

_BORDER, _INSIDE, _WHOLE = range(3)
_Tie: TypeAlias = tuple[int, BlockId, BlockHash, int]


class NativeBlockPool(Pool):
    """The same as `kvpool.core.block_pool.BlockPool`, which says what every verb does. Verbs that take ids or names
    take arrays too: ids as one row of int32 or int64, names as bytes, 32 for each.

    A name is 32 bytes, at most 20 bytes, or a number of 64 bits. Where a call breaks the protocol, nothing is changed.
    """

    __slots__ = ("_events", "_lineages")

    policy = "lru"

    _events: EventLog | None
    _lineages: dict[BlockId, Any]

    def __new__(
        cls, num_blocks: int, events: EventLog | None = None, num_groups: int = 1, *, is_ranked: bool = False
    ) -> "NativeBlockPool":
        require_pool_size(num_blocks, num_groups)
        lineages: dict[BlockId, Any] = {}
        on_removed = events.removed if events is not None else None
        pool = super().__new__(cls, num_blocks, num_groups, is_ranked, on_removed, lineages)
        pool._events, pool._lineages = events, lineages
        return pool

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a native pool, and a cache that has one, cannot be copied or pickled: make another with the same "
            "arguments, or set KVPOOL_NATIVE=0"
        )

    def lineage(self, block_id: BlockId) -> Any | None:
        """What a block with a name depends on where blocks of several sizes lie side by side; None elsewhere."""
        return self._lineages[block_id] if self.has_lineage(block_id) else None

    def dependents(self, names: Mapping[BlockHash, int]) -> set[BlockHash]:
        """These names, and those of all content that was computed on top of what is bad. O(blocks)."""
        blocks = self.find_dependents(names, self._ties())
        found = {name for block in blocks if (name := self.name(block)) is not None}
        return found | set(names)

    def withdraw(self, names: Mapping[BlockHash, int]) -> int:
        """What depends on bad content can be found no more; how many blocks lost a name. O(blocks)."""
        return self.withdraw_dependents(names, self._ties())

    def clear(self) -> bool:
        """Forget every name; the order of the free queue stays. False, and nothing changes, while any block is held."""
        if not super().clear():
            return False
        self._lineages.clear()
        if self._events is not None:
            self._events.cleared()
        return True

    def _ties(self) -> Iterator[_Tie]:
        """What each block with a lineage depends on, one by one."""
        for block, lineage in self._lineages.items():
            if not self.has_lineage(block):
                continue
            if lineage.border is not None:
                yield _BORDER, block, lineage.border, MAX_BLOCKS
            for before, num_tokens in lineage.inside:
                yield _INSIDE, block, before, num_tokens
            if lineage.whole is not None:
                yield _WHOLE, block, lineage.whole, lineage.num_left
