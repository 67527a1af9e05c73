"""The native pool and the Python pool, side by side: the same random calls, the whole state compared after each.

Names come again, so that blocks share them; pools are small, so that evictions never stop.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import AllBlocksCleared, BlockHash, BlockPool
from kvpool._native import NativeBlockPool
from kvpool.core.block_pool import Lineage
from kvpool.events import EventLog

pytestmark = pytest.mark.skipif(NativeBlockPool is None, reason="the native core is not built, or KVPOOL_NATIVE is 0")

NUM_NAMES = 40
Answers = tuple[Any, Any]


def name_of(number: int) -> BlockHash:
    """Names of every kind: digests, short texts, numbers of either sign."""
    kinds: list[BlockHash] = [number.to_bytes(32, "big"), b"n%d" % number, number * 2**57, -1 - number]
    return kinds[number % 4]


NAMES = [name_of(number) for number in range(NUM_NAMES)]


class Twins:
    """A pool of each kind, and who holds which blocks."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_groups = rng.choice([1, 1, 2, 3])
        self.is_ranked = rng.random() < 0.5
        self.tells_lineages = self.num_groups > 1 and rng.random() < 0.5
        num_blocks = rng.choice([2, 5, 12, 40])
        assert NativeBlockPool is not None
        self.logs = EventLog(), EventLog()
        make: tuple[Callable[..., Any], ...] = (BlockPool, NativeBlockPool)
        self.pools = [
            pool(num_blocks, log, self.num_groups, is_ranked=self.is_ranked)
            for pool, log in zip(make, self.logs, strict=True)
        ]
        self.held: list[list[int]] = []

    def both(self, verb: str, *arguments: object, **words: object) -> Any:
        """The one answer of both."""
        pure, native = (getattr(pool, verb)(*arguments, **words) for pool in self.pools)
        assert pure == native, (verb, arguments, words)
        return pure

    def group(self) -> int:
        return self.rng.randrange(self.num_groups)

    def names(self, count: int) -> list[BlockHash]:
        return self.rng.choices(NAMES, k=count)

    def unnamed(self) -> list[int]:
        """Some held blocks without a name, each once."""
        blocks = {block for run in self.held for block in run if self.pools[0].name(block) is None}
        return self.rng.sample(sorted(blocks), self.rng.randint(0, len(blocks)))

    def state(self) -> None:
        """All that can be seen of both is the same."""
        pure, native = self.pools
        blocks = range(pure.num_blocks)
        assert native.free_block_ids() == pure.free_block_ids()
        assert [*map(native.holders, blocks)] == [*map(pure.holders, blocks)]
        assert [*map(native.name, blocks)] == [*map(pure.name, blocks)]
        assert [*map(native.group_id, blocks)] == [*map(pure.group_id, blocks)]
        counts = ("num_free", "num_cached", "num_evictions")
        assert [getattr(native, each) for each in counts] == [getattr(pure, each) for each in counts]
        for group in range(self.num_groups):
            assert native.names(group) == pure.names(group)
            find = native.finder(group), pure.finder(group)
            assert [*map(find[0], NAMES)] == [*map(find[1], NAMES)]
        assert self.logs[1].take() == self.logs[0].take()

    # -- operations

    def allocate(self) -> None:
        blocks = self.both("allocate", self.rng.randint(0, 6))
        if blocks:
            self.held.append(blocks)

    def commit(self) -> None:
        blocks = self.unnamed()
        words: dict[str, object] = {}
        names = self.names(len(blocks))
        if self.rng.random() < 0.7:
            words["parents"] = [self.parent(name) for name in names]
        if self.is_ranked:
            words["spare"] = self.rng.choice([[], blocks, blocks[: len(blocks) // 2]])
        self.both("commit", blocks, names, self.group(), **words)

    def parent(self, name: BlockHash) -> object:
        """Nothing, a name, or a lineage, whose ties never lead in a circle."""
        earlier = NAMES[: NAMES.index(name)]
        if not earlier or self.rng.random() < 0.2:
            return None
        border, whole, *inside = self.rng.choices(earlier, k=2 + self.rng.randint(0, 2))
        if not self.tells_lineages or self.rng.random() < 0.3:
            return border
        tied = [(each, self.rng.randint(1, 9)) for each in inside]
        return Lineage(
            self.rng.choice([None, border]), tied, self.rng.choice([None, whole]), self.rng.choice([0, 3, 9])
        )

    def touch(self) -> None:
        blocks = self.both("match", self.names(self.rng.randint(1, 4)), self.group())
        self.both("num_idle", blocks)
        self.both("touch", blocks)
        if blocks:
            self.held.append(blocks)

    def free(self) -> None:
        if self.held:
            blocks = self.held.pop(self.rng.randrange(len(self.held)))
            self.both("free", [*reversed(blocks), *[0] * self.rng.randint(0, 1)])

    def free_runs(self) -> None:
        runs = [self.held.pop() for _ in range(min(len(self.held), self.rng.randint(1, 4)))]
        if self.rng.random() < 0.5:
            self.both("free_groups", [run[::-1] for run in runs])
        else:
            self.both("free_each", [block for run in runs for block in run])

    def keep(self) -> None:
        blocks = [block for run in self.held for block in run]
        self.both("keep", self.rng.sample(blocks, self.rng.randint(0, len(blocks))))

    def carry(self) -> None:
        pure = self.pools[0]
        blocks = self.rng.sample(range(pure.num_blocks), min(pure.num_blocks, self.rng.randint(0, 3)))
        names = [pure.name(block) if self.rng.random() < 0.9 else self.names(1)[0] for block in blocks]
        if None not in names:
            self.both("carry", blocks, names, self.group())
        for block in blocks:
            if pure.name(block) is not None:
                self.both("lineage", block)

    def withdraw(self) -> None:
        bad = {name: self.rng.randint(1, 12) for name in self.names(self.rng.randint(0, 2))}
        self.both("dependents", bad)
        self.both("withdraw", bad)

    def remember(self) -> None:
        for name in NAMES:
            self.both("was_evicted", name, self.group())

    def clear(self) -> None:
        self.both("clear")


WEIGHTS = {
    Twins.allocate: 30,
    Twins.commit: 25,
    Twins.touch: 20,
    Twins.free: 15,
    Twins.free_runs: 8,
    Twins.keep: 3,
    Twins.carry: 5,
    Twins.withdraw: 2,
    Twins.remember: 3,
    Twins.clear: 1,
}


def run_history(seed: str, num_operations: int) -> None:
    twins = Twins(random.Random(seed))
    operations = twins.rng.choices([*WEIGHTS], [*WEIGHTS.values()], k=num_operations)
    for number, operation in enumerate(operations):
        try:
            operation(twins)
            twins.state()
        except AssertionError:
            print(f"history {seed!r}, operation {number}: {operation.__name__}")
            raise
    for pool in twins.pools:
        pool.check()


def test_both_pools_are_the_same_after_every_operation(seed: int, num_operations: int) -> None:
    length = 500
    for history in range(num_operations // 2 // length):
        run_history(f"{seed}/{history}", length)


def test_both_remember_the_same_window_of_evictions() -> None:
    """Tens of thousands of names, some of them again and again, in calls of many sizes."""
    rng, logs = random.Random(7), (EventLog(), EventLog())
    assert NativeBlockPool is not None
    pools: list[Any] = [BlockPool(3_000, logs[0]), NativeBlockPool(3_000, logs[1])]
    names: list[BlockHash] = [number.to_bytes(32, "little") for number in range(60_000)]
    for turn in range(90):
        some = rng.sample(names, rng.choice([1, 700, 2_999]))
        for pool in pools:
            blocks = pool.allocate(len(some))
            pool.commit(blocks, some)
            pool.free(blocks)
        if turn % 10 == 9:
            assert [*map(pools[0].was_evicted, names)] == [*map(pools[1].was_evicted, names)]
        assert logs[0].take() == logs[1].take()
    assert pools[0].num_evictions == pools[1].num_evictions > 80_000


def test_arrays_say_the_same_as_lists(rng: random.Random) -> None:
    """Ids as int32 and int64, names in one row of bytes; results written to arrays."""
    assert NativeBlockPool is not None
    listed, rowed = NativeBlockPool(200), NativeBlockPool(200)
    for _ in range(300):
        names = [rng.randbytes(32) for _ in range(rng.randint(1, 60))]
        row, ids = b"".join(names), np.zeros(len(names), dtype=np.int32)
        blocks = listed.allocate(len(names))
        assert rowed.allocate_into(ids)
        assert ids.tolist() == blocks
        listed.commit(blocks, names)
        rowed.commit(ids.astype(rng.choice([np.int32, np.int64])), row)
        found = np.zeros(len(names) + 3, dtype=np.int32)
        asked = [*names[: rng.randint(0, len(names))], rng.randbytes(32)]
        count = rowed.match_into(b"".join(asked), found)
        assert found[:count].tolist() == listed.match(asked) == rowed.match(np.frombuffer(b"".join(asked), np.uint8))
        assert rowed.carry(ids, row)
        rowed.touch(ids[::-1].copy())
        rowed.free(ids)
        rowed.free(ids.astype(np.int64))
        listed.free(blocks)
        assert listed.free_block_ids() == rowed.free_block_ids()
    rowed.check()


def test_when_nobody_listens_the_answers_are_the_same() -> None:
    assert NativeBlockPool is not None
    log = EventLog()
    pool, loud = NativeBlockPool(9), NativeBlockPool(9, log)
    for each in (pool, loud):
        each.commit(each.allocate(3), [b"x", b"y", b"x"])
        each.free([3, 2, 1])
        each.free(each.allocate(8))
        assert each.clear()
    assert pool.free_block_ids() == loud.free_block_ids()
    assert log.take() == [AllBlocksCleared()]
