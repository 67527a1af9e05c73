"""Room in block tables: letting go of what fell out of use, counting what is missing, taking it.

Owns: nothing; it moves blocks between a pool and tables, over all groups at once.
Knows nothing of: names, and which requests are live.
"""

from collections.abc import Sequence

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.groups import Groups
from kvpool.core.request import RequestLike
from kvpool.types import NULL_BLOCK, BlockId, GroupId


class Room:
    """Makes tables longer at their end, and empties them at their front. `is_uniform`: all groups grow together.

    With `keeps_last_border` a request that computes one token at a time keeps all that its last common border needs, so
    that this can be published when it lets go; where all groups have blocks of one size that is at most a block more.
    """

    def __init__(self, pool: BlockPool, groups: Groups, *, keeps_last_border: bool = False) -> None:
        self._pool = pool
        self._groups = groups
        self.keeps_last_border = keeps_last_border and len({group.block_size for group in groups.decoder}) == 1
        self._is_plain = groups.is_plain
        self._states = tuple(group for group in groups.all if group.is_state)
        self.windows = tuple(bundle for bundle in groups.bundles if bundle[0].is_windowed)
        sizes = {group.block_size for group in groups.all}
        self.is_uniform = len(sizes) == 1 and len(groups.decoder) == len(groups)

    @property
    def slides(self) -> tuple[tuple[int, int], ...]:
        """Pairs (block size, remainder): a request of n tokens can slide only where n leaves one of them.

        Requests that compute a token at a time, and have slid all they could before.
        """
        return tuple((size, 0) for size in self._groups.block_sizes) if self.keeps_last_border else self._groups.slides

    def slide(self, table: BlockTable, num_tokens: int) -> None:
        """Let go of what the next `num_tokens` tokens do not look at. The null block takes its place."""
        if not self.windows:
            return
        computed = table.num_computed
        if self.keeps_last_border and num_tokens == 1:
            computed = self._groups.align(computed)
        dead: list[tuple[GroupId, list[BlockId]]] = []
        is_single = True
        for window, bundle in enumerate(self.windows):
            first, live = table.first_held[window], bundle[0].first_live_block(computed)
            if live > first:
                table.first_held[window] = live
                first = max(first, bundle[0].num_sink_blocks)
                is_single &= live == first + 1
                for group in bundle:
                    ids = table.block_ids[group.group_id]
                    dead.append((group.group_id, ids[first:live]))
                    ids[first:live] = [NULL_BLOCK] * (live - first)
        if len(self.windows) > 1:
            dead.sort()
        if is_single:
            self._pool.free_each([blocks[0] for _, blocks in dead if blocks[0]])
        else:
            self._pool.free_groups([filter(None, reversed(blocks)) for _, blocks in dead])

    def pass_over(self, table: BlockTable, first_held: Sequence[int]) -> None:
        """The table lets go of what is not held any more: somebody else has given it back to the pool."""
        for window, bundle in enumerate(self.windows):
            first, live = max(table.first_held[window], bundle[0].num_sink_blocks), first_held[window]
            table.first_held[window] = live
            for group in bundle if live > first else ():
                table.block_ids[group.group_id][first:live] = [NULL_BLOCK] * (live - first)

    def keeps_state(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether there is a block in every group of states for the state after so many tokens."""
        return all(
            table.block_ids[group.group_id][(num_tokens - 1) // group.block_size]
            for group in self._states
            if num_tokens > table.num_computed
        )

    def missing(
        self, request: RequestLike, held: Sequence[Sequence[BlockId]], start: int, stop: int, num_ahead: int = 0
    ) -> list[Sequence[int]]:
        """Of each group, the positions where a step that computes tokens start .. stop - 1 lacks a block.

        `held` are the tables so far; `num_ahead` drafted tokens follow.
        """
        if self._is_plain:
            return [range(len(held[0]), self._groups.all[0].num_blocks(stop + num_ahead))]
        return [
            group.new_blocks(len(ids), 0, request.num_encoder_tokens)
            if group.is_encoder
            else group.new_blocks(len(ids), start, stop, num_ahead)
            for group, ids in zip(self._groups.all, held, strict=True)
        ]

    def grow_by_one(self, table: BlockTable) -> list[BlockId] | None:
        """One more block in every group, where all blocks are of one size; None, when the pool is short."""
        blocks = self._pool.allocate(len(table.block_ids))
        if blocks is not None:
            for ids, block in zip(table.block_ids, blocks, strict=True):
                ids.append(block)
            table.num_slots += table.block_sizes[0]
        return blocks

    def grow(self, table: BlockTable, start: int, stop: int, num_ahead: int = 0) -> bool:
        """Room for a step that computes tokens start .. stop - 1, and `num_ahead` drafted ones after them.

        False, and nothing changes, when the pool cannot supply all blocks.
        """
        end = stop + num_ahead
        if end <= table.num_slots:
            return True
        if self.is_uniform and end <= table.num_slots + table.block_sizes[0]:
            return self.grow_by_one(table) is not None
        missing = self.missing(table.request, table.block_ids, start, stop, num_ahead)
        if sum(map(len, missing)) > self._pool.num_free:
            return False
        self.fill(table, missing, stop)
        return True

    def fill(self, table: BlockTable, missing: Sequence[Sequence[int]], stop: int) -> None:
        """Take blocks for these positions of each group; the caller has seen that there are so many.

        Null blocks stand between them, and after them where nothing before token `stop` is kept.
        """
        taken = self.take(sum(map(len, missing)))
        for group, places in zip(self._groups.all, missing, strict=True):
            ids = table.block_ids[group.group_id]
            _place(ids, places, taken[: len(places)])
            del taken[: len(places)]
            if not group.is_encoder:
                ids += [NULL_BLOCK] * (group.num_blocks(stop) - len(ids))
        table.num_slots = self.num_slots(table)

    def take(self, count: int) -> list[BlockId]:
        """Blocks that were counted before."""
        taken = self._pool.allocate(count)
        assert taken is not None, "invariant 8: the blocks were counted"
        return taken

    def num_slots(self, table: BlockTable) -> int:
        """How many tokens have room in all groups."""
        return min(len(table.block_ids[group.group_id]) * group.block_size for group in self._groups.decoder)

    def release(self, table: BlockTable) -> None:
        """Let go of all blocks, group by group, tail first."""
        if self._is_plain:
            self._pool.free_groups((reversed(table.block_ids[0]),))
            return
        self._pool.free_groups([*(filter(None, reversed(ids)) for ids in table.block_ids), table.scratch_ids])

    def cut(self, table: BlockTable, num_tokens: int) -> None:
        """Let go of the blocks behind the first `num_tokens` tokens, tail first."""
        for group in self._groups.decoder:
            ids = table.block_ids[group.group_id]
            stop = group.num_blocks(num_tokens)
            self._pool.free(reversed(ids[stop:]))
            del ids[stop:]
        for window, bundle in enumerate(self.windows):
            table.first_held[window] = min(table.first_held[window], bundle[0].num_blocks(num_tokens))
        table.num_slots = self.num_slots(table)


def _place(ids: list[BlockId], places: Sequence[int], blocks: Sequence[BlockId]) -> None:
    """Put blocks at these positions at the end of a table, null blocks between."""
    if places and places[-1] - len(ids) + 1 == len(blocks):
        ids += blocks
        return
    for at, block in zip(places, blocks, strict=True):
        ids += [NULL_BLOCK] * (at - len(ids))
        ids.append(block)
