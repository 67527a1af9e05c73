"""The free queue alone, and the memory for lately used names."""

import random

import pytest

from kvpool.core.eviction import LRU, RecentNames


@pytest.fixture
def queue() -> LRU:
    return LRU(7)


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


def test_an_empty_queue_fills_from_either_end(queue: LRU) -> None:
    queue.take(6)
    queue.add_empty([2, 3])
    queue.take(2)
    queue.add_cached([3, 2])
    assert list(queue) == [3, 2]
    queue.check()


def test_the_queue_is_a_list_under_random_calls(rng: random.Random) -> None:
    queue, expected = LRU(20), list(range(1, 20))
    out: list[int] = []
    for _ in range(3_000):
        match rng.randrange(4):
            case 0:
                count = rng.randint(0, len(expected))
                out += expected[:count]
                assert queue.take(count) == expected[:count]
                del expected[:count]
            case 1:
                blocks = rng.sample(expected, rng.randint(0, len(expected)))
                queue.remove(blocks)
                expected = [block for block in expected if block not in blocks]
                out += blocks
            case end:
                rng.shuffle(out)
                blocks, out = out[:3], out[3:]
                (queue.add_empty if end == 2 else queue.add_cached)(blocks)
                expected = blocks + expected if end == 2 else expected + blocks
        assert (list(queue), len(queue)) == (expected, len(expected))
        queue.check()


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
