"""Every verb of the cache, and the worked moment with its exact numbers."""

from collections.abc import Callable

import numpy as np
import pytest

from kvpool import (
    Adapter,
    BlockHasher,
    ConfigError,
    FullAttention,
    Hit,
    HitEnd,
    KVCacheManager,
    MediaItem,
    Request,
    UsageError,
)
from kvpool.testing import MirroredCache, serve

S = list(range(100, 112))


def blocks_of(cache: KVCacheManager, request: Request) -> list[int]:
    table = cache.table(request)
    assert table is not None
    return table.block_ids[0]


def ended(cache: KVCacheManager, request: Request) -> Request:
    """A request that came and went."""
    serve(cache, request)
    cache.free(request)
    return request


@pytest.fixture
def cache() -> KVCacheManager:
    """11 usable blocks of 4 tokens."""
    return KVCacheManager(num_blocks=12, block_size=4)


# -- the worked moment


def test_the_worked_moment(cache: KVCacheManager) -> None:
    a, b = Request("A", [*S, 1, 2, 3, 4, 5]), Request("B", [*S, 7, 8, 9, 10])
    assert (serve(cache, a).num_tokens, a.num_tokens) == (0, 17)
    assert blocks_of(cache, a) == [1, 2, 3, 4, 5]
    assert serve(cache, b).num_tokens == 12
    assert blocks_of(cache, b) == [1, 2, 3, 6]
    assert [cache.holders(block) for block in range(1, 7)] == [2, 2, 2, 1, 1, 1]
    cache.free(a)
    cache.free(b)
    assert cache.free_block_ids() == [5, 7, 8, 9, 10, 11, 4, 6, 3, 2, 1]

    other_tenant = Request("T2", b.token_ids, cache_salt="T2")
    assert serve(cache, other_tenant).num_tokens == 0
    assert blocks_of(cache, other_tenant) == [5, 7, 8, 9]

    again = Request("B again", b.token_ids)
    assert cache.match(again, 16).num_tokens == 16
    assert serve(cache, again).num_tokens == 12
    assert blocks_of(cache, again) == [1, 2, 3, 10]
    assert cache.free_block_ids() == [11, 4, 6]

    e = Request("E", range(500, 512))
    fourth_of_a, fourth_of_b = a.block_hashes(cache.hasher)[3], b.block_hashes(cache.hasher)[3]
    cache.take_events()
    serve(cache, e)
    assert blocks_of(cache, e) == [11, 4, 6]
    assert cache.num_evictions == 2
    removed = cache.take_events()[0]
    assert getattr(removed, "block_hashes", None) == (fourth_of_a,)
    assert fourth_of_b in cache.findable(), "block 10 has the content of block 6"
    cache.check()


# -- configuration


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVCacheManager(0), "num_blocks is 0: at least 2"),
        (lambda: KVCacheManager(1), "num_blocks is 1: at least 2"),
        (lambda: KVCacheManager(-3), "num_blocks is -3: at least 2"),
        (lambda: KVCacheManager(12, 0), "block_size is 0: a block holds at least 1 token"),
        (lambda: KVCacheManager(12, -4), "block_size is -4: a block holds at least 1 token"),
        (lambda: KVCacheManager(12, 4, groups=[]), "no groups are given: at least 1"),
        (lambda: KVCacheManager(12, 4, groups=[FullAttention()] * 257), "257 groups are given: at most 256"),
    ],
)
def test_what_cannot_work_is_refused_at_once(make: Callable[[], KVCacheManager], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_new_cache_answers_for_itself(cache: KVCacheManager) -> None:
    assert (cache.num_blocks, cache.num_usable_blocks, cache.num_free_blocks, cache.block_size) == (12, 11, 11, 4)
    assert (cache.num_live_requests, cache.num_evictions, cache.policy) == (0, 0, "lru")
    assert cache.free_block_ids() == list(range(1, 12))
    assert cache.findable() == set()
    assert cache.table(Request("r", [1])) is None
    assert KVCacheManager(12).block_size == 16
    cache.check()


def test_another_seed_gives_other_names() -> None:
    names = [ended(KVCacheManager(12, 4, seed=seed), Request("r", range(8))) for seed in ("a", "b")]
    one, other = (request.block_hashes(KVCacheManager(12, 4, seed="a").hasher) for request in names)
    assert one == other
    assert one != names[0].block_hashes(KVCacheManager(12, 4, seed="b").hasher)


def test_capacity_in_blocks_and_requests(cache: KVCacheManager) -> None:
    assert [cache.max_blocks(n) for n in (0, 1, 4, 5, 17)] == [0, 1, 1, 2, 5]
    assert cache.max_concurrency(17) == 11 / 5


# -- match, and why a hit ended


@pytest.mark.parametrize(
    ("num_tokens", "num_hit", "reason"),
    [
        (16, 12, HitEnd.LAST_TOKEN),
        (17, 16, HitEnd.PARTIAL_BLOCK),
        (13, 12, HitEnd.PARTIAL_BLOCK),
        (12, 8, HitEnd.LAST_TOKEN),
        (4, 0, HitEnd.LAST_TOKEN),
        (3, 0, HitEnd.PARTIAL_BLOCK),
    ],
)
def test_the_longest_hit_leaves_the_last_token(
    cache: KVCacheManager, num_tokens: int, num_hit: int, reason: HitEnd
) -> None:
    ended(cache, Request("first", range(20)))
    expected = Hit(num_hit, ([1, 2, 3, 4][: num_hit // 4],), reason, num_hit)
    assert cache.match(Request("again", range(num_tokens))) == expected


def test_a_prompt_of_1000_tokens_hits_62_blocks() -> None:
    cache = KVCacheManager(100, 16)
    ended(cache, Request("first", range(1000)))
    assert cache.match(Request("again", range(1000))).num_tokens == 992


@pytest.mark.parametrize(("max_tokens", "num_hit"), [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (99, 12)])
def test_a_match_may_be_limited_or_go_to_the_end(cache: KVCacheManager, max_tokens: int, num_hit: int) -> None:
    ended(cache, Request("first", range(12)))
    assert cache.match(Request("again", range(12)), max_tokens).num_tokens == num_hit


def test_a_hit_ends_where_the_content_was_never_seen(cache: KVCacheManager) -> None:
    ended(cache, Request("first", range(12)))
    assert cache.match(Request("r", [*range(8), 50, 51, 52, 53, 54])) == Hit(8, ([1, 2],), HitEnd.NEVER_SEEN, 8)
    assert cache.match(Request("r", range(50, 60))) == Hit(0, ([],), HitEnd.NEVER_SEEN)


def test_a_hit_ends_where_the_content_was_evicted(cache: KVCacheManager) -> None:
    ended(cache, Request("first", range(12)))
    ended(cache, Request("taker", range(100, 136)))
    assert cache.match(Request("again", range(13))) == Hit(8, ([1, 2],), HitEnd.EVICTED, 8)
    ended(cache, Request("taker of all", range(200, 244)))
    assert cache.match(Request("again", range(13))) == Hit(0, ([],), HitEnd.EVICTED)


def test_other_keys_are_told_from_other_content(cache: KVCacheManager) -> None:
    ended(cache, Request("first", range(8), cache_salt="s"))
    others = [
        Request("r", range(8)),
        Request("r", range(8), cache_salt="S"),
        Request("r", range(8), tenant="s"),
        Request("r", range(8), adapter=Adapter("s", "s")),
        Request("r", range(8), media=[MediaItem("s", 0, 1)]),
    ]
    assert [cache.match(request) for request in others] == [Hit(0, ([],), HitEnd.OTHER_KEYS)] * 5
    assert cache.match(Request("r", range(1, 9))).reason is HitEnd.NEVER_SEEN


def test_a_request_may_decline_to_read(cache: KVCacheManager) -> None:
    ended(cache, Request("first", range(12)))
    assert cache.match(Request("r", range(12), reads_cache=False)) == Hit(0, ([],), HitEnd.NOT_READ)


def test_after_a_clear_nothing_was_ever_seen(cache: KVCacheManager) -> None:
    ended(cache, Request("first", range(12), cache_salt="s"))
    ended(cache, Request("taker", range(100, 144)))
    assert cache.clear()
    for salt in (None, "s"):
        assert cache.match(Request("r", range(12), cache_salt=salt)).reason is HitEnd.NEVER_SEEN


def test_match_changes_nothing() -> None:
    mirror = MirroredCache(12, 4)
    first = Request("first", range(12))
    assert mirror.allocate(first, 12)
    mirror.commit(first, 12)
    for request in (first, Request("second", range(9))):
        assert mirror.match(request).num_tokens == 8
    mirror.free(first)
    assert mirror.match(Request("third", range(9))).block_ids == ([1, 2],)


# -- allocate


def test_room_is_given_in_whole_blocks(cache: KVCacheManager) -> None:
    request = Request("r", range(9))
    table = cache.allocate(request, 9)
    assert table is cache.table(request)
    assert table is not None
    assert (table.block_ids, table.num_slots, table.num_computed, table.num_committed) == ([[1, 2, 3]], 12, 0, 0)
    assert cache.num_live_requests == 1
    assert cache.allocate(request, 12) is table
    assert table.block_ids == [[1, 2, 3]]
    assert cache.allocate(request, 13) is table
    assert (table.block_ids, table.num_slots) == ([[1, 2, 3, 4]], 16)


def test_room_is_counted_from_the_computed_tokens(cache: KVCacheManager) -> None:
    request = Request("r", range(9))
    serve(cache, request)
    assert cache.num_blocks_needed(request, 3) == 0
    assert cache.num_blocks_needed(request, 4) == 1
    cache.allocate(request, 3)
    assert blocks_of(cache, request) == [1, 2, 3]
    cache.allocate(request, 4)
    assert blocks_of(cache, request) == [1, 2, 3, 4]


def test_hit_blocks_come_first_and_are_held(cache: KVCacheManager) -> None:
    ended(cache, Request("first", range(12)))
    request = Request("r", [*range(8), 50, 51, 52])
    hit = cache.match(request)
    assert cache.num_blocks_needed(request, 3, hit) == 3
    table = cache.allocate(request, 3, hit)
    assert table is not None
    assert (table.block_ids, table.num_computed, table.num_committed) == ([[1, 2, 4]], 8, 8)
    assert hit.block_ids == ([1, 2],), "the hit is not the table"
    assert cache.free_block_ids() == [5, 6, 7, 8, 9, 10, 11, 3]


def test_a_hit_in_a_live_request_costs_nothing(cache: KVCacheManager) -> None:
    serve(cache, Request("first", range(12)))
    request = Request("r", range(12))
    assert cache.num_blocks_needed(request, 4, cache.match(request)) == 1


def test_a_whole_prompt_may_be_taken_over_from_the_cache(cache: KVCacheManager) -> None:
    ended(cache, Request("first", range(8)))
    request = Request("r", range(8))
    table = cache.allocate(request, 0, cache.match(request, 8))
    assert table is not None
    assert (table.block_ids, table.num_computed, table.num_slots) == ([[1, 2]], 8, 8)


def test_an_allocation_never_evicts_its_own_hit() -> None:
    mirror = MirroredCache(4, 4)
    first, second = Request("first", range(12)), Request("second", [*range(8), 50])
    assert mirror.allocate(first, 12)
    mirror.commit(first, 12)
    mirror.free(first)
    hit = mirror.match(second)
    assert mirror.allocate(second, 1, hit)
    assert blocks_of(mirror.cache, second) == [1, 2, 3]


def test_a_shortage_changes_nothing() -> None:
    mirror = MirroredCache(6, 4)
    first, second = Request("first", range(8)), Request("second", range(8))
    assert mirror.allocate(first, 8)
    mirror.commit(first, 8)
    assert not mirror.allocate(first, 13)
    assert not mirror.allocate(second, 21)
    assert not mirror.allocate(second, 13, mirror.match(second, 8))
    assert mirror.cache.table(second) is None
    assert mirror.allocate(second, 12, mirror.match(second, 8))


# -- commit


def test_blocks_are_found_only_once_they_were_computed(cache: KVCacheManager) -> None:
    request, other = Request("r", range(10)), Request("other", range(10))
    cache.allocate(request, 10)
    assert cache.match(other).num_tokens == 0
    assert [cache.commit(request, count) for count in (3, 4, 7, 8, 10, 10)] == [0, 1, 0, 1, 0, 0]
    assert cache.match(other).num_tokens == 8
    assert cache.findable() == set(request.block_hashes(cache.hasher))


def test_an_aborted_request_leaves_only_what_it_computed(cache: KVCacheManager) -> None:
    request = Request("r", range(10))
    cache.allocate(request, 10)
    cache.commit(request, 5)
    cache.free(request)
    assert cache.match(Request("other", range(10))).num_tokens == 4
    assert cache.free_block_ids() == [3, 2, 4, 5, 6, 7, 8, 9, 10, 11, 1]


# -- step


def test_a_step_is_commit_append_and_allocate_for_each(cache: KVCacheManager) -> None:
    full, half = Request("full", range(8)), Request("half", range(50, 56))
    for request in (full, half):
        cache.allocate(request, request.num_tokens)
    result = cache.step([half, full], [7, 9])
    assert (result.grown, result.block_ids.tolist(), result.unserved) == ([full], [[5]], [])
    assert result.block_ids.dtype == np.int32
    assert (full.token_ids[-1], half.token_ids[-1]) == (9, 7)
    assert blocks_of(cache, full) == [1, 2, 5]
    assert blocks_of(cache, half) == [3, 4]
    tables = [cache.table(request) for request in (full, half)]
    assert [table.num_computed for table in tables if table] == [8, 6]
    cache.check()


def test_a_step_publishes_what_is_full_wherever_the_room_ends(cache: KVCacheManager) -> None:
    """A prompt of ten tokens: two full blocks can be found after the step, though the third is not full."""
    request = Request("r", range(10))
    cache.allocate(request, 10)
    cache.step([request], [10])
    assert cache.match(Request("other", range(10))).num_tokens == 8
    table = cache.table(request)
    assert table is not None
    assert table.num_committed == 8


def test_a_step_with_slots_to_spare_publishes_too(cache: KVCacheManager) -> None:
    request = Request("r", range(3))
    cache.allocate(request, 12)
    cache.step([request], [3])
    assert cache.findable() == set()
    result = cache.step([request], [4])
    assert (result.grown, result.block_ids.tolist()) == ([], [])
    assert cache.findable() == {request.block_hashes(cache.hasher)[0]}


def test_requests_without_room_are_named_and_computed_all_the_same() -> None:
    mirror = MirroredCache(5, 2)
    requests = [Request(str(n), [n, n]) for n in range(3)]
    for request in requests:
        assert mirror.allocate(request, 2)
    assert mirror.step(requests, [7, 8, 9]) == requests[1:]
    assert [request.token_ids for request in requests] == [[0, 0, 7], [1, 1, 8], [2, 2, 9]]
    assert len(mirror.cache.findable()) == 3
    mirror.free(requests[2])
    assert mirror.allocate(requests[1], 1)


def test_an_empty_step_does_nothing() -> None:
    assert MirroredCache(5, 2).step([], []) == []


# -- a batch that stays together


def joined(num_blocks: int, *requests: Request) -> MirroredCache:
    """A cache of blocks of 2 tokens whose batch has these requests, each with room for its prompt."""
    mirror = MirroredCache(num_blocks, 2)
    for request in requests:
        assert mirror.allocate(request, request.num_tokens)
        mirror.join(request)
    return mirror


def test_a_batch_steps_all_its_rows_and_publishes_as_blocks_fill() -> None:
    a, b = Request("a", [1, 1]), Request("b", [2, 2, 2])
    mirror = joined(12, a, b)
    result = mirror.cache.step(mirror.batch, [7, 8])
    assert (result.grown, result.block_ids.tolist(), result.unserved) == ([a], [[4]], [])
    assert result.block_ids.dtype == np.int32
    assert (a.token_ids, b.token_ids) == ([1, 1, 7], [2, 2, 2, 8])
    assert len(mirror.cache.findable()) == 2
    assert mirror.batch.num_tokens.tolist() == [3, 4]
    assert len(mirror.batch) == 2


def test_a_prompt_is_published_when_its_request_joins() -> None:
    request = Request("r", [1, 1, 1, 1, 1])
    mirror = joined(12, request)
    assert mirror.cache.findable() == set(request.block_hashes(mirror.cache.hasher))
    assert mirror.cache.usage().num_filled_slots == 4


def test_a_row_without_room_is_served_once_there_is_some() -> None:
    a, b, c = (Request(name, [n, n]) for n, name in enumerate("abc"))
    mirror = joined(5, a, b, c)
    assert mirror.step_batch([7, 8, 9]) == [b, c]
    mirror.refuse(lambda cache: cache.step(mirror.batch, [1, 1, 1]))
    assert mirror.serve() is False
    mirror.leave([c])
    assert mirror.serve() is False
    mirror.free(c)
    assert mirror.serve() is True
    assert mirror.step_batch([7, 8]) == []
    assert mirror.batch.requests == [a, b]


def test_a_request_may_join_without_room_for_its_last_token() -> None:
    request = Request("r", [1, 1])
    mirror = MirroredCache(3, 2)
    assert mirror.allocate(request, 2)
    request.append(7)
    mirror.join(request)
    assert mirror.batch.unserved == [request]
    assert mirror.serve() is True


def test_rows_keep_their_order_when_others_leave() -> None:
    requests = [Request(str(n), [n]) for n in range(4)]
    mirror = joined(12, *requests)
    mirror.leave([requests[2], requests[0]])
    assert mirror.batch.requests == [requests[1], requests[3]]
    mirror.step_batch([5, 6])
    mirror.join(requests[2])
    assert mirror.batch.requests == [requests[1], requests[3], requests[2]]
    assert [request.token_ids for request in requests] == [[0], [1, 5], [2], [3, 6]]


def test_what_was_computed_stays_computed_in_a_batch_and_after() -> None:
    """All four tokens were committed before the request joined: its blocks are full, and stay so."""
    mirror = MirroredCache(12, 2)
    request = Request("r", [1, 1, 1, 1])
    assert mirror.allocate(request, 4)
    mirror.commit(request, 4)
    mirror.join(request)
    assert mirror.cache.usage().num_filled_slots == 4
    mirror.leave([request])
    table = mirror.cache.table(request)
    assert table is not None
    assert (table.num_computed, table.num_committed) == (4, 4)


# -- free and clear


def test_blocks_come_back_tail_first_the_unfilled_one_in_front() -> None:
    cache = KVCacheManager(11, 16)
    ended(cache, Request("r", range(40)))
    assert cache.free_block_ids() == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]
    assert cache.num_live_requests == 0


def test_a_freed_request_may_come_back(cache: KVCacheManager) -> None:
    request = ended(cache, Request("r", range(10)))
    assert cache.table(request) is None
    assert serve(cache, request).num_tokens == 8


def test_an_id_is_free_again_after_its_request(cache: KVCacheManager) -> None:
    ended(cache, Request("r", range(10)))
    serve(cache, Request("r", range(50, 60)))
    assert cache.num_live_requests == 1


def test_clear_waits_until_nobody_holds_a_block() -> None:
    mirror = MirroredCache(12, 4)
    request = Request("r", range(10))
    assert mirror.allocate(request, 10)
    mirror.commit(request, 10)
    assert mirror.clear() is False
    assert mirror.match(Request("other", range(10))).num_tokens == 8
    mirror.free(request)
    assert mirror.clear() is True
    assert mirror.cache.findable() == set()


class SameNameTwice(Request):
    """Breaks the promise that names within a request differ."""

    def block_hashes(self, hasher: BlockHasher, next_block: bytes | None = None, /) -> list[bytes]:
        names = super().block_hashes(hasher, next_block)
        return [names[0]] * len(names)


def test_a_request_that_names_two_blocks_alike_loses_no_block() -> None:
    cache = KVCacheManager(8, 4)
    for name in ("a", "b", "c"):
        request = SameNameTwice(name, range(13))
        serve(cache, request)
        cache.check()
        cache.free(request)
        cache.check()
    assert cache.num_free_blocks == 7


def test_a_batch_of_another_cache_is_refused() -> None:
    one, other = KVCacheManager(8, 4), KVCacheManager(8, 4)
    request = Request("r", range(3))
    serve(one, request)
    batch = other.decode_batch()
    calls: list[Callable[[], object]] = [
        lambda: one.join(batch, request),
        lambda: one.step(batch, []),
        lambda: one.serve(batch),
        lambda: one.leave(batch, []),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="of another cache"):
            call()
    one.check()


def test_check_sees_a_request_that_grew_outside_its_batch() -> None:
    cache = KVCacheManager(8, 4)
    request = Request("r", range(3))
    serve(cache, request)
    batch = cache.decode_batch()
    cache.join(batch, request)
    cache.check()
    request.append(7)
    with pytest.raises(AssertionError, match="'r' grew by 1 tokens in a batch"):
        cache.check()


def test_tokens_of_a_step_may_be_an_array_and_stay_plain_numbers() -> None:
    cache = KVCacheManager(8, 4)
    request = Request("r", range(3))
    serve(cache, request)
    cache.step([request], np.array([5]))
    assert [type(token) for token in request.token_ids] == [int] * 4


def test_a_table_is_that_of_the_very_request() -> None:
    cache = KVCacheManager(8, 4)
    request = Request("r", range(3))
    serve(cache, request)
    assert cache.table(request) is not None
    assert cache.table(Request("r", range(3))) is None
