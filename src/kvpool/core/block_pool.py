"""The blocks of the cache: who holds each one, what it contains, when it may be reused.

Owns: every block's holders and name, an index of names for each group, and (through the policy) the free queue.
Knows nothing of: requests, layers, tokens, bytes, time.

Between calls invariants 1 to 5 of docs/invariants.md hold; `check()` proves them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple, TypeAlias

from kvpool.core.eviction import LRU, RankedLRU
from kvpool.core.index import NameIndex
from kvpool.errors import UsageError
from kvpool.events import EventLog
from kvpool.limits import MAX_BLOCKS, require_names, require_pool_size
from kvpool.types import NULL_BLOCK, BlockHash, BlockId, GroupId


class Lineage(NamedTuple):
    """What a block depends on where blocks of several sizes lie side by side.

    It goes with the last common border before it; with all that ends `inside`, between that border and its own end,
    each named with the tokens between the two ends; and with what ends at the next common border, `num_left` tokens
    behind it, which it is a part of. None where there is no such thing.
    """

    border: BlockHash | None
    inside: Sequence[tuple[BlockHash, int]]
    whole: BlockHash | None
    num_left: int


Parent: TypeAlias = BlockHash | Lineage | None
"""The name of the block before it where all blocks have one size; None at the start, or where nothing is told."""


class BlockPool:
    """A fixed set of blocks shared by all requests. Block 0 is the null block; the rest start free and empty.

    A block belongs to no group until it is committed: names are looked up group by group, blocks come from one queue.
    In a pool that is ranked, spare blocks are evicted before all others.
    `num_cached` counts free blocks with a name, `num_evictions` the names that were given up for another request.
    """

    def __init__(
        self, num_blocks: int, events: EventLog | None = None, num_groups: int = 1, *, is_ranked: bool = False
    ) -> None:
        require_pool_size(num_blocks, num_groups)
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.num_cached = 0
        self._ranked = RankedLRU(num_blocks) if is_ranked else None
        self._free = LRU(num_blocks) if self._ranked is None else self._ranked
        self._events = events
        self._holders = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._parents: list[Parent] = [None] * num_blocks
        self._groups = bytearray(num_blocks)
        self._is_spare = bytearray(num_blocks)
        self._indexes = [NameIndex() for _ in range(num_groups)]

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

    def names(self, group_id: GroupId = 0) -> set[BlockHash]:
        """Every name that can be found in the group."""
        return set(self._indexes[group_id].first)

    def was_evicted(self, name: BlockHash, group_id: GroupId = 0) -> bool:
        """Whether this name left the group's index lately, as `RecentNames` remembers."""
        return name in self._indexes[group_id].evicted

    def match(self, names: Iterable[BlockHash], group_id: GroupId = 0) -> list[BlockId]:
        """The blocks of the longest findable prefix of `names`. Changes nothing."""
        return list(iter(map(self._indexes[group_id].first.get, names).__next__, None))

    def finder(self, group_id: GroupId) -> Callable[[BlockHash], BlockId | None]:
        """What finds the block of one name in the group, None where there is none. Good until the pool is cleared."""
        return self._indexes[group_id].first.get

    def carry(self, block_ids: Sequence[BlockId], names: Sequence[BlockHash], group_id: GroupId = 0) -> bool:
        """Whether each block carries the name at its place, and for this group."""
        if [self._names[block] for block in block_ids] != list(names):
            return False
        return len(self._indexes) == 1 or all(self._groups[block] == group_id for block in block_ids)

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
        if self._ranked is not None:
            self.keep(block_ids)
        self._free.remove(idle)
        self.num_cached -= len(idle)

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one holder and no name, from the front of the free queue; what they carried is evicted.

        None when fewer are free; nothing has changed then.
        """
        if count > len(self._free):
            return None
        taken = self._free.take(count)
        holders, names = self._holders, self._names
        named = taken if self._is_single_copy() else [block for block in taken if names[block] is not None]
        given_up = []
        for block in taken:
            holders[block] = 1
            name = names[block]
            if name is not None:
                names[block] = None
                given_up.append(name)
        if given_up:
            self.num_evictions += len(given_up)
            self.num_cached -= len(given_up)
            self._drop(named, given_up, are_evicted=True)
        return taken

    def _is_single_copy(self) -> bool:
        """Whether a name alone tells which block carries it."""
        return len(self._indexes) == 1 and not self._indexes[0].further

    def commit(
        self,
        block_ids: Sequence[BlockId],
        names: Sequence[BlockHash],
        group_id: GroupId = 0,
        parents: Sequence[Parent] | None = None,
        *,
        spare: Sequence[BlockId] = (),
    ) -> None:
        """These held blocks are full and final, and can be found under these names from now on.

        `parents[i]` is what block i depends on, see `withdraw`; None where that is nothing, or not told.
        Those of them that are `spare` are the first to be evicted once they are free, until a hit has touched them.
        UsageError, and nothing changes, for what is no name: see `require_names`.
        """
        if len(block_ids) != len(names):
            raise ValueError(f"{len(block_ids)} blocks and {len(names)} names: one for each")
        if parents is not None and len(parents) != len(names):
            raise ValueError(f"{len(names)} names and {len(parents)} parents: one for each")
        require_names(names)
        own, holders, below = self._names, self._holders, self._parents
        index = self._indexes[group_id]
        find_or_add = index.first.setdefault
        for block, name, parent in zip(
            block_ids, names, parents if parents is not None else repeat(None), strict=False
        ):
            assert own[block] is None, f"invariant 4: block {block} already has a name"
            assert holders[block], f"invariant 3: block {block} is committed, but nobody holds it"
            own[block] = name
            below[block] = parent
            if find_or_add(name, block) != block:
                index.add_copy(name, block)
        assert not spare or self._ranked is not None, "a spare block in a pool without ranks"
        if len(self._indexes) > 1 or self._ranked is not None:
            groups, is_spare, are_all_spare = self._groups, self._is_spare, len(spare) == len(block_ids)
            for block in block_ids:
                groups[block] = group_id
                is_spare[block] = are_all_spare
            for block in spare if not are_all_spare else ():
                is_spare[block] = True

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """One holder less for each of these blocks, in the order in which they should be evicted: tail first.

        The null block is passed over. UsageError, and nothing changes, when a block is freed more often than held.
        """
        blocks = [block for block in block_ids if block]
        for block, count in Counter(blocks).items():
            held = self._holders[block] if 0 < block < self.num_blocks else 0
            if count > held:
                raise UsageError(f"block {block} is freed {count} times at once, and has {held} holders")
        self.free_groups((blocks,))

    def free_groups(self, runs: Iterable[Iterable[BlockId]]) -> None:
        """The same for one run of blocks after another, all of them held so often and none the null block."""
        holders, names = self._holders, self._names
        empty: list[BlockId] = []
        cached: list[BlockId] = []
        for block_ids in runs:
            num_empty = len(empty)
            for block in block_ids:
                left = holders[block] = holders[block] - 1
                if left:
                    assert left > 0, f"invariant 1: block {block} is freed more often than held"
                elif names[block] is None:
                    empty.append(block)
                else:
                    cached.append(block)
            if num_empty and len(empty) > num_empty:
                empty = empty[num_empty:] + empty[:num_empty]
        self._add_free(empty, cached)

    def free_each(self, block_ids: Iterable[BlockId]) -> None:
        """The same as `free_groups` where every run has one block."""
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
        self._add_free(empty[::-1], cached)

    def _add_free(self, empty: Sequence[BlockId], cached: Sequence[BlockId]) -> None:
        """These blocks have no holder any more."""
        if empty:
            self._free.add_empty(empty)
        if cached:
            self.num_cached += len(cached)
            if self._ranked is not None:
                spare = self._is_spare
                self._ranked.add_spare([block for block in cached if spare[block]])
                cached = [block for block in cached if not spare[block]]
            self._free.add_cached(cached)

    def keep(self, block_ids: Iterable[BlockId]) -> None:
        """These blocks are spare no longer."""
        for block in block_ids:
            self._is_spare[block] = 0

    def group_id(self, block_id: BlockId) -> GroupId:
        """The group that a block with a name was committed to."""
        return self._groups[block_id]

    def lineage(self, block_id: BlockId) -> Lineage | None:
        """What a block with a name depends on where blocks of several sizes lie side by side; None elsewhere."""
        lineage = self._parents[block_id]
        return lineage if isinstance(lineage, Lineage) else None

    def dependents(self, names: Mapping[BlockHash, int]) -> set[BlockHash]:
        """These names, and those of all content that was computed on top of what is bad. O(blocks).

        `names[n]` tokens before the end of what bears name n are bad. Bad with them are the parts of it that reach into
        these tokens; then, over and over, what was computed on top of all that.
        """
        behind: dict[BlockHash, list[tuple[BlockHash, int]]] = {}
        parts: dict[BlockHash, list[tuple[BlockHash, int]]] = {}
        for name, lineage in self._lineages():
            if lineage.border is not None:
                behind.setdefault(lineage.border, []).append((name, MAX_BLOCKS))
            for before, num_tokens in lineage.inside:
                behind.setdefault(before, []).append((name, num_tokens))
            if lineage.whole is not None:
                parts.setdefault(lineage.whole, []).append((name, lineage.num_left))
        num_bad, reached = dict(names), list(names)
        while reached:
            name = reached.pop()
            count = num_bad[name]
            found = [(child, min(count + more, MAX_BLOCKS)) for child, more in behind.get(name, ())]
            found += [(part, count - num_left) for part, num_left in parts.get(name, ()) if num_left < count]
            for other, count in found:
                if count > num_bad.get(other, 0):
                    num_bad[other] = count
                    reached.append(other)
        return set(num_bad)

    def withdraw(self, names: Mapping[BlockHash, int]) -> int:
        """What depends on bad content, see `dependents`, can be found no more; how many blocks lost a name. O(blocks).

        A block whose border nobody carries any more goes too, with its dependents: what it depends on cannot be told.
        Blocks that nobody holds are the next to be reused.
        """
        carried = set(self._names)
        lost = {
            name: MAX_BLOCKS
            for name, lineage in self._lineages()
            if lineage.border is not None and lineage.border not in carried
        }
        bad = self.dependents(lost | dict(names))
        return self._forget([block for block, name in enumerate(self._names) if name in bad])

    def _lineages(self) -> Iterator[tuple[BlockHash, Lineage]]:
        """The name of every block that was computed on top of another, and what it depends on."""
        for name, parent in zip(self._names, self._parents, strict=True):
            if name is not None and parent is not None:
                yield name, parent if isinstance(parent, Lineage) else Lineage(parent, (), None, 0)

    def _forget(self, block_ids: Sequence[BlockId]) -> int:
        """These blocks lose their names; the free ones go to the front of the queue."""
        idle = [block for block in block_ids if not self._holders[block]]
        self._free.remove(idle)
        names = [name for block in block_ids if (name := self._names[block]) is not None]
        self._drop(block_ids, names, are_evicted=False)
        for block in block_ids:
            self._names[block] = None
        self._free.add_empty(idle)
        self.num_cached -= len(idle)
        return len(block_ids)

    def clear(self) -> bool:
        """Forget every name; the order of the free queue stays. False, and nothing changes, while any block is held."""
        if len(self._free) != self.num_usable:
            return False
        self._names = [None] * self.num_blocks
        self.num_cached = 0
        self._indexes = [NameIndex() for _ in self._indexes]
        if self._events is not None:
            self._events.cleared()
        return True

    def _drop(self, block_ids: Sequence[BlockId], names: Sequence[BlockHash], *, are_evicted: bool) -> None:
        """These blocks do not carry their names any more."""
        if len(self._indexes) == 1:
            self._drop_from(0, names, block_ids, are_evicted)
            return
        parted: dict[GroupId, tuple[list[BlockHash], list[BlockId]]] = {}
        for block, name in zip(block_ids, names, strict=True):
            own_names, own_blocks = parted.setdefault(self._groups[block], ([], []))
            own_names.append(name)
            own_blocks.append(block)
        for group_id, own in parted.items():
            self._drop_from(group_id, *own, are_evicted)

    def _drop_from(
        self, group_id: GroupId, names: Sequence[BlockHash], block_ids: Sequence[BlockId], are_evicted: bool
    ) -> None:
        index = self._indexes[group_id]
        gone = index.drop(names, block_ids)
        if are_evicted:
            index.evicted.update(gone)
        if self._events is not None and gone:
            self._events.removed(gone, group_id)

    def check(self) -> None:
        """Raise AssertionError with the number of the first broken invariant. O(blocks): for tests and replay."""
        self._free.check()
        free = set(self._free)
        for block in range(1, self.num_blocks):
            assert self._holders[block] >= 0, f"invariant 1: block {block} has {self._holders[block]} holders"
            assert (block in free) == (self._holders[block] == 0), f"invariant 2: block {block}"
        cached = sum(self._names[block] is not None for block in free)
        assert self.num_cached == cached, f"invariant 1: {self.num_cached} blocks are counted as cached, {cached} are"
        carried: list[dict[BlockHash, set[BlockId]]] = [{} for _ in self._indexes]
        for block, name in enumerate(self._names):
            if name is not None:
                carried[self._groups[block]].setdefault(name, set()).add(block)
        indexed = [index.carriers() for index in self._indexes]
        assert carried == indexed, "invariant 3: the index and the blocks' names differ"
        assert self._holders[NULL_BLOCK] == 0, "invariant 5: the null block is held"
        assert self._names[NULL_BLOCK] is None, "invariant 5: the null block has a name"
        assert NULL_BLOCK not in free, "invariant 5: the null block is free"
