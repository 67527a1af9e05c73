"""What all blocks are doing at one moment, in numbers.

Knows nothing of: how they came to be there.
"""

from collections.abc import Collection

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.groups import Groups
from kvpool.stats import Usage
from kvpool.types import BlockId


def usage(pool: BlockPool, groups: Groups, tables: Collection[BlockTable]) -> Usage:
    """See `KVCacheManager.usage`."""
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
