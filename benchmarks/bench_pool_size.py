"""Does an operation cost more in a larger pool?

In each pool all but 8,000 blocks are held by somebody, so that the same number of blocks goes round and the processor's
caches see the same working set. Medians of 200 rounds over 512 blocks, in ns a block, and the ratio to the smallest pool.
"""

import random
from collections.abc import Callable
from itertools import count

from medians import median_s, print_table

from kvpool import BlockPool

ROUND = 512
NUM_LOOSE = 8_000


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
    fresh = count(1 << 40)

    def touch_and_free() -> None:
        pool.touch(some)
        pool.free(some)

    def evict_commit_free() -> None:
        blocks = pool.allocate(ROUND)
        assert blocks is not None
        pool.commit(blocks, [next(fresh).to_bytes(32, "big") for _ in blocks])
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
    measured = [
        {what: median_s(call, 200) / ROUND * 1e9 for what, call in operations(pool_with(size)).items()} for size in sizes
    ]
    rows = [
        (what, *(f"{figures[what]:,.0f}" for figures in measured), f"{measured[-1][what] / measured[0][what]:.2f}")
        for what in measured[0]
    ]
    print_table("ns a block, by size of the pool", ("operation", *(f"{size:,}" for size in sizes), "ratio"), rows)


if __name__ == "__main__":
    main()
