"""The longest prefix that every group can serve.

A prefix of n tokens can be hit in a group when the blocks live at n are all found. Groups that keep everything answer
from the start on; the others are searched from the end back. Each answer is at most as long as the one before, and the
groups are asked in turn until none of them shortens it: that ends, and since no block of a group is looked at twice,
after a number of steps linear in the blocks.

Knows nothing of: who holds a block, and why one is missing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from kvpool.core.block_pool import BlockPool
from kvpool.core.groups import Group, Groups
from kvpool.types import NULL_BLOCK, BlockHash, BlockId

Find: TypeAlias = Callable[[BlockHash], BlockId | None]


class Found(NamedTuple):
    """`num_found` tokens are there in all groups, `num_shared` in those asked first; `num_tokens` can be hit."""

    num_tokens: int
    num_found: int
    num_shared: int
    block_ids: tuple[list[BlockId], ...]


def longest_hit(pool: BlockPool, groups: Groups, chain: Sequence[BlockHash], limit: int) -> Found:
    """The longest hit of a prompt whose hashing units have these names, at most `limit` tokens. Changes nothing."""
    if groups.is_plain:
        return _plain_hit(pool, groups, chain[: limit // groups.unit])
    limit = groups.align(min(limit, len(chain) * groups.unit))
    searches = [_search(pool, groups, bundle, chain, limit) for bundle in groups.bundles]
    shared = longest = searches[0].longest(limit)
    before = -1
    while longest and longest != before and len(searches) > 1:
        before = longest
        for search in searches:
            longest = search.longest(longest)
    hit = max(longest - groups.num_dropped_tokens, 0)
    block_ids: list[list[BlockId]] = [[] for _ in groups.all]
    for search in searches:
        for group, found in zip(search.bundle, search.block_ids(hit), strict=True):
            block_ids[group.group_id] = found
    return Found(hit, longest, shared, tuple(block_ids))


def _plain_hit(pool: BlockPool, groups: Groups, names: Sequence[BlockHash]) -> Found:
    """The same where there is nothing to agree on."""
    blocks = pool.match(names)
    num_found = len(blocks) * groups.unit
    hit = num_found - groups.num_dropped_tokens if blocks else 0
    return Found(hit, num_found, num_found, (blocks[: hit // groups.unit],))


class _Forward:
    """A search in groups that keep everything."""

    def __init__(
        self, pool: BlockPool, groups: Groups, bundle: Sequence[Group], chain: Sequence[BlockHash], limit: int
    ) -> None:
        self.bundle = bundle
        self._pool = pool
        self._groups = groups
        self._names = bundle[0].names(chain, 0, limit // bundle[0].block_size)
        self._found: list[list[BlockId]] | None = None

    def longest(self, limit: int) -> int:
        """The most tokens, at most `limit`, a border of all groups, that all groups of the bundle can serve."""
        size = self.bundle[0].block_size
        if self._found is None:
            names = self._names
            self._found = []
            for group in self.bundle:
                self._found.append(self._pool.match(names, group.group_id))
                names = names[: len(self._found[-1])]
            self._names = names
        return self._groups.align(min(limit, len(self._names) * size))

    def block_ids(self, num_tokens: int) -> list[list[BlockId]]:
        """The blocks of a hit of so many tokens, group by group."""
        if self._found is None:
            return [[] for _ in self.bundle]  # The groups before had nothing, so this one was not asked.
        stop = num_tokens // self.bundle[0].block_size
        for found in self._found:
            del found[stop:]
        return self._found


class _Backward:
    """A search in groups that keep the end. Blocks from `_start` on, as far as asked, are known to be there."""

    def __init__(
        self, pool: BlockPool, groups: Groups, bundle: Sequence[Group], chain: Sequence[BlockHash], limit: int
    ) -> None:
        self.bundle = bundle
        self._groups = groups
        self._names = bundle[0].names(chain, 0, limit // bundle[0].block_size)
        self._finds = [pool.finder(group.group_id) for group in bundle]
        self._start = len(self._names)
        self._num_sink_blocks = bundle[0].num_sink_blocks

    def longest(self, limit: int) -> int:
        """The most tokens, at most `limit`, a border of all groups, that all groups of the bundle can serve."""
        group, num_dropped = self.bundle[0], self._groups.num_dropped_tokens
        num_tokens = self._within_sinks(limit)
        while num_tokens > 0:
            hit = max(num_tokens - num_dropped, 0)
            # A window must hold the block that is dropped, too; a state that comes behind what is hit is of no use.
            self._start = min(self._start, (hit if group.is_state else num_tokens) // group.block_size)
            if self._reaches(group.first_live_block(hit)):
                return num_tokens
            num_tokens = self._groups.align((self._start - 1) * group.block_size) + (
                num_dropped if group.is_state else 0
            )
        return 0

    def _reaches(self, first: int) -> bool:
        """Whether blocks `first` .. `_start` - 1 are all there; if not, `_start` stands behind the last that is not."""
        names = self._names
        while self._start > first:
            name = names[self._start - 1]
            for find in self._finds:
                if find(name) is None:
                    return False
            self._start -= 1
        return True

    def _within_sinks(self, limit: int) -> int:
        """Without one of the sinks, nothing behind it can be served. They are looked at once."""
        num_sinks, self._num_sink_blocks = self._num_sink_blocks, 0
        for at in range(min(num_sinks, limit // self.bundle[0].block_size)):
            if any(find(self._names[at]) is None for find in self._finds):
                return self._groups.align(at * self.bundle[0].block_size)
        return limit

    def block_ids(self, num_tokens: int) -> list[list[BlockId]]:
        """The blocks of a hit of so many tokens, group by group; null blocks where none is needed."""
        group = self.bundle[0]
        stop, first = num_tokens // group.block_size, group.first_live_block(num_tokens)
        sinks = min(group.num_sink_blocks, first)
        return [
            [*_all(find, self._names[:sinks]), *[NULL_BLOCK] * (first - sinks), *_all(find, self._names[first:stop])]
            for find in self._finds
        ]


def _all(find: Find, names: Sequence[BlockHash]) -> list[BlockId]:
    blocks = [block for block in map(find, names) if block is not None]
    assert len(blocks) == len(names), "invariant 3: a block that was found is not there"
    return blocks


def _search(
    pool: BlockPool, groups: Groups, bundle: Sequence[Group], chain: Sequence[BlockHash], limit: int
) -> _Forward | _Backward:
    return (_Backward if bundle[0].is_windowed else _Forward)(pool, groups, bundle, chain, limit)
