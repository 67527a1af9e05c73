"""What any block pool must do, whatever it is made of: one suite for all of them, through public verbs alone.

Only the tests of `check()` itself reach under the surface, to plant the corruption that it must find.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from time import process_time
from typing import Any

import numpy as np
import pytest

from kvpool import NULL_BLOCK, AllBlocksCleared, BlockHash, BlockPool, BlockRemoved, ConfigError, UsageError
from kvpool._native import NativeBlockPool
from kvpool.core.block_pool import Lineage
from kvpool.events import EventLog

PoolFactory = Callable[..., BlockPool]
POOLS: list[PoolFactory] = [BlockPool, *filter(None, [NativeBlockPool])]


@pytest.fixture(params=POOLS, ids=lambda factory: factory.__name__)
def make_pool(request: pytest.FixtureRequest) -> PoolFactory:
    factory: PoolFactory = request.param
    return factory


@pytest.fixture
def log() -> EventLog:
    return EventLog()


@pytest.fixture
def pool(make_pool: PoolFactory, log: EventLog) -> BlockPool:
    """Eleven blocks: ids 1 .. 10 can be used."""
    return make_pool(11, log)


@pytest.fixture
def ranked(make_pool: PoolFactory, log: EventLog) -> BlockPool:
    """The same with ranks: spare blocks are evicted before the others."""
    return make_pool(11, log, is_ranked=True)


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def serve(pool: BlockPool, names: Sequence[BlockHash], num_blocks: int | None = None) -> list[int]:
    """A request comes and goes: its first blocks are committed under these names, all are freed tail first."""
    blocks = taken(pool, num_blocks or len(names))
    pool.commit(blocks[: len(names)], names)
    pool.free(reversed(blocks))
    pool.check()
    return blocks


def state(pool: BlockPool) -> tuple[object, ...]:
    """All that can be seen of a pool."""
    blocks = range(pool.num_blocks)
    each = [(pool.holders(block), pool.name(block)) for block in blocks]
    counts = (pool.num_free, pool.num_cached, pool.num_evictions, pool.num_usable, pool.num_blocks)
    return pool.free_block_ids(), each, pool.names(), counts


# -- a new pool


def test_all_blocks_but_the_null_block_start_free_in_order(pool: BlockPool) -> None:
    assert pool.free_block_ids() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (pool.num_blocks, pool.num_usable, pool.num_free, pool.num_cached, pool.num_evictions) == (11, 10, 10, 0, 0)
    assert pool.names() == set()
    assert pool.policy == "lru"
    pool.check()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_needs_the_null_block_and_one_more(make_pool: PoolFactory, num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks is {num_blocks}: at least 2"):
        make_pool(num_blocks)


@pytest.mark.parametrize("num_groups", [-1, 0, 257])
def test_from_1_to_256_groups_share_a_pool(make_pool: PoolFactory, num_groups: int) -> None:
    with pytest.raises(ConfigError, match=f"num_groups is {num_groups}: from 1 to 256"):
        make_pool(11, num_groups=num_groups)


def test_the_smallest_pool_has_one_block(make_pool: PoolFactory) -> None:
    pool = make_pool(2)
    assert taken(pool, 1) == [1]
    assert pool.allocate(1) is None
    pool.free([1])
    assert pool.free_block_ids() == [1]
    pool.check()


# -- allocate


def test_allocation_takes_from_the_front_in_order(pool: BlockPool) -> None:
    assert taken(pool, 3) == [1, 2, 3]
    assert taken(pool, 1) == [4]
    assert pool.free_block_ids() == [5, 6, 7, 8, 9, 10]
    assert [pool.holders(block) for block in range(6)] == [0, 1, 1, 1, 1, 0]
    assert [pool.name(block) for block in range(6)] == [None] * 6
    pool.check()


def test_allocation_of_nothing_changes_nothing(pool: BlockPool) -> None:
    before = state(pool)
    assert taken(pool, 0) == []
    assert state(pool) == before


def test_allocation_is_all_or_nothing(pool: BlockPool, log: EventLog) -> None:
    serve(pool, [b"x", b"y"])
    taken(pool, 3)
    before = state(pool)
    assert pool.allocate(8) is None
    assert state(pool) == before
    assert log.take() == []
    assert len(taken(pool, 7)) == 7
    assert pool.allocate(1) is None
    pool.check()


# -- the order of the free queue


def test_free_puts_unnamed_blocks_first_and_named_ones_last_tail_first(pool: BlockPool) -> None:
    """40 tokens in blocks of 16: two full blocks and an unfilled one."""
    serve(pool, [b"x", b"y"], num_blocks=3)
    assert pool.free_block_ids() == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]


def test_without_names_all_blocks_return_to_the_front_in_the_order_given(pool: BlockPool) -> None:
    serve(pool, [], num_blocks=3)
    assert pool.free_block_ids() == [3, 2, 1, 4, 5, 6, 7, 8, 9, 10]


def test_requests_that_end_later_are_evicted_later(pool: BlockPool) -> None:
    first, second = taken(pool, 2), taken(pool, 2)
    pool.commit(first, [b"a0", b"a1"])
    pool.commit(second, [b"b0", b"b1"])
    pool.free(reversed(second))
    pool.free(reversed(first))
    assert pool.free_block_ids() == [5, 6, 7, 8, 9, 10, 4, 3, 2, 1]
    pool.check()


def test_a_block_returns_only_when_its_last_holder_lets_go(pool: BlockPool) -> None:
    blocks = taken(pool, 2)
    pool.commit(blocks, [b"x", b"y"])
    pool.touch(blocks)
    pool.free(reversed(blocks))
    assert [pool.holders(block) for block in blocks] == [1, 1]
    assert pool.free_block_ids() == [3, 4, 5, 6, 7, 8, 9, 10]
    pool.free([blocks[1]])
    assert pool.free_block_ids() == [3, 4, 5, 6, 7, 8, 9, 10, 2]
    pool.check()


def test_one_free_may_let_go_of_the_same_block_twice(pool: BlockPool) -> None:
    [block] = taken(pool, 1)
    pool.commit([block], [b"x"])
    pool.touch([block])
    pool.free([block, block])
    assert pool.holders(block) == 0
    assert pool.free_block_ids()[-1] == block
    pool.check()


# -- commit and match


def test_committed_blocks_are_found_while_held_and_after(pool: BlockPool) -> None:
    blocks = taken(pool, 2)
    assert pool.match([b"x", b"y"]) == []
    pool.commit(blocks, [b"x", b"y"])
    assert pool.match([b"x", b"y"]) == [1, 2]
    assert pool.num_cached == 0
    pool.free(reversed(blocks))
    assert pool.match([b"x", b"y"]) == [1, 2]
    assert pool.num_cached == 2
    assert pool.names() == {b"x", b"y"}
    pool.check()


def test_a_match_ends_at_the_first_miss_and_changes_nothing(pool: BlockPool) -> None:
    serve(pool, [b"x", b"y", b"z"])
    before = state(pool)
    assert pool.match([b"x", b"?", b"z"]) == [1]
    assert pool.match([b"?", b"y"]) == []
    assert pool.match([]) == []
    assert state(pool) == before


def test_names_may_be_whole_numbers_of_a_trace(pool: BlockPool) -> None:
    serve(pool, [0, 7])
    assert pool.match([0, 7, 8]) == [1, 2]
    assert pool.name(1) == 0
    assert pool.names() == {0, 7}


def test_carry_compares_every_block_with_its_name(pool: BlockPool) -> None:
    serve(pool, [b"x", b"y"])
    assert pool.carry([1, 2], [b"x", b"y"])
    assert pool.carry([], [])
    assert not pool.carry([2, 1], [b"x", b"y"])
    assert not pool.carry([1, 3], [b"x", b"y"])
    assert not pool.carry([1, 2], [b"x"])


def test_a_block_is_named_once(pool: BlockPool) -> None:
    blocks = taken(pool, 1)
    pool.commit(blocks, [b"x"])
    with pytest.raises(AssertionError, match="invariant 4: block 1 already has a name"):
        pool.commit(blocks, [b"y"])


def test_only_held_blocks_are_committed(pool: BlockPool) -> None:
    with pytest.raises(AssertionError, match="invariant 3: block 5 is committed, but nobody holds it"):
        pool.commit([5], [b"x"])


def test_every_commit_needs_a_name_a_block(pool: BlockPool) -> None:
    with pytest.raises(ValueError, match="2 blocks and 1 names: one for each"):
        pool.commit(taken(pool, 2), [b"x"])


def test_parents_are_as_many_as_blocks_where_they_are_told(pool: BlockPool) -> None:
    with pytest.raises(ValueError, match="one for each"):
        pool.commit(taken(pool, 2), [b"x", b"y"], parents=[None])


# -- touch


def test_touch_takes_idle_blocks_out_of_the_queue_and_keeps_their_names(pool: BlockPool) -> None:
    serve(pool, [b"x", b"y", b"z"])
    assert pool.num_idle([1, 2]) == 2
    pool.touch([1, 2])
    assert pool.free_block_ids() == [4, 5, 6, 7, 8, 9, 10, 3]
    assert [pool.holders(block) for block in (1, 2, 3)] == [1, 1, 0]
    assert (pool.num_cached, pool.num_free) == (1, 8)
    assert pool.match([b"x", b"y", b"z"]) == [1, 2, 3]
    pool.check()


def test_touch_of_held_blocks_adds_a_holder(pool: BlockPool) -> None:
    serve(pool, [b"x", b"y"])
    pool.touch([1])
    assert pool.num_idle([1, 2]) == 1
    pool.touch([1, 2])
    assert [pool.holders(block) for block in (1, 2)] == [2, 1]
    assert pool.num_cached == 0
    pool.check()


def test_touched_blocks_are_not_evicted(pool: BlockPool) -> None:
    serve(pool, [b"x", b"y"])
    pool.touch([1, 2])
    assert taken(pool, 8) == [3, 4, 5, 6, 7, 8, 9, 10]
    assert pool.allocate(1) is None
    assert pool.match([b"x", b"y"]) == [1, 2]
    pool.check()


# -- eviction


def test_the_tail_is_evicted_before_the_head_and_only_when_reused(pool: BlockPool, log: EventLog) -> None:
    serve(pool, [b"x", b"y", b"z"])
    taken(pool, 7)
    assert (pool.num_evictions, log.take()) == (0, [])
    assert taken(pool, 1) == [3]
    assert pool.match([b"x", b"y", b"z"]) == [1, 2]
    assert log.take() == [BlockRemoved((b"z",))]
    assert taken(pool, 2) == [2, 1]
    assert log.take() == [BlockRemoved((b"y", b"x"))]
    assert (pool.num_evictions, pool.num_cached, pool.names()) == (3, 0, set())
    pool.check()


def test_an_evicted_block_has_a_new_content(pool: BlockPool) -> None:
    serve(pool, [b"x"])
    blocks = taken(pool, 10)
    assert blocks[-1] == 1
    assert pool.name(1) is None
    pool.commit([1], [b"other"])
    assert pool.match([b"x"]) == []
    assert pool.match([b"other"]) == [1]
    pool.check()


def test_lately_evicted_names_are_remembered(pool: BlockPool) -> None:
    serve(pool, [b"x", b"y"])
    assert not pool.was_evicted(b"y")
    taken(pool, 9)
    assert pool.was_evicted(b"y")
    assert not pool.was_evicted(b"x")
    assert not pool.was_evicted(b"never")


# -- spare blocks


def test_spare_blocks_are_evicted_before_all_others_that_can_be_found(ranked: BlockPool, log: EventLog) -> None:
    first, second = taken(ranked, 3), taken(ranked, 3)
    ranked.commit(first, [b"a", b"b", b"c"])
    ranked.commit(second[:2], [b"x", b"y"], spare=second[:2])
    ranked.free(reversed(first))
    ranked.free(reversed(second))
    assert ranked.free_block_ids() == [6, 7, 8, 9, 10, 5, 4, 3, 2, 1]
    assert (ranked.num_cached, ranked.match([b"x", b"y"])) == (5, [4, 5])
    taken(ranked, 7)
    assert log.take() == [BlockRemoved((b"y", b"x"))]
    assert (ranked.num_evictions, ranked.was_evicted(b"x")) == (2, True)
    ranked.check()


def test_a_hit_makes_a_spare_block_like_any_other(ranked: BlockPool) -> None:
    blocks = taken(ranked, 3)
    ranked.commit(blocks, [b"x", b"y", b"z"], spare=blocks)
    ranked.free(reversed(blocks))
    ranked.touch([2])
    ranked.free([2])
    assert ranked.free_block_ids() == [4, 5, 6, 7, 8, 9, 10, 3, 1, 2]
    ranked.check()


def test_held_blocks_may_be_kept_after_all(ranked: BlockPool) -> None:
    blocks = taken(ranked, 3)
    ranked.commit(blocks, [b"x", b"y", b"z"], spare=blocks)
    ranked.keep([blocks[1], NULL_BLOCK])
    ranked.free(reversed(blocks))
    assert ranked.free_block_ids()[-3:] == [3, 1, 2]
    ranked.check()


def test_a_block_is_spare_until_its_content_goes(ranked: BlockPool) -> None:
    [block] = taken(ranked, 1)
    ranked.commit([block], [b"x"], spare=[block])
    ranked.withdraw({b"x": 1})
    ranked.commit([block], [b"x"])
    ranked.free([block])
    assert ranked.free_block_ids()[-1] == block
    ranked.check()


def test_some_of_the_blocks_committed_may_be_spare(ranked: BlockPool) -> None:
    blocks = taken(ranked, 5)
    ranked.commit(blocks, [b"v", b"w", b"x", b"y", b"z"], spare=blocks[1:3])
    ranked.free(reversed(blocks))
    assert ranked.free_block_ids() == [6, 7, 8, 9, 10, 3, 2, 5, 4, 1]
    ranked.check()


def test_a_pool_without_ranks_has_no_spare_blocks(pool: BlockPool) -> None:
    [block] = taken(pool, 1)
    with pytest.raises(AssertionError, match="a spare block in a pool without ranks"):
        pool.commit([block], [b"x"], spare=[block])


def test_without_spare_blocks_a_pool_with_ranks_does_what_one_without_does(
    pool: BlockPool, ranked: BlockPool, rng: random.Random
) -> None:
    """Random calls on both. Names come again, so that some have several copies."""
    held: list[list[int]] = []
    for _ in range(2_000):
        match rng.randrange(5):
            case 0:
                blocks = pool.allocate(count := rng.randrange(6))
                assert ranked.allocate(count) == blocks
                if blocks:
                    names = [bytes([rng.randrange(12)]) for _ in range(rng.randint(0, count))]
                    for each in (pool, ranked):
                        each.commit(blocks[: len(names)], names)
                    held.append(blocks)
            case 1 | 2 if held:
                blocks = held.pop(rng.randrange(len(held)))
                for each in (pool, ranked):
                    each.free(reversed(blocks))
            case 3:
                blocks = pool.match([bytes([rng.randrange(12)]) for _ in range(3)])
                for each in (pool, ranked):
                    each.touch(blocks)
                held.append(blocks)
            case 4 if rng.random() < 0.2:
                name = bytes([rng.randrange(12)])
                assert pool.withdraw({name: 1}) == ranked.withdraw({name: 1})
        assert state(pool) == state(ranked)
    assert pool.num_evictions > 100
    ranked.check()


# -- several runs of blocks freed at once


def test_freeing_run_after_run_is_the_same_as_one_call_each(make_pool: PoolFactory) -> None:
    pools = [make_pool(11, is_ranked=True), make_pool(11, is_ranked=True)]
    runs = [[3, 2, 1], [], [6, 5, 4], [8, 7]]
    for pool in pools:
        blocks = taken(pool, 8)
        pool.commit([blocks[0], blocks[3]], [b"x", b"y"])
        pool.commit([blocks[1], blocks[4], blocks[6]], [b"s", b"t", b"u"], spare=[blocks[1], blocks[4], blocks[6]])
    pools[0].free_groups(map(reversed, [run[::-1] for run in runs]))
    for run in runs:
        pools[1].free(run)
    assert state(pools[0]) == state(pools[1])
    pools[0].check()


def test_freeing_runs_of_one_block_is_the_same_too(make_pool: PoolFactory) -> None:
    """What stands in front and is empty goes first of all, in the order of the last freed first."""
    pools = [make_pool(11, is_ranked=True) for _ in range(3)]
    order = [3, 6, 1, 8, 4, 7, 2, 5]
    for pool in pools:
        blocks = taken(pool, 8)
        pool.commit([blocks[0], blocks[3]], [b"x", b"y"])
        pool.commit([blocks[1], blocks[4]], [b"s", b"t"], spare=[blocks[1], blocks[4]])
        pool.touch([2])
    pools[0].free_each(order)
    pools[1].free_groups([block] for block in order)
    for block in order:
        pools[2].free([block])
    assert state(pools[0]) == state(pools[1]) == state(pools[2])
    pools[0].check()


@pytest.mark.parametrize(
    "free", [lambda pool: pool.free_groups([[1, 2], [2]]), lambda pool: pool.free_each([1, 2, 2])], ids=["runs", "each"]
)
def test_who_frees_runs_knows_that_they_are_held(pool: BlockPool, free: Callable[[BlockPool], None]) -> None:
    """These verbs are for callers that have counted: a mistake is found, and not undone."""
    taken(pool, 2)
    with pytest.raises(AssertionError, match="invariant 1: block 2 is freed more often than held"):
        free(pool)


# -- several blocks under one name


def copies(pool: BlockPool, count: int, name: BlockHash = b"x") -> list[int]:
    """Held blocks that carry the same name."""
    blocks = taken(pool, count)
    for block in blocks:
        pool.commit([block], [name])
    return blocks


def test_the_copy_committed_first_is_found(pool: BlockPool) -> None:
    first, second, third = copies(pool, 3)
    assert pool.match([b"x"]) == [first]
    assert [pool.name(block) for block in (first, second, third)] == [b"x"] * 3
    assert pool.names() == {b"x"}
    pool.check()


def test_when_the_first_copy_is_evicted_the_next_oldest_is_found(pool: BlockPool, log: EventLog) -> None:
    first, second, third = copies(pool, 3)
    pool.free([first])
    taken(pool, 8)
    assert pool.num_evictions == 1
    assert pool.match([b"x"]) == [second]
    assert (log.take(), pool.was_evicted(b"x")) == ([], False)
    pool.free([second])
    taken(pool, 1)
    assert pool.match([b"x"]) == [third]
    assert log.take() == []
    pool.free([third])
    taken(pool, 1)
    assert pool.match([b"x"]) == []
    assert log.take() == [BlockRemoved((b"x",))]
    assert pool.was_evicted(b"x")
    pool.check()


def test_when_a_later_copy_is_evicted_the_first_is_still_found(pool: BlockPool, log: EventLog) -> None:
    first, second, third = copies(pool, 3)
    pool.free([second])
    taken(pool, 8)
    assert pool.match([b"x"]) == [first]
    pool.free([first])
    taken(pool, 1)
    assert pool.match([b"x"]) == [third]
    assert log.take() == []
    pool.check()


def test_copies_evicted_together_leave_once(pool: BlockPool, log: EventLog) -> None:
    pool.free(copies(pool, 3))
    assert pool.num_cached == 3
    taken(pool, 10)
    assert (pool.num_evictions, pool.num_cached) == (3, 0)
    assert log.take() == [BlockRemoved((b"x",))]
    pool.check()


# -- groups


@pytest.fixture
def grouped(make_pool: PoolFactory, log: EventLog) -> BlockPool:
    """Ten usable blocks for three groups."""
    return make_pool(11, log, num_groups=3)


def test_a_name_is_found_in_its_own_group_alone(grouped: BlockPool) -> None:
    blocks = taken(grouped, 3)
    grouped.commit(blocks[:1], [b"x"], group_id=1)
    assert [grouped.match([b"x"], group) for group in range(3)] == [[], [1], []]
    assert [grouped.finder(group)(b"x") for group in range(3)] == [None, 1, None]
    assert [grouped.names(group) for group in range(3)] == [set(), {b"x"}, set()]
    grouped.commit(blocks[1:], [b"x", b"y"], group_id=0)
    assert [grouped.match([b"x", b"y"], group) for group in range(3)] == [[2, 3], [1], []]
    grouped.check()


def test_a_block_comes_back_in_whatever_group_it_is_committed_next(grouped: BlockPool) -> None:
    [block] = taken(grouped, 1)
    grouped.commit([block], [b"x"], group_id=2)
    grouped.free([block])
    assert taken(grouped, 10)[-1] == block
    grouped.commit([block], [b"y"], group_id=1)
    assert (grouped.match([b"x"], 2), grouped.match([b"y"], 1)) == ([], [block])
    grouped.check()


def test_evictions_are_told_group_by_group(grouped: BlockPool, log: EventLog) -> None:
    blocks = taken(grouped, 5)
    grouped.commit(blocks[:2], [b"x", b"y"], group_id=2)
    grouped.commit(blocks[2:4], [b"x", b"z"], group_id=0)
    grouped.commit(blocks[4:], [b"w"], group_id=2)
    grouped.free(reversed(blocks))
    taken(grouped, 9)
    assert log.take() == [BlockRemoved((b"z", b"x"), 0), BlockRemoved((b"w", b"y"), 2)]
    assert [grouped.was_evicted(b"x", group) for group in range(3)] == [True, False, False]
    assert [grouped.was_evicted(b"y", group) for group in range(3)] == [False, False, True]
    assert (grouped.num_evictions, grouped.num_cached) == (4, 1)
    assert grouped.match([b"x"], 2) == [1]
    grouped.check()


NAMES: list[Any] = [b"", b"x" * 20, bytes(32), 0, -(2**63), 2**64 - 1, np.int64(-5), np.uint64(2**64 - 1), True]
NO_NAMES: list[Any] = [bytes(21), bytes(31), bytes(33), bytes(64), 2**64, -(2**63) - 1, "x", 1.0, None, (1, 2)]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_what_can_be_a_name_is_found_and_told(pool: BlockPool, log: EventLog, name: Any) -> None:
    blocks = taken(pool, 2)
    pool.commit(blocks, [name, b"next"], 0, [None, name])
    assert pool.match([name]) == blocks[:1]
    assert pool.finder(0)(name) == blocks[0]
    assert (pool.name(blocks[0]), pool.names()) == (name, {name, b"next"})
    assert pool.carry(blocks[:1], [name])
    assert pool.withdraw({name: 1}) == 2
    assert [event.block_hashes for event in log.take() if isinstance(event, BlockRemoved)] == [(name, b"next")]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_what_cannot_be_a_name_is_refused_and_never_found(pool: BlockPool, log: EventLog, name: Any) -> None:
    blocks = taken(pool, 2)
    before = state(pool)
    with pytest.raises(UsageError) as refused:
        pool.commit(blocks, [b"x", name])
    expected = f"{name!r} is no name of a block: 32 bytes, at most 20, or a whole number of 64 bits"
    assert str(refused.value) == expected
    assert (state(pool), log.take()) == (before, [])
    assert pool.match([name]) == pool.match([b"x", name]) == pool.match(iter([name])) == []
    assert pool.finder(0)(name) is None
    assert not pool.was_evicted(name)


ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "oldest first": lambda ids: ids,
    "youngest first": lambda ids: ids[::-1],
    "in any order": lambda ids: random.Random(1).sample(ids, len(ids)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_many_copies_of_a_name_go_as_fast_as_few(make_pool: PoolFactory, order: str) -> None:
    num_blocks = 40_000
    pool = make_pool(num_blocks + 1)
    blocks = taken(pool, num_blocks)
    pool.commit(blocks, [b"x"] * num_blocks)
    pool.free(ORDERS[order](blocks))
    start = process_time()
    for _ in range(num_blocks // 8 - 1):
        pool.allocate(8)
    assert process_time() - start < 1
    assert pool.match([b"x"]) == [min(pool.free_block_ids())]
    pool.check()
    assert len(taken(pool, 8)) == 8
    assert pool.match([b"x"]) == []
    pool.check()


def test_copies_are_counted_within_a_group(grouped: BlockPool, log: EventLog) -> None:
    """Two copies in group 1 and one in group 0: each group says that the name is gone with its last one."""
    blocks = taken(grouped, 3)
    for block, group in zip(blocks, (1, 0, 1), strict=True):
        grouped.commit([block], [b"x"], group)
    grouped.free(blocks)
    taken(grouped, 8)
    assert log.take() == []
    assert [grouped.match([b"x"], group) for group in (0, 1)] == [[2], [3]]
    taken(grouped, 1)
    assert log.take() == [BlockRemoved((b"x",), 0)]
    taken(grouped, 1)
    assert log.take() == [BlockRemoved((b"x",), 1)]
    grouped.check()


def test_carry_asks_for_the_group_too(grouped: BlockPool) -> None:
    blocks = taken(grouped, 2)
    grouped.commit(blocks, [b"x", b"y"], group_id=1)
    assert [grouped.carry(blocks, [b"x", b"y"], group) for group in range(3)] == [False, True, False]
    assert grouped.carry([], [], 2)


def test_clear_empties_all_groups(grouped: BlockPool, log: EventLog) -> None:
    blocks = taken(grouped, 3)
    for group, block in enumerate(blocks):
        grouped.commit([block], [b"x"], group)
    grouped.free(blocks)
    assert grouped.clear() is True
    assert [grouped.names(group) for group in range(3)] == [set()] * 3
    assert log.take() == [AllBlocksCleared()]
    grouped.check()


# -- withdraw


def chained(
    pool: BlockPool, names: Sequence[BlockHash], group_id: int = 0, parent: BlockHash | None = None
) -> list[int]:
    """Held blocks, each computed on top of the one before it, the first on top of `parent`."""
    blocks = taken(pool, len(names))
    pool.commit(blocks, names, group_id, [parent, *names[:-1]])
    return blocks


def test_what_is_withdrawn_is_found_no_longer_and_the_next_to_be_reused(pool: BlockPool, log: EventLog) -> None:
    pool.free(reversed(chained(pool, [b"w", b"x", b"y", b"z"])))
    assert pool.withdraw({b"y": 1}) == 2
    assert pool.free_block_ids() == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]
    assert (pool.match([b"w", b"x", b"y"]), pool.names(), pool.num_cached) == ([1, 2], {b"w", b"x"}, 2)
    assert log.take() == [BlockRemoved((b"y", b"z"))]
    assert (pool.num_evictions, pool.was_evicted(b"y")) == (0, False)
    pool.check()


def test_withdrawn_blocks_stay_with_their_holders(pool: BlockPool, log: EventLog) -> None:
    blocks = chained(pool, [b"x", b"y"])
    assert pool.withdraw({b"x": 1}) == 2
    assert [(pool.holders(block), pool.name(block)) for block in blocks] == [(1, None)] * 2
    assert (pool.num_cached, pool.num_free, log.take()) == (0, 8, [BlockRemoved((b"x", b"y"))])
    pool.free(reversed(blocks))
    assert pool.free_block_ids() == [2, 1, 3, 4, 5, 6, 7, 8, 9, 10]
    pool.check()


def test_a_block_may_be_committed_again_after_it_was_withdrawn(pool: BlockPool) -> None:
    [block] = chained(pool, [b"x"])
    pool.withdraw({b"x": 1})
    pool.commit([block], [b"x"])
    assert pool.match([b"x"]) == [block]
    pool.check()


def test_all_copies_of_a_withdrawn_name_go(pool: BlockPool, log: EventLog) -> None:
    pool.free(copies(pool, 2)[1:])
    assert pool.withdraw({b"x": 1}) == 2
    assert (pool.match([b"x"]), pool.num_cached, log.take()) == ([], 0, [BlockRemoved((b"x",))])
    pool.check()


def test_a_bad_block_takes_its_name_and_all_that_depends_on_it(pool: BlockPool) -> None:
    """Two prompts share w and x; the second goes on with another block."""
    chained(pool, [b"w", b"x", b"y"])
    chained(pool, [b"Y", b"Z"], parent=b"x")
    chained(pool, [b"other"])
    assert pool.withdraw({pool.name(2) or b"": 4}) == 4
    assert pool.names() == {b"w", b"other"}
    pool.check()


def test_a_name_belongs_to_a_group_and_may_have_a_lineage(grouped: BlockPool) -> None:
    blocks = taken(grouped, 3)
    part, whole = Lineage(None, (), b"y", 8), Lineage(b"y", ((b"y", 4),), None, 0)
    grouped.commit(blocks[:2], [b"x", b"y"], 1, [part, None])
    grouped.commit(blocks[2:], [b"z"], 2, [whole])
    assert [grouped.group_id(block) for block in blocks] == [1, 1, 2]
    assert [grouped.lineage(block) for block in blocks] == [part, None, whole]


@pytest.fixture
def side_by_side(grouped: BlockPool) -> BlockPool:
    """Blocks A and B of 16 tokens in group 0, computed one after the other, and the same tokens in group 1 by fours.

    Each block of group 1 is named after where it ends; b3 and B end at the same token, and have the same name.
    """
    names = [b"a0", b"a1", b"a2", b"A", b"b0", b"b1", b"b2", b"B"]
    lineages = [
        Lineage(
            b"A" if at > 3 else None,
            ((names[at - 1], 4),) if at % 4 else (),
            None if at % 4 == 3 else whole,
            12 - at % 4 * 4,
        )
        for at, whole in enumerate([b"A"] * 4 + [b"B"] * 4)
    ]
    grouped.commit(taken(grouped, 2), [b"A", b"B"], 0, [None, b"A"])
    grouped.commit(taken(grouped, 8), names, 1, lineages)
    return grouped


@pytest.mark.parametrize(
    ("bad", "full", "small"),
    [
        ({b"B": 16}, [b"A"], [b"a0", b"a1", b"a2", b"A"]),
        ({b"B": 5}, [b"A"], [b"a0", b"a1", b"a2", b"A", b"b0", b"b1"]),
        ({b"B": 4}, [b"A"], [b"a0", b"a1", b"a2", b"A", b"b0", b"b1", b"b2"]),
        ({b"b1": 4}, [b"A"], [b"a0", b"a1", b"a2", b"A", b"b0"]),
        ({b"A": 8}, [], [b"a0", b"a1"]),
        ({b"A": 16}, [], []),
        ({b"a0": 4}, [], []),
        ({b"a2": 1, b"b0": 4}, [], [b"a0", b"a1"]),
    ],
    ids=str,
)
def test_parts_go_as_far_as_they_reach_into_what_is_bad_with_all_that_comes_behind(
    side_by_side: BlockPool, bad: dict[BlockHash, int], full: list[BlockHash], small: list[BlockHash]
) -> None:
    """The last tokens of these names are bad: so many of them."""
    dependents = side_by_side.dependents(bad)
    side_by_side.withdraw(bad)
    assert side_by_side.names(0) == set(full)
    assert side_by_side.names(1) == set(small)
    assert dependents >= {b"A", b"B", b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"} - set(small)
    assert not dependents & set(small)
    side_by_side.check()


def test_what_depends_on_a_name_that_nobody_carries_goes_too(pool: BlockPool) -> None:
    """Whether that was computed on top of what is bad cannot be told any more."""
    chained(pool, [b"x", b"y"], parent=b"long gone")
    chained(pool, [b"w"])
    chained(pool, [b"z"])
    assert pool.withdraw({b"w": 1}) == 3
    assert pool.names() == {b"z"}
    pool.check()


def test_blocks_of_other_groups_depend_on_a_name_too(grouped: BlockPool, log: EventLog) -> None:
    chained(grouped, [b"w", b"x", b"y"], group_id=0)
    chained(grouped, [b"y", b"z"], group_id=2, parent=b"x")
    chained(grouped, [b"w"], group_id=1)
    assert grouped.withdraw({b"x": 1}) == 4
    assert [grouped.names(group) for group in range(3)] == [{b"w"}, {b"w"}, set()]
    assert sorted(log.take(), key=str) == [BlockRemoved((b"x", b"y"), 0), BlockRemoved((b"y", b"z"), 2)]
    grouped.check()


def test_withdrawing_what_nobody_knows_changes_nothing(pool: BlockPool, log: EventLog) -> None:
    pool.free(chained(pool, [b"x"]))
    before = state(pool)
    assert pool.withdraw({b"?": 1}) == 0
    assert pool.withdraw({}) == 0
    assert (state(pool), log.take()) == (before, [])


def test_a_reused_block_depends_on_nothing_that_it_depended_on_before(pool: BlockPool) -> None:
    pool.free(chained(pool, [b"x"], parent=b"w"))
    taken(pool, 10)
    pool.commit([1], [b"y"])
    assert pool.withdraw({b"w": 1}) == 0
    assert pool.match([b"y"]) == [1]
    pool.check()


# -- clear


def test_clear_forgets_names_and_keeps_the_order(pool: BlockPool, log: EventLog) -> None:
    serve(pool, [b"x", b"y"], num_blocks=3)
    copies_of_x = copies(pool, 2, b"z")
    pool.free(copies_of_x)
    before = pool.free_block_ids()
    assert pool.clear() is True
    assert pool.free_block_ids() == before
    assert (pool.names(), pool.num_cached, pool.num_evictions) == (set(), 0, 0)
    assert log.take() == [AllBlocksCleared()]
    taken(pool, 10)
    assert log.take() == []
    pool.check()


def test_clear_forgets_what_was_evicted(pool: BlockPool) -> None:
    serve(pool, [b"x"])
    blocks = taken(pool, 10)
    pool.free(blocks)
    assert pool.was_evicted(b"x")
    pool.clear()
    assert not pool.was_evicted(b"x")


def test_clear_is_refused_while_a_block_is_held(pool: BlockPool, log: EventLog) -> None:
    serve(pool, [b"x", b"y"])
    pool.touch([1])
    before = state(pool)
    assert pool.clear() is False
    assert state(pool) == before
    assert log.take() == []


def test_clear_of_an_empty_pool_succeeds(pool: BlockPool, log: EventLog) -> None:
    assert pool.clear() is True
    assert log.take() == [AllBlocksCleared()]


def test_a_pool_without_a_log_does_the_same(make_pool: PoolFactory) -> None:
    pool = make_pool(11)
    serve(pool, [b"x"])
    taken(pool, 10)
    pool.free(range(1, 11))
    assert pool.num_evictions == 1
    assert pool.clear() is True
    pool.check()


# -- what the pool refuses


def test_a_block_without_holders_is_not_freed(pool: BlockPool) -> None:
    pool.free(taken(pool, 1))
    before = state(pool)
    with pytest.raises(UsageError, match="block 1 is freed 1 times at once, and has 0 holders"):
        pool.free([1])
    assert state(pool) == before


@pytest.mark.parametrize("given", [list, iter, reversed], ids=["list", "iterator", "reversed"])
def test_a_block_freed_more_often_than_held_changes_nothing(
    pool: BlockPool, log: EventLog, given: Callable[[list[int]], Iterable[int]]
) -> None:
    """Blocks 1 and 3 would have been let go of; block 2 has two holders and is freed three times."""
    pool.commit(taken(pool, 3), [b"x", b"y", b"z"])
    pool.touch([2])
    log.take()
    before = state(pool)
    with pytest.raises(UsageError, match="block 2 is freed 3 times at once, and has 2 holders"):
        pool.free(given([2, 1, 0, 2, 3, 2]))
    assert state(pool) == before
    assert log.take() == []
    pool.check()
    pool.free([2, 3, 2, 1])
    assert pool.num_free == 10
    pool.check()


def test_the_null_block_is_passed_over_when_freed(pool: BlockPool) -> None:
    first, second = taken(pool, 2)
    pool.free([NULL_BLOCK, second, NULL_BLOCK, NULL_BLOCK, first])
    assert pool.free_block_ids() == [2, 1, 3, 4, 5, 6, 7, 8, 9, 10]
    pool.free([NULL_BLOCK])
    assert (pool.num_free, pool.holders(NULL_BLOCK)) == (10, 0)
    pool.check()


def test_the_null_block_is_never_given_out(pool: BlockPool) -> None:
    assert NULL_BLOCK not in taken(pool, 10)
    assert (pool.holders(NULL_BLOCK), pool.name(NULL_BLOCK)) == (0, None)
    assert pool.allocate(1) is None


# -- check() finds planted corruption. The faults are written for the Python pool's own fields.

Corruption = Callable[[Any], None]


def _lose_a_free_block(pool: Any) -> None:
    pool._free.remove([7])


def _hold_a_free_block(pool: Any) -> None:
    pool._holders[7] = 1


def _forget_a_holder(pool: Any) -> None:
    pool._holders[3] = 0


def _hold_less_than_nobody(pool: Any) -> None:
    pool._holders[7] = -1


def _miscount_cached(pool: Any) -> None:
    pool.num_cached += 1


def _index_a_foreign_block(pool: Any) -> None:
    pool._indexes[0].first[b"x"] = 9


def _index_a_forgotten_name(pool: Any) -> None:
    pool._indexes[0].first[b"ghost"] = 9


def _name_without_index(pool: Any) -> None:
    del pool._indexes[0].first[b"held"]


def _lose_a_copy(pool: Any) -> None:
    del pool._indexes[0].further[b"held"]


def _keep_a_list_of_no_copies(pool: Any) -> None:
    pool._indexes[0].further[b"x"] = []


def _hold_the_null_block(pool: Any) -> None:
    pool._holders[NULL_BLOCK] = 1


def _name_the_null_block(pool: Any) -> None:
    pool._names[NULL_BLOCK] = b"null"
    pool._indexes[0].first[b"null"] = NULL_BLOCK


def _index_in_another_group(pool: Any) -> None:
    pool._indexes[1].first[b"x"] = pool._indexes[0].first.pop(b"x")


def _count_to_another_group(pool: Any) -> None:
    pool._groups[1] = 1


def _break_a_link_back(pool: Any) -> None:
    pool._free._previous[7] = 5


def _make_a_shorter_round(pool: Any) -> None:
    pool._free._next[6] = 8


def _miscount_the_queue(pool: Any) -> None:
    pool._free._length -= 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_lose_a_free_block, "invariant 2: block 7"),
        (_hold_a_free_block, "invariant 2: block 7"),
        (_forget_a_holder, "invariant 2: block 3"),
        (_hold_less_than_nobody, "invariant 1: block 7 has -1 holders"),
        (_miscount_cached, "invariant 1: 3 blocks are counted as cached, 2 are"),
        (_index_a_foreign_block, "invariant 3: the index and the blocks' names differ"),
        (_index_a_forgotten_name, "invariant 3: the index and the blocks' names differ"),
        (_index_in_another_group, "invariant 3: the index and the blocks' names differ"),
        (_count_to_another_group, "invariant 3: the index and the blocks' names differ"),
        (_name_without_index, "invariant 3: the index and the blocks' names differ"),
        (_lose_a_copy, "invariant 3: the index and the blocks' names differ"),
        (_keep_a_list_of_no_copies, "invariant 3: an empty list of copies"),
        (_hold_the_null_block, "invariant 5: the null block is held"),
        (_name_the_null_block, "invariant 5: the null block has a name"),
        (_break_a_link_back, "invariant 2: a link is one-way"),
        (_make_a_shorter_round, "invariant 2: the free queue is broken"),
        (_miscount_the_queue, "invariant 2: the free queue is broken"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_finds(corrupt: Corruption, message: str) -> None:
    pool = BlockPool(11, num_groups=2)
    serve(pool, [b"x", b"y"])
    held = taken(pool, 2)
    assert held == [3, 4]
    pool.commit(held, [b"held", b"held"])
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
