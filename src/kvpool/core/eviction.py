"""Which free block goes first.

The order of the free queue is the eviction policy: allocation takes from the front, whatever stands there. A policy
decides where a block goes when its last holder lets go of it. Recency is a position, not a clock.

Owns: the order of the free blocks, and which names were evicted lately.
Knows nothing of: what blocks contain, who held them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

from kvpool.types import NULL_BLOCK, BlockHash, BlockId


class LRU:
    """Free blocks, least recently used first: empty ones go to the front, cached ones to the back.

    A doubly linked list in two flat arrays, so that a block is taken out of the middle in constant time and nothing is
    allocated. The null block, which is never free, is the list's head and tail.
    """

    name = "lru"

    def __init__(self, num_blocks: int) -> None:
        # Both arrays hold the same number objects, which keeps half as many of them in the processor's cache.
        blocks = list(range(num_blocks))
        self._next = [*blocks[1:], NULL_BLOCK]
        self._previous = [blocks[-1], *blocks[:-1]]
        self._length = num_blocks - 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[BlockId]:
        """The free blocks in the order in which they will be reused."""
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            yield block
            block = self._next[block]

    def take(self, count: int) -> list[BlockId]:
        """The `count` front blocks, in order; they are no longer free. The caller has seen that there are so many."""
        assert count <= self._length, f"{count} blocks are taken, {self._length} are free"
        following = self._next
        block = NULL_BLOCK
        taken = [block := following[block] for _ in repeat(None, count)]
        self._link(NULL_BLOCK, following[block])
        self._length -= count
        return taken

    def remove(self, blocks: Iterable[BlockId]) -> None:
        """These free blocks found a holder, wherever they stand."""
        following, previous = self._next, self._previous
        count = 0
        for block in blocks:
            before, after = previous[block], following[block]
            following[before] = after
            previous[after] = before
            count += 1
        self._length -= count

    def add_empty(self, blocks: Sequence[BlockId]) -> None:
        """Blocks without findable content: nothing is lost by reusing them at once, the first of them first."""
        self._insert(NULL_BLOCK, blocks)

    def add_cached(self, blocks: Sequence[BlockId]) -> None:
        """Blocks that can still be found, the one to be evicted first in front."""
        self._insert(self._previous[NULL_BLOCK], blocks)

    def _insert(self, before: BlockId, blocks: Sequence[BlockId]) -> None:
        following, previous = self._next, self._previous
        after = following[before]
        for block in blocks:
            following[before] = block
            previous[block] = before
            before = block
        self._link(before, after)
        self._length += len(blocks)

    def _link(self, before: BlockId, after: BlockId) -> None:
        self._next[before] = after
        self._previous[after] = before

    def check(self) -> None:
        """The list is whole in both directions and as long as it says. O(blocks)."""
        forward = list(self)
        assert len(forward) == self._length == len(set(forward)), "invariant 2: the free queue is broken"
        assert all(self._previous[self._next[b]] == b for b in [NULL_BLOCK, *forward]), "invariant 2: a link is one-way"


class RankedLRU(LRU):
    """The same with spare blocks between the empty and the cached ones, least recently used first among themselves.

    A spare block can still be found, but serves a hit at few lengths. The border is the last block that is empty or
    spare; the null block while there is none.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._border = self._previous[NULL_BLOCK]

    def take(self, count: int) -> list[BlockId]:
        taken = super().take(count)
        if self._border in taken:
            self._border = NULL_BLOCK
        return taken

    def remove(self, blocks: Iterable[BlockId]) -> None:
        gone = set(blocks)
        while self._border in gone:
            self._border = self._previous[self._border]
        super().remove(gone)

    def add_empty(self, blocks: Sequence[BlockId]) -> None:
        super().add_empty(blocks)
        if blocks and self._border == NULL_BLOCK:
            self._border = blocks[-1]

    def add_spare(self, blocks: Sequence[BlockId]) -> None:
        """Blocks that can still be found at few lengths, the one to be evicted first in front."""
        self._insert(self._border, blocks)
        self._border = blocks[-1] if blocks else self._border

    def check(self) -> None:
        super().check()
        assert self._border == NULL_BLOCK or self._border in set(self), (
            f"invariant 2: block {self._border} is no border"
        )


class RecentNames:
    """The names that were added lately: the last `limit` at least, not many more than twice as many, in no order."""

    def __init__(self, limit: int = 32_768) -> None:
        self._limit = limit
        self._young: set[BlockHash] = set()
        self._old: set[BlockHash] = set()

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._young or name in self._old

    def add(self, name: BlockHash) -> None:
        self._young.add(name)
        self._turn()

    def update(self, names: Iterable[BlockHash]) -> None:
        self._young.update(names)
        self._turn()

    def _turn(self) -> None:
        if len(self._young) >= self._limit:
            self._young, self._old = set(), self._young
