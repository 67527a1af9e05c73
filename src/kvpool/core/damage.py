"""Bad content: which names it spoils, and how far live requests are still good.

A name stands for all content up to its end. So whoever has a spoiled name among its own may have gone on from what is
bad, whether or not it holds a bad block now.

Knows nothing of: how blocks are let go of, and how names leave the index.
"""

from collections.abc import Collection, Iterable
from typing import TypeAlias

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.groups import Group, Groups
from kvpool.core.hashing import BlockHasher
from kvpool.errors import UsageError
from kvpool.types import NULL_BLOCK, BlockHash, BlockId

Spoiled: TypeAlias = dict[BlockHash, int]
"""Names, with how many tokens before the end of each are bad."""


def bad_blocks(block_ids: Iterable[BlockId], num_blocks: int) -> set[BlockId]:
    """These blocks without the null block. UsageError when the pool has no such block."""
    bad = set(block_ids) - {NULL_BLOCK}
    strangers = sorted(block for block in bad if not 0 < block < num_blocks)
    if strangers:
        raise UsageError(f"blocks {strangers} are not of this pool: it has 1 .. {num_blocks - 1}")
    return bad


class Damage:
    """What follows from bad blocks: `spoiled` names, and `first_bad`, the first bad token of each request affected."""

    def __init__(
        self,
        bad: Collection[BlockId],
        tables: Collection[BlockTable],
        groups: Groups,
        pool: BlockPool,
        hasher: BlockHasher,
    ) -> None:
        self.spoiled: Spoiled = {}
        self.first_bad: dict[BlockTable, int] = {}
        self._groups = groups
        self._hasher = hasher
        for block in bad:
            self._spoil_block(pool, block)
        for table in tables:
            first = _first_held(table, groups, bad)
            if first is not None:
                self.first_bad[table] = first
                self._spoil_request(table, first)
        dependents = pool.dependents(self.spoiled)
        for table in tables:
            first = self._first_of(dependents, table)
            if first < min(self.first_bad.get(table, _computed(table)), _computed(table)):
                self.first_bad[table] = first
                self._spoil_request(table, first)

    def _spoil_block(self, pool: BlockPool, block: BlockId) -> None:
        """Bad are its own name, those that end inside of it, and that of what it is a part of."""
        name, lineage = pool.name(block), pool.lineage(block)
        if name is None:
            return
        size = self._groups.all[pool.group_id(block)].block_size
        self._spoil(name, size)
        if lineage is None:
            return
        for inner, num_left in lineage.inside:
            if num_left < size:
                self._spoil(inner, size - num_left)
        if lineage.whole is not None:
            self._spoil(lineage.whole, lineage.num_left + size)

    def _spoil_request(self, table: BlockTable, first: int) -> None:
        """All that a request published whose content is bad from this token on."""
        names, unit = table.request.block_hashes(self._hasher), self._groups.unit
        for at in range(first // unit, max(table.num_committed, table.num_once_committed) // unit):
            self._spoil(names[at], (at + 1) * unit - first)

    def _spoil(self, name: BlockHash, num_tokens: int) -> None:
        self.spoiled[name] = max(self.spoiled.get(name, 0), min(num_tokens, self._groups.alignment))

    def _first_of(self, names: Collection[BlockHash], table: BlockTable) -> int:
        """The first token of the first unit of the request that bears one of these names; behind its end for none."""
        own = table.request.block_hashes(self._hasher)
        return next((at for at, name in enumerate(own) if name in names), len(own) + 1) * self._groups.unit


def _computed(table: BlockTable) -> int:
    return max(table.num_computed, table.request.num_tokens - 1) if table.is_decoding else table.num_computed


def _first_held(table: BlockTable, groups: Groups, bad: Collection[BlockId]) -> int | None:
    """The first token whose content is in one of these blocks; None when the request holds none of them.

    The encoder's tokens come before all others.
    """
    found = [
        0 if group.is_encoder else at * group.block_size
        for group in groups.all
        for at, block in enumerate(table.block_ids[group.group_id])
        if block in bad
    ]
    return min(found, default=None)


def num_good_tokens(table: BlockTable, groups: Groups, pool: BlockPool, first_bad: int) -> int:
    """The longest prefix that the request can go on from, when its content is bad from this token on.

    It ends at a common border where every group still has all that is live there.
    """
    good = groups.align(min(first_bad, table.num_computed))
    while good and not all(_has_live(table, group, pool, good) for group in groups.decoder):
        good -= groups.alignment
    return good


def _has_live(table: BlockTable, group: Group, pool: BlockPool, num_tokens: int) -> bool:
    """Whether the request still has, in this group, all that a prefix of so many tokens needs."""
    ids, first, stop = table.block_ids[group.group_id], group.first_live_block(num_tokens), group.num_blocks(num_tokens)
    if group.is_state and pool.name(ids[first]) is None:
        return False  # It may have been written on since: only a published state is known to be the one at this border.
    return all(ids[: min(group.num_sink_blocks, first)]) and all(ids[first:stop])
