"""Cases of group C about blocks and their holders: none is free twice, none is owned twice."""
# ruff: noqa: N802

import random

import pytest

from kvpool import BlockPool, KVCacheManager, Request, SlidingWindow, UsageError


def _state(pool: BlockPool) -> tuple[object, ...]:
    """All that a block can be told by."""
    blocks = range(pool.num_blocks)
    holders, names = [pool.holders(block) for block in blocks], [pool.name(block) for block in blocks]
    return pool.free_block_ids(), holders, names, pool.num_cached, pool.num_evictions


def _assert_free_are_those_nobody_holds(pool: BlockPool) -> None:
    free = pool.free_block_ids()
    assert pool.num_free == len(free) == len(set(free))
    assert set(free) == {block for block in range(1, pool.num_blocks) if not pool.holders(block)}
    pool.check()


def _pool_with_1_and_2_held() -> BlockPool:
    pool = BlockPool(5)
    assert pool.allocate(2) == [1, 2]
    return pool


def test_C01_i_a_block_cannot_be_let_go_of_more_often_than_it_is_held() -> None:
    """One holder, freed twice in one call: an error, and nothing has changed, whatever else is in the call."""
    pool = _pool_with_1_and_2_held()
    before = _state(pool)
    for blocks in ([1, 1], [2, 1, 1], [1, 2, 1], [0, 1, 2, 1], [1, 1, 2, 0]):
        with pytest.raises(UsageError, match="block 1 is freed 2 times at once, and has 1 holders"):
            pool.free(blocks)
        assert _state(pool) == before
    with pytest.raises(UsageError, match="block 1 is freed 3 times at once, and has 1 holders"):
        pool.free(iter([1, 1, 1]))
    assert _state(pool) == before
    _assert_free_are_those_nobody_holds(pool)


def test_C01_ii_two_holders_may_let_go_at_once() -> None:
    """Two holders, freed twice in one call: legal, and the block is in the queue once."""
    pool = _pool_with_1_and_2_held()
    pool.commit([1], [b"one"])
    pool.touch([1])
    assert pool.holders(1) == 2
    pool.free([1, 1])
    assert (pool.holders(1), pool.num_free) == (0, 3)
    assert pool.free_block_ids() == [3, 4, 1]
    _assert_free_are_those_nobody_holds(pool)


def test_C01_iii_a_second_call_for_the_same_block_is_an_error() -> None:
    pool = _pool_with_1_and_2_held()
    pool.free([2])
    before = _state(pool)
    with pytest.raises(UsageError, match="block 2 is freed 1 times at once, and has 0 holders"):
        pool.free([2])
    assert _state(pool) == before
    assert pool.num_free == 3
    _assert_free_are_those_nobody_holds(pool)


def test_C01_iv_the_null_block_is_passed_over() -> None:
    pool = _pool_with_1_and_2_held()
    before = _state(pool)
    pool.free([0])
    pool.free([0, 0])
    assert _state(pool) == before
    pool.free([0, 2, 0])
    assert pool.free_block_ids() == [2, 3, 4]
    _assert_free_are_those_nobody_holds(pool)


def test_C01_free_blocks_are_those_nobody_holds_after_any_calls(rng: random.Random) -> None:
    """Releases of random blocks, right and wrong ones, against a plain count of holders."""
    pool, holders = BlockPool(8), [0] * 8
    for number in range(3_000):
        if rng.random() < 0.4 and pool.num_free:
            for block in pool.allocate(rng.randint(1, pool.num_free)) or ():
                holders[block] = 1
                if rng.random() < 0.5:
                    pool.commit([block], [b"%d" % (number * 8 + block)])
        elif rng.random() < 0.4:
            block = rng.randint(1, 7)
            if pool.name(block):
                pool.touch([block])
                holders[block] += 1
        else:
            freed = rng.choices(range(8), k=rng.randint(0, 4))
            left = [count - freed.count(block) for block, count in enumerate(holders)]
            before = _state(pool)
            if min(left[1:]) < 0:
                with pytest.raises(UsageError):
                    pool.free(freed)
                assert _state(pool) == before
            else:
                pool.free(freed)
                holders = [0, *left[1:]]
        assert [pool.holders(block) for block in range(8)] == holders
        _assert_free_are_those_nobody_holds(pool)


def test_C01_a_block_that_comes_back_to_a_windowed_request_stands_in_its_table_once() -> None:
    """One long request in a pool that it passes through again and again, and an eye on who else gets its blocks."""
    cache = KVCacheManager(8, 4, [SlidingWindow(8)], publication="every")
    request, seen = Request("long", range(6), max_tokens=500), list[int]()
    table = cache.allocate(request, 6)
    assert table is not None
    for token_id in range(300):
        held = [block for block in table.block_ids[0] if block]
        assert len(held) == len(set(held)) <= 3
        assert not set(held) & set(cache.free_block_ids())
        assert len(held) + cache.num_free_blocks == 7
        cache.commit(request, request.num_tokens)
        request.append(token_id)
        assert cache.allocate(request, 1) is table
        seen += held
        cache.check()
    assert min(seen.count(block) for block in range(1, 8)) > 30
    cache.free(request)
    assert sorted(cache.free_block_ids()) == list(range(1, 8))
