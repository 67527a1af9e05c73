"""The free queue alone, and the memory for lately used names."""

import random

import pytest

from kvpool.core.eviction import LRU, RankedLRU, RecentNames


@pytest.fixture
def queue() -> LRU:
    return LRU(7)


@pytest.fixture
def ranked() -> RankedLRU:
    return RankedLRU(7)


def test_all_but_the_null_block_stand_in_order(queue: LRU) -> None:
    assert list(queue) == [1, 2, 3, 4, 5, 6]
    assert len(queue) == 6
    queue.check()


def test_take_from_the_front_to_the_last(queue: LRU) -> None:
    assert queue.take(2) == [1, 2]
    assert queue.take(0) == []
    assert list(queue) == [3, 4, 5, 6]
    assert queue.take(4) == [3, 4, 5, 6]
    assert (list(queue), len(queue)) == ([], 0)
    queue.check()


def test_more_than_there_are_cannot_be_taken(queue: LRU) -> None:
    with pytest.raises(AssertionError, match="7 blocks are taken, 6 are free"):
        queue.take(7)
    assert list(queue) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("blocks", [[1], [6], [3], [3, 4], [4, 3], [1, 6], [1, 2, 3, 4, 5, 6]])
def test_blocks_leave_from_anywhere(queue: LRU, blocks: list[int]) -> None:
    queue.remove(blocks)
    assert list(queue) == [block for block in range(1, 7) if block not in blocks]
    assert len(queue) == 6 - len(blocks)
    queue.check()


def test_empty_blocks_go_first_and_cached_ones_last_each_in_their_order(queue: LRU) -> None:
    queue.take(5)
    queue.add_cached([5, 2])
    queue.add_empty([4, 1])
    queue.add_cached([3])
    queue.add_empty([])
    assert list(queue) == [4, 1, 6, 5, 2, 3]
    assert len(queue) == 6
    queue.check()


def test_spare_blocks_stand_between_empty_and_cached_ones_in_the_order_in_which_they_came(ranked: RankedLRU) -> None:
    ranked.take(6)
    for add, blocks in (
        (ranked.add_cached, [6]),
        (ranked.add_spare, [2, 1]),
        (ranked.add_empty, [5]),
        (ranked.add_cached, [4]),
        (ranked.add_spare, [3]),
    ):
        add(blocks)
        ranked.check()
    assert list(ranked) == [5, 2, 1, 3, 6, 4]


@pytest.mark.parametrize("leave", [[3], [3, 1], [5, 2, 1, 3], [1], [6], [6, 4], [5]])
def test_spare_blocks_find_their_place_whoever_left(ranked: RankedLRU, leave: list[int]) -> None:
    ranked.take(6)
    ranked.add_cached([6, 4])
    ranked.add_spare([2, 1, 3])
    ranked.add_empty([5])
    ranked.remove(leave)
    ranked.check()
    ranked.add_spare(leave)
    ranked.check()
    rest = [block for block in (5, 2, 1, 3) if block not in leave]
    assert list(ranked) == rest + leave + [block for block in (6, 4) if block not in leave]


@pytest.mark.parametrize("count", range(7))
def test_spare_blocks_find_their_place_however_many_were_taken(ranked: RankedLRU, count: int) -> None:
    ranked.take(6)
    ranked.add_cached([6, 4])
    ranked.add_spare([2, 1, 3])
    ranked.add_empty([5])
    taken = ranked.take(count)
    ranked.check()
    ranked.add_spare(taken)
    ranked.check()
    order = [5, 2, 1, 3, 6, 4]
    assert list(ranked) == [*order[count:4], *order[:count], *order[max(count, 4) :]]


def test_an_empty_queue_fills_from_either_end(queue: LRU) -> None:
    queue.take(6)
    queue.add_empty([2, 3])
    queue.take(2)
    queue.add_cached([3, 2])
    assert list(queue) == [3, 2]
    queue.check()


def test_the_queue_is_three_lists_under_random_calls(rng: random.Random) -> None:
    queue = RankedLRU(20)
    empty, spare, cached = list(range(1, 20)), list[int](), list[int]()
    out: list[int] = []
    for _ in range(5_000):
        both = [*empty, *spare, *cached]
        match rng.randrange(5):
            case 0:
                leaving = both[: rng.randint(0, len(both))]
                assert queue.take(len(leaving)) == leaving
            case 1:
                leaving = rng.sample(both, rng.randint(0, len(both)))
                queue.remove(leaving)
            case end:
                leaving = []
                rng.shuffle(out)
                blocks, out = out[:3], out[3:]
                if end == 2:
                    queue.add_empty(blocks)
                    empty[:0] = blocks
                elif end == 3:
                    queue.add_spare(blocks)
                    spare += blocks
                else:
                    queue.add_cached(blocks)
                    cached += blocks
        out += leaving
        for part in (empty, spare, cached):
            part[:] = [block for block in part if block not in leaving]
        assert (list(queue), len(queue)) == ([*empty, *spare, *cached], 19 - len(out))
        queue.check()


def test_without_spare_blocks_it_is_the_queue_without_ranks(rng: random.Random) -> None:
    plain, ranked = LRU(20), RankedLRU(20)
    out: list[int] = []
    for _ in range(5_000):
        free = list(plain)
        match rng.randrange(4):
            case 0:
                count = rng.randint(0, len(free))
                taken = plain.take(count)
                assert ranked.take(count) == taken
                out += taken
            case 1:
                leaving = rng.sample(free, rng.randint(0, len(free)))
                for queue in (plain, ranked):
                    queue.remove(leaving)
                out += leaving
            case end:
                rng.shuffle(out)
                blocks, out = out[:3], out[3:]
                for queue in (plain, ranked):
                    (queue.add_empty if end == 2 else queue.add_cached)(blocks)
                ranked.add_spare([])
        assert list(ranked) == list(plain)
        ranked.check()


def test_recent_names_are_at_least_the_last_and_never_all(rng: random.Random) -> None:
    names, limit = RecentNames(10), 10
    for last in range(1_000):
        names.add(last)
        assert all(name in names for name in range(max(0, last - limit + 1), last + 1))
        assert not any(name in names for name in range(last - 2 * limit + 1))
    assert rng.randrange(-100, 0) not in names


def test_many_names_at_once_are_all_remembered() -> None:
    names = RecentNames(3)
    names.update(range(3))
    names.update(range(10, 12))
    assert [name for name in range(20) if name in names] == [0, 1, 2, 10, 11]
    names.update(range(12, 15))
    assert [name for name in range(20) if name in names] == [10, 11, 12, 13, 14]
