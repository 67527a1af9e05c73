"""The event log, and which events a cache writes, with what in them."""

import logging
from itertools import combinations

import pytest

from kvpool import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event, KVCacheManager, Request
from kvpool.events import EventLog
from kvpool.testing import apply_events, serve


def removed(*names: int) -> BlockRemoved:
    return BlockRemoved(names)


def test_events_are_taken_once_in_order() -> None:
    log = EventLog()
    log.stored([8, 9], 7, range(4, 12), 4)
    log.stored([5], None, range(2), 2, group_id=3)
    log.removed([7])
    log.removed([8], group_id=1)
    assert log.take() == [
        BlockStored((8, 9), 7, tuple(range(4, 12)), 4, 0),
        BlockStored((5,), None, (0, 1), 2, 3),
        BlockRemoved((7,), 0),
        BlockRemoved((8,), 1),
    ]
    assert log.take() == []
    log.cleared()
    assert log.take() == [AllBlocksCleared()]


def test_events_of_different_kinds_are_never_equal_and_all_are_true() -> None:
    events: list[Event] = [BlockStored((), None, (), 0, 0), BlockRemoved((), 0), AllBlocksCleared()]
    assert all(events)
    assert all(one != other for one, other in combinations([*events, ()], 2))
    assert len({*events, BlockRemoved(()), AllBlocksCleared()}) == 3


def test_events_say_what_they_are_and_cannot_be_changed() -> None:
    events: list[Event] = [BlockStored((b"n",), None, (1, 2), 2, 0), BlockRemoved((7,)), AllBlocksCleared()]
    assert [repr(event) for event in events] == [
        "BlockStored(block_hashes=(b'n',), parent_block_hash=None, token_ids=(1, 2), block_size=2, group_id=0)",
        "BlockRemoved(block_hashes=(7,), group_id=0)",
        "AllBlocksCleared()",
    ]
    for event in events:
        with pytest.raises((AttributeError, TypeError)):
            setattr(event, "group_id", 1)  # noqa: B010


def test_removals_in_a_row_are_one_event_a_group() -> None:
    log = EventLog()
    log.removed([1], 2)
    log.removed([2, 3], 0)
    log.removed([4], 2)
    log.stored([1], None, (), 0)
    log.removed([1], 0)
    log.stored_all([BlockStored((5,), None, (), 0, 1)])
    log.removed([5], 1)
    assert log.take() == [
        BlockRemoved((2, 3), 0),
        BlockRemoved((1, 4), 2),
        BlockStored((1,), None, (), 0, 0),
        BlockRemoved((1,), 0),
        BlockStored((5,), None, (), 0, 1),
        BlockRemoved((5,), 1),
    ]
    log.removed([6])
    log.cleared()
    assert log.take() == [AllBlocksCleared()]


def test_clearing_makes_earlier_events_unnecessary() -> None:
    log = EventLog()
    log.removed([1, 2])
    log.cleared()
    log.removed([3])
    assert log.take() == [AllBlocksCleared(), removed(3)]


def test_a_full_log_drops_all_says_so_and_begins_with_cleared(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(limit=3)
    log.removed([0, 1])
    log.stored([2], None, range(4), 4)
    assert not caplog.records
    log.removed([3])
    log.removed([4])
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.WARNING,
        "events about 3 blocks were not taken and are dropped: call take_events() each step, or pass events=False",
    )
    assert log.take() == [AllBlocksCleared(), removed(3, 4)]
    log.removed([5])
    assert log.take() == [removed(5)]


def test_what_is_larger_than_the_limit_is_kept_alone() -> None:
    log = EventLog(limit=3)
    log.removed([1])
    log.removed([2, 3, 4, 5])
    assert log.take() == [AllBlocksCleared(), removed(2, 3, 4, 5)]


def test_stored_blocks_tell_parent_tokens_and_size() -> None:
    cache = KVCacheManager(12, 4)
    request = Request("r", range(10))
    cache.allocate(request, 10)
    assert cache.take_events() == []
    cache.commit(request, 10)
    first, second = request.block_hashes(cache.hasher)
    assert cache.take_events() == [BlockStored((first, second), None, tuple(range(8)), 4, 0)]
    request.append(10)
    request.append(11)
    cache.allocate(request, 2)
    cache.commit(request, 11)
    assert cache.take_events() == []
    cache.commit(request, 12)
    third = request.block_hashes(cache.hasher)[2]
    assert cache.take_events() == [BlockStored((third,), second, (8, 9, 10, 11), 4, 0)]
    assert cache.take_events() == []


def test_blocks_after_a_hit_name_the_hit_as_their_parent() -> None:
    cache = KVCacheManager(12, 4)
    serve(cache, Request("a", range(9)))
    cache.take_events()
    request = Request("b", [*range(8), 50, 51, 52, 53])
    assert serve(cache, request).num_tokens == 8
    names = request.block_hashes(cache.hasher)
    assert cache.take_events() == [BlockStored((names[2],), names[1], (50, 51, 52, 53), 4, 0)]


def test_a_second_copy_may_be_told_again_but_is_removed_with_the_last_one() -> None:
    cache = KVCacheManager(3, 4)
    copies = [Request("a", range(4)), Request("b", range(4))]
    for request in copies:
        cache.allocate(request, 4)
    names: set[BlockHash] = set()
    for request in copies:
        cache.commit(request, 4)
        apply_events(names, cache.take_events())
        assert names == cache.findable() == {request.block_hashes(cache.hasher)[0]}
    cache.free(copies[0])
    cache.allocate(Request("taker", [9]), 1)
    assert cache.take_events() == []
    cache.free(copies[1])
    cache.allocate(Request("second taker", [9]), 1)
    assert cache.take_events() == [BlockRemoved(tuple(names))]


def test_removal_is_told_before_what_replaces_it() -> None:
    cache = KVCacheManager(3, 4)
    old, new = Request("old", range(8)), Request("new", range(50, 58))
    serve(cache, old)
    cache.free(old)
    serve(cache, new)
    old_names, new_names = (tuple(request.block_hashes(cache.hasher)) for request in (old, new))
    assert cache.take_events() == [
        BlockStored(old_names, None, tuple(range(8)), 4, 0),
        BlockRemoved(old_names[::-1]),
        BlockStored(new_names, None, tuple(range(50, 58)), 4, 0),
    ]


def test_a_cache_without_events_has_none() -> None:
    cache = KVCacheManager(3, 4, events=False)
    request = Request("r", range(8))
    serve(cache, request)
    cache.free(request)
    assert cache.clear()
    assert cache.take_events() == []


def test_applied_events_give_the_names_that_can_be_found() -> None:
    names: set[BlockHash] = {9}
    events: list[Event] = [
        AllBlocksCleared(),
        BlockStored((1, 2), None, (), 4, 0),
        BlockStored((2, 3), 1, (), 4, 0),
        BlockRemoved((2, 7)),
    ]
    apply_events(names, events)
    assert names == {1, 3}
