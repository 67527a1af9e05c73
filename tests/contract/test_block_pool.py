"""What any block pool must do, whatever it is made of: one suite for all of them, through public verbs alone.

Only the tests of `check()` itself reach under the surface, to plant the corruption that it must find.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpool import NULL_BLOCK, AllBlocksCleared, BlockHash, BlockPool, BlockRemoved, ConfigError
from kvpool.events import EventLog

PoolFactory = Callable[..., BlockPool]
POOLS: list[PoolFactory] = [BlockPool]


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
    with pytest.raises(ValueError, match="shorter"):
        pool.commit(taken(pool, 2), [b"x"])


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


def test_a_block_freed_more_often_than_held_is_our_fault(pool: BlockPool) -> None:
    pool.free(taken(pool, 1))
    with pytest.raises(AssertionError, match="invariant 1: block 1 is freed more often than held"):
        pool.free([1])


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
    pool._index[b"x"] = 9


def _index_a_forgotten_name(pool: Any) -> None:
    pool._index[b"ghost"] = 9


def _name_without_index(pool: Any) -> None:
    del pool._index[b"held"]


def _lose_a_copy(pool: Any) -> None:
    pool._further[b"held"] = []


def _keep_a_list_of_no_copies(pool: Any) -> None:
    pool._further[b"x"] = []


def _hold_the_null_block(pool: Any) -> None:
    pool._holders[NULL_BLOCK] = 1


def _name_the_null_block(pool: Any) -> None:
    pool._names[NULL_BLOCK] = b"null"
    pool._index[b"null"] = NULL_BLOCK


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
    pool = BlockPool(11)
    serve(pool, [b"x", b"y"])
    held = taken(pool, 2)
    assert held == [3, 4]
    pool.commit(held, [b"held", b"held"])
    pool.check()
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
