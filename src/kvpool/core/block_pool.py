"""The blocks of the cache: who holds each one, what it contains, when it may be reused.

Owns: every block's holders and name, the index of names, and (through the policy) the free queue.
Knows nothing of: requests, layers, tokens, bytes, time.

Between calls invariants 1 to 5 of docs/invariants.md hold; `check()` proves them.
"""

from collections.abc import Iterable, Sequence

from kvpool.core.eviction import LRU, RecentNames
from kvpool.errors import ConfigError
from kvpool.events import EventLog
from kvpool.types import NULL_BLOCK, BlockHash, BlockId

MAX_BLOCKS = 2**31 - 1


class BlockPool:
    """A fixed set of blocks shared by all requests. Block 0 is the null block; the rest start free and empty.

    `num_cached` counts free blocks with a name, `num_evictions` the names that were given up for another request.

    Several blocks may carry the same name (two requests computed the same prefix at the same time): each keeps it, the
    one committed first is the one that is found.
    """

    def __init__(self, num_blocks: int, events: EventLog | None = None) -> None:
        if num_blocks < 2:
            raise ConfigError(f"num_blocks is {num_blocks}: at least 2 are needed, the null block and one to use")
        if num_blocks > MAX_BLOCKS:
            raise ConfigError(f"num_blocks is {num_blocks}: at most {MAX_BLOCKS}, block ids are int32")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.num_cached = 0
        self._free = LRU(num_blocks)
        self._events = events
        self._holders = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._index: dict[BlockHash, BlockId] = {}
        self._further: dict[BlockHash, list[BlockId]] = {}
        self._evicted = RecentNames()

    @property
    def policy(self) -> str:
        """The name of the eviction policy."""
        return self._free.name

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached or empty: what an allocation can take."""
        return len(self._free)

    def free_block_ids(self) -> list[BlockId]:
        """The free queue, first to be reused first."""
        return list(self._free)

    def holders(self, block_id: BlockId) -> int:
        return self._holders[block_id]

    def name(self, block_id: BlockId) -> BlockHash | None:
        return self._names[block_id]

    def names(self) -> set[BlockHash]:
        """Every name that can be found."""
        return set(self._index)

    def was_evicted(self, name: BlockHash) -> bool:
        """Whether this name left the index lately, as `RecentNames` remembers."""
        return name in self._evicted

    def match(self, names: Iterable[BlockHash]) -> list[BlockId]:
        """The blocks of the longest findable prefix of `names`. Changes nothing."""
        return list(iter(map(self._index.get, names).__next__, None))

    def carry(self, block_ids: Sequence[BlockId], names: Sequence[BlockHash]) -> bool:
        """Whether each block carries the name at its place."""
        return [self._names[block] for block in block_ids] == list(names)

    def num_idle(self, block_ids: Iterable[BlockId]) -> int:
        """How many of these blocks nobody holds: `touch` would take so many out of the free queue."""
        return list(map(self._holders.__getitem__, block_ids)).count(0)

    def touch(self, block_ids: Sequence[BlockId]) -> None:
        """One more holder for each of these findable blocks; none of them can be evicted now."""
        holders = self._holders
        idle = []
        for block in block_ids:
            if not holders[block]:
                idle.append(block)
            holders[block] += 1
        self._free.remove(idle)
        self.num_cached -= len(idle)

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one holder and no name, from the front of the free queue; what they carried is evicted.

        None when fewer are free; nothing has changed then.
        """
        if count > len(self._free):
            return None
        taken = self._free.take(count)
        holders, names, further = self._holders, self._names, self._further
        num_named = 0
        gone: list[BlockHash] = []
        for block in taken:
            holders[block] = 1
            name = names[block]
            if name is not None:
                names[block] = None
                num_named += 1
                if not (further and self._drop_copy(name, block)):
                    gone.append(name)
        if num_named:
            self._evict(gone, num_named)
        return taken

    def commit(self, block_ids: Sequence[BlockId], names: Sequence[BlockHash]) -> None:
        """These held blocks are full and final, and can be found under these names from now on."""
        own, holders, find_or_add = self._names, self._holders, self._index.setdefault
        for block, name in zip(block_ids, names, strict=True):
            assert own[block] is None, f"invariant 4: block {block} already has a name"
            assert holders[block], f"invariant 3: block {block} is committed, but nobody holds it"
            own[block] = name
            if find_or_add(name, block) != block:
                self._further.setdefault(name, []).append(block)

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """One holder less for each of these blocks, in the order in which they should be evicted: tail first."""
        holders, names = self._holders, self._names
        empty: list[BlockId] = []
        cached: list[BlockId] = []
        for block in block_ids:
            left = holders[block] = holders[block] - 1
            if left:
                assert left > 0, f"invariant 1: block {block} is freed more often than held"
            elif names[block] is None:
                empty.append(block)
            else:
                cached.append(block)
        if empty:
            self._free.add_empty(empty)
        if cached:
            self._free.add_cached(cached)
            self.num_cached += len(cached)

    def clear(self) -> bool:
        """Forget every name; the order of the free queue stays. False, and nothing changes, while any block is held."""
        if len(self._free) != self.num_usable:
            return False
        self._names = [None] * self.num_blocks
        self.num_cached = 0
        self._index.clear()
        self._further.clear()
        self._evicted = RecentNames()
        if self._events is not None:
            self._events.cleared()
        return True

    def _evict(self, names: list[BlockHash], num_blocks: int) -> None:
        """`num_blocks` free blocks lost their content, and with it these names can no longer be found."""
        index = self._index
        for name in names:
            del index[name]
        self.num_evictions += num_blocks
        self.num_cached -= num_blocks
        self._evicted.update(names)
        if self._events is not None and names:
            self._events.removed(names)

    def _drop_copy(self, name: BlockHash, block_id: BlockId) -> bool:
        """Whether other blocks carry the name too: then the oldest of them is the one that is found from now on."""
        further = self._further.get(name)
        if further is None:
            return False
        if self._index[name] == block_id:
            self._index[name] = further.pop(0)
        else:
            further.remove(block_id)
        if not further:
            del self._further[name]
        return True

    def check(self) -> None:
        """Raise AssertionError with the number of the first broken invariant. O(blocks): for tests and replay."""
        self._free.check()
        free = set(self._free)
        for block in range(1, self.num_blocks):
            assert self._holders[block] >= 0, f"invariant 1: block {block} has {self._holders[block]} holders"
            assert (block in free) == (self._holders[block] == 0), f"invariant 2: block {block}"
        cached = sum(self._names[block] is not None for block in free)
        assert self.num_cached == cached, f"invariant 1: {self.num_cached} blocks are counted as cached, {cached} are"
        carried: dict[BlockHash, set[BlockId]] = {}
        for block, name in enumerate(self._names):
            if name is not None:
                carried.setdefault(name, set()).add(block)
        indexed = {name: {block, *self._further.get(name, ())} for name, block in self._index.items()}
        assert carried == indexed, "invariant 3: the index and the blocks' names differ"
        assert all(self._further.values()), "invariant 3: an empty list of copies"
        assert self._holders[NULL_BLOCK] == 0, "invariant 5: the null block is held"
        assert self._names[NULL_BLOCK] is None, "invariant 5: the null block has a name"
        assert NULL_BLOCK not in free, "invariant 5: the null block is free"
