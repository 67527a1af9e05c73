"""Does an operation cost more in a larger pool?

In each pool all but 256 blocks are held by somebody, so that as many blocks and names go round in each, and the
processor's caches stay warm. Medians of 2,000 rounds over 64 blocks, in ns a block, and the ratio to the smallest pool.
The longest round is shown for evictions: now and then a Python dict of names is rebuilt, and that takes longer the more
names it holds.
"""

import random
from collections.abc import Callable
from itertools import cycle

from medians import median_s, print_table, times_s

from kvpool import BlockPool

ROUND = 64
NUM_LOOSE = 256


def pool_with(num_blocks: int) -> BlockPool:
    """All blocks are named, and all but `NUM_LOOSE` of them are held."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(pool.num_free)
    assert blocks is not None
    pool.commit(blocks, [number.to_bytes(32, "big") for number in blocks])
    random.Random(1).shuffle(blocks)
    pool.free(blocks[:NUM_LOOSE])
    return pool


def operations(pool: BlockPool) -> dict[str, Callable[[], object]]:
    loose = pool.free_block_ids()
    some = loose[:: NUM_LOOSE // ROUND][:ROUND]
    names = [number.to_bytes(32, "big") for number in some]
    rounds = cycle([[(ROUND * turn + n).to_bytes(33, "big") for n in range(ROUND)] for turn in range(8)])

    def touch_and_free() -> None:
        pool.touch(some)
        pool.free(some)

    def evict_commit_free() -> None:
        blocks = pool.allocate(ROUND)
        assert blocks is not None
        pool.commit(blocks, next(rounds))
        pool.free(blocks)

    def allocate_and_free() -> None:
        blocks = pool.allocate(ROUND)
        assert blocks is not None
        pool.free(blocks)

    return {
        "match": lambda: pool.match(names),
        "touch + free": touch_and_free,
        "allocate + free, empty": allocate_and_free,
        "evict + commit + free": evict_commit_free,
    }


def main() -> None:
    sizes = (10_000, 100_000, 1_000_000)
    pools = {size: operations(pool_with(size)) for size in sizes}
    rows = []
    for what in pools[sizes[0]]:
        figures = [median_s(pools[size][what], 2_000) / ROUND * 1e9 for size in sizes]
        rows.append((what, *(f"{figure:,.0f}" for figure in figures), f"{figures[-1] / figures[0]:.2f}"))
    longest = [max(times_s(pools[size]["evict + commit + free"], 20_000)) for size in sizes]
    rows.append(("longest round of 20,000, ms", *(f"{seconds * 1e3:,.1f}" for seconds in longest), ""))
    print_table("ns a block, by size of the pool", ("operation", *(f"{size:,}" for size in sizes), "ratio"), rows)


if __name__ == "__main__":
    main()
