"""The verbs of a cache with several groups: all or nothing over all of them, windows that slide, loads that failed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool import (
    NULL_BLOCK,
    BlockTable,
    ChunkedLocal,
    CrossAttention,
    EncoderInput,
    FullAttention,
    Hit,
    KVCacheManager,
    LayerKind,
    Request,
    SlidingWindow,
    StateSpace,
    Usage,
    UsageError,
)
from kvpool.core.publication import Setting
from kvpool.testing import serve

FULL = FullAttention()


def make(*kinds: LayerKind, num_blocks: int = 100, **options: Any) -> KVCacheManager:
    return KVCacheManager(num_blocks, 4, kinds, **options)


def table_of(cache: KVCacheManager, request: Request) -> BlockTable:
    table = cache.table(request)
    assert table is not None
    return table


def shapes(cache: KVCacheManager, request: Request) -> list[str]:
    """Which places of each group's table have a block."""
    return ["".join("." if b == NULL_BLOCK else "x" for b in ids) for ids in table_of(cache, request).block_ids]


def compute(cache: KVCacheManager, request: Request, *stops: int) -> None:
    """Steps of a live or new request that end at these lengths."""
    for stop in stops:
        table = cache.table(request)
        assert cache.allocate(request, stop - (table.num_computed if table else 0)) is not None
        cache.commit(request, stop)
        cache.check()


def state(cache: KVCacheManager, *requests: Request) -> tuple[object, ...]:
    """All that can be seen of a cache and of these requests."""
    tables = [cache.table(request) for request in requests]
    each = [
        (t.block_ids, t.scratch_ids, t.num_slots, t.num_computed, t.num_committed, t.is_decoding)
        for table in tables
        for t in ([table] if table else [])
    ]
    names = [cache.findable(group.group_id) for group in cache.groups.all]
    counts = (cache.usage(), cache.num_evictions, cache.num_live_requests, repr(cache.stats))
    holders = [cache.holders(block) for block in range(cache.num_blocks)]
    return repr(each), cache.free_block_ids(), holders, names, counts, [request.num_tokens for request in requests]


@contextmanager
def nothing_changes(cache: KVCacheManager, *requests: Request) -> Iterator[None]:
    cache.take_events()
    before = state(cache, *requests)
    yield
    assert state(cache, *requests) == before
    assert cache.take_events() == []


def take_all_but(cache: KVCacheManager, count: int) -> None:
    """Somebody holds all free blocks but these."""
    pool: Any = cache._pool
    assert pool.allocate(cache.num_free_blocks - count) is not None


# -- all or nothing


@pytest.mark.parametrize("num_free", [0, 1, 2, 3, 4])
def test_a_request_grows_in_all_groups_or_in_none(num_free: int) -> None:
    """The next token needs a block of each of five groups."""
    cache = make(FULL, SlidingWindow(99), ChunkedLocal(400), StateSpace(), FULL)
    request = Request("r", range(9))
    compute(cache, request, 8)
    take_all_but(cache, num_free)
    with nothing_changes(cache, request):
        assert cache.num_blocks_needed(request, 1) == 5
        assert cache.allocate(request, 1) is None


@pytest.mark.parametrize("num_free", [7, 8, 10, 11])
def test_a_request_is_admitted_with_all_groups_or_not_at_all(num_free: int) -> None:
    """The hit idles in 3 + 2 + 1 blocks; new are one block of each group, one of scratch, and one for the encoder."""
    cache = make(FULL, SlidingWindow(6), StateSpace(num_scratch_blocks=1), CrossAttention(), publication="every")
    encoder = EncoderInput("sound", 4)
    first, second = Request("a", range(13), encoder_input=encoder), Request("b", range(16), encoder_input=encoder)
    compute(cache, first, 12, 13)
    cache.free(first)
    take_all_but(cache, num_free)
    hit = cache.match(second)
    assert (hit.num_tokens, cache.num_blocks_needed(second, 4, hit)) == (12, 11)
    if num_free == 11:
        assert cache.allocate(second, 4, hit) is not None
        assert cache.num_free_blocks == 0
    else:
        with nothing_changes(cache, second):
            assert cache.allocate(second, 4, hit) is None


def test_as_many_blocks_as_are_needed_are_enough() -> None:
    kinds: list[LayerKind] = [FULL, SlidingWindow(6), StateSpace(num_scratch_blocks=2), CrossAttention()]
    request = Request("r", range(30), encoder_input=EncoderInput("sound", 9))
    for num_usable, fits in ((8 + 8 + 1 + 2 + 3, True), (8 + 8 + 1 + 2 + 2, False)):
        cache = make(*kinds, num_blocks=num_usable + 1)
        assert cache.num_blocks_needed(request, 30) == 22
        assert (cache.allocate(request, 30) is not None) == fits
        assert cache.num_free_blocks == (0 if fits else num_usable)
        cache.check()


# -- windows


def test_a_window_lets_go_before_new_blocks_are_counted() -> None:
    """One block is missing, and the window gives up just that one."""
    cache = make(FULL, SlidingWindow(5))
    request = Request("r", range(30))
    compute(cache, request, 12)
    take_all_but(cache, 0)
    assert cache.num_free_blocks == 0
    assert cache.allocate(request, 1) is not None, "two blocks slid out of the window, two are needed"
    assert shapes(cache, request) == ["xxxx", "..xx"]


def test_what_slid_out_is_gone_even_where_there_is_no_room() -> None:
    """The window of 5 gives up one block and two are needed: it stays given up, all else is as before."""
    cache = make(FULL, SlidingWindow(5))
    request = Request("r", range(30))
    compute(cache, request, 7, 8)
    take_all_but(cache, 0)
    assert cache.allocate(request, 1) is None
    assert shapes(cache, request) == ["xx", ".x"]
    assert cache.num_free_blocks == 1
    with nothing_changes(cache, request):
        assert cache.allocate(request, 1) is None


def test_a_window_slides_on_computed_tokens_and_not_on_allocated_ones() -> None:
    """Room for 12 tokens ahead: as long as they are not computed, the step may still look at all of the window."""
    cache = make(SlidingWindow(5))
    request = Request("r", range(40))
    compute(cache, request, 8)
    cache.allocate(request, 12)
    assert shapes(cache, request) == [".xxxx"]
    cache.allocate(request, 20)
    assert shapes(cache, request) == [".xxxxxx"]
    cache.commit(request, 20)
    assert shapes(cache, request) == [".xxxxxx"], "the step that was computed may still be read"
    cache.allocate(request, 8)
    assert shapes(cache, request) == ["....xxx"]
    cache.check()


def test_tables_of_all_groups_are_equally_long_and_null_where_nothing_is_kept() -> None:
    cache = make(FULL, SlidingWindow(5), SlidingWindow(5, num_sinks=2), ChunkedLocal(8), StateSpace(), publication=0)
    request = Request("r", range(40))
    compute(cache, request, 10, 17, 23)
    cache.allocate(request, 1)
    assert shapes(cache, request) == ["xxxxxx", "....xx", "x...xx", "....xx", ".....x"]
    table = table_of(cache, request)
    assert table.num_slots == 24
    assert table.slot_mapping(0, 4, group_id=1).tolist() == [0, 1, 2, 3]
    cache.free(request)
    cache.check()
    assert cache.num_free_blocks == cache.num_usable_blocks


def test_blocks_that_slid_out_can_be_found_and_shared() -> None:
    cache = make(FULL, SlidingWindow(5), publication="every")
    first = Request("a", range(40))
    compute(cache, first, 12, 24)
    cache.allocate(first, 1)
    assert shapes(cache, first) == ["xxxxxxx", ".....xx"]
    second = Request("b", range(13))
    hit = serve(cache, second)
    assert hit.num_tokens == 12
    assert shapes(cache, second) == ["xxxx", "..xx"]
    compute(cache, first, 25)
    for request in (first, second):
        cache.free(request)
        cache.check()


def test_a_hit_skips_the_windows_and_so_does_what_comes_from_outside() -> None:
    cache = make(FULL, SlidingWindow(5), StateSpace())
    request = Request("r", range(40))
    assert cache.num_blocks_needed(request, 4, num_external_tokens=16) == 5 + 2 + 2
    table = cache.allocate(request, 4, num_external_tokens=16)
    assert table is not None
    assert shapes(cache, request) == ["xxxxx", "...xx", "...xx"]
    assert (table.num_computed, table.num_committed, table.num_slots) == (0, 0, 20)
    cache.check()


# -- room for drafted tokens


def test_drafts_get_room_behind_all_others_and_give_back_what_is_rejected() -> None:
    cache = make(FULL, SlidingWindow(99))
    request = Request("r", range(7))
    cache.allocate(request, 7, num_lookahead_tokens=6)
    table = table_of(cache, request)
    assert (shapes(cache, request), table.num_slots) == (["xxxx", "xxxx"], 16)
    cache.commit(request, 7)
    request.append(7)
    request.append(8)
    cache.commit(request, 8)
    cache.trim(request)
    assert (shapes(cache, request), table.num_slots) == (["xxx", "xxx"], 12)
    cache.trim(request)
    assert shapes(cache, request) == ["xxx", "xxx"]
    cache.allocate(request, 1, num_lookahead_tokens=3)
    assert shapes(cache, request) == ["xxx", "xxx"]
    assert cache.num_blocks_needed(request, 1, num_lookahead_tokens=4) == 2
    cache.allocate(request, 1, num_lookahead_tokens=4)
    assert shapes(cache, request) == ["xxxx", "xxxx"]
    cache.check()


def test_room_for_drafts_is_all_or_nothing_too() -> None:
    cache = make(FULL, SlidingWindow(99), num_blocks=8)
    request = Request("r", range(7))
    compute(cache, request, 7)
    with nothing_changes(cache, request):
        assert cache.allocate(request, 1, num_lookahead_tokens=8) is None
    assert cache.allocate(request, 1, num_lookahead_tokens=4) is not None


def test_trimmed_blocks_come_back_tail_first_and_empty() -> None:
    cache = make(FULL, num_blocks=10)
    request = Request("r", range(3))
    cache.allocate(request, 3, num_lookahead_tokens=13)
    cache.commit(request, 3)
    cache.trim(request)
    assert table_of(cache, request).block_ids == [[1]]
    assert cache.free_block_ids() == [4, 3, 2, 5, 6, 7, 8, 9]


def test_room_that_was_trimmed_is_given_again() -> None:
    cache = make(FULL, SlidingWindow(5), StateSpace())
    request = Request("r", range(8))
    cache.allocate(request, 8, num_lookahead_tokens=9)
    cache.commit(request, 8)
    cache.trim(request)
    request.append(8)
    compute(cache, request, 9)
    assert table_of(cache, request).num_slots == 12
    cache.free(request)
    cache.check()


# -- tokens from outside


def test_tokens_from_outside_are_computed_when_they_are_committed() -> None:
    cache = make(FULL)
    request = Request("r", range(20))
    first = Request("first", range(9))
    serve(cache, first)
    hit = cache.match(request)
    table = cache.allocate(request, 4, hit, num_external_tokens=8)
    assert table is not None
    assert (table.num_computed, table.num_committed, table.num_slots) == (8, 8, 20)
    assert cache.match(Request("other", range(20))).num_tokens == 8
    assert cache.commit(request, 12) == 1, "a part of them has come"
    assert cache.match(Request("other", range(20))).num_tokens == 12
    assert cache.commit(request, 20) == 2
    assert cache.stats.num_hit_tokens == 8, "they are no hit"
    cache.check()


def test_a_request_may_wait_for_what_comes_from_outside_alone() -> None:
    cache = make(FULL, SlidingWindow(5))
    request = Request("r", range(20))
    table = cache.allocate(request, 0, num_external_tokens=16)
    assert table is not None
    assert (shapes(cache, request), table.num_slots) == (["xxxx", "...x"], 16)
    cache.commit(request, 16)
    compute(cache, request, 20)
    assert cache.match(Request("other", range(17))).num_tokens == 16


@pytest.mark.parametrize("num_computed", [0, 4, 12, 15])
def test_where_windows_skip_blocks_a_part_of_what_comes_from_outside_is_refused(num_computed: int) -> None:
    cache = make(FULL, SlidingWindow(5))
    request = Request("r", range(20))
    cache.allocate(request, 4, num_external_tokens=16)
    refused = pytest.raises(UsageError, match=f"'r': {num_computed} tokens committed, 16 with those from outside")
    with nothing_changes(cache, request), refused:
        cache.commit(request, num_computed)
    cache.commit(request, 16)
    cache.commit(request, 20)
    cache.check()


@pytest.mark.parametrize(("external", "ahead"), [(-1, 0), (0, -1), (4, 0)])
def test_misuse_of_outside_tokens_and_drafts_changes_nothing(external: int, ahead: int) -> None:
    cache = make(FULL, SlidingWindow(5))
    live, new = Request("live", range(9)), Request("new", range(9))
    compute(cache, live, 9)
    for request in (live, new) if min(external, ahead) < 0 else (live,):
        with nothing_changes(cache, live), pytest.raises(UsageError, match=f"'{request.request_id}'"):
            cache.allocate(request, 1, num_external_tokens=external, num_lookahead_tokens=ahead)


# -- content that turns out bad


def load(cache: KVCacheManager, request: Request, num_tokens: int) -> BlockTable:
    table = cache.allocate(request, 0, num_external_tokens=num_tokens)
    assert table is not None
    cache.commit(request, num_tokens)
    return table


def test_every_sharer_of_a_bad_block_is_cut_back_and_nothing_of_it_is_found() -> None:
    """R1 holds blocks 1 2 3, R2 holds 1 2 4, and 2 is bad."""
    cache = make(FULL)
    r1, r2 = Request("R1", range(12)), Request("R2", [*range(8), *range(50, 54)])
    load(cache, r1, 12)
    serve(cache, r2)
    assert [table_of(cache, request).block_ids for request in (r1, r2)] == [[[1, 2, 3]], [[1, 2, 4]]]
    assert cache.invalidate([2]) == {"R1": 4, "R2": 4}
    for request in (r1, r2):
        table = table_of(cache, request)
        assert (table.block_ids, table.num_computed, table.num_committed, table.num_slots) == ([[1]], 4, 4, 4)
    assert cache.findable() == {r1.block_hashes(cache.hasher)[0]}
    assert [cache.holders(block) for block in (1, 2, 3, 4)] == [2, 0, 0, 0]
    assert cache.usage().num_cached == 0
    cache.check()
    for request in (r1, r2):
        compute(cache, request, 12)
    assert cache.match(Request("R3", range(13))).num_tokens == 12


def test_a_request_without_the_bad_block_goes_on() -> None:
    cache = make(FULL)
    loaded, other = Request("loaded", range(12)), Request("other", [*range(4), *range(50, 58)])
    load(cache, loaded, 12)
    serve(cache, other)
    before = table_of(cache, other).block_ids[0][:]
    assert cache.invalidate([3]) == {"loaded": 8}
    table = table_of(cache, other)
    assert (table.block_ids, table.num_computed) == ([before], 12)
    assert cache.match(Request("again", other.token_ids), 12).num_tokens == 12
    cache.check()


def test_what_requests_left_behind_that_had_the_bad_block_is_withdrawn() -> None:
    cache = make(FULL)
    gone, live = Request("gone", range(16)), Request("live", [*range(8), *range(50, 58)])
    load(cache, gone, 12)
    serve(cache, live)
    compute(cache, gone, 16)
    cache.free(gone)
    assert cache.match(gone, 16).num_tokens == 16
    assert cache.invalidate([2]) == {"live": 4}
    assert cache.match(gone, 16).num_tokens == 4
    assert cache.invalidate([1]) == {"live": 0}
    assert cache.findable() == set()
    assert table_of(cache, live).block_ids == [[]]
    cache.check()
    compute(cache, live, 16)


def test_bad_blocks_of_nobody_are_withdrawn_and_go_first() -> None:
    cache = make(FULL, num_blocks=8)
    request = Request("r", range(12))
    serve(cache, request)
    cache.free(request)
    assert cache.invalidate([2, NULL_BLOCK]) == {}
    assert cache.free_block_ids() == [2, 3, 4, 5, 6, 7, 1]
    assert cache.match(request).num_tokens == 4
    cache.check()


def test_bad_blocks_may_come_before_their_load_was_committed() -> None:
    cache = make(FULL, SlidingWindow(5))
    request = Request("r", range(20))
    table = cache.allocate(request, 4, num_external_tokens=16)
    assert table is not None
    assert cache.invalidate([table.block_ids[0][1]]) == {"r": 0}
    assert (table.block_ids, table.num_computed, table.num_slots) == ([[], []], 0, 0)
    cache.check()
    compute(cache, request, 20)


def test_windows_go_back_to_where_they_still_have_all() -> None:
    """The full group is bad from 20 on. At 20 the window of 9 needs blocks 3 and 4, at 16 blocks 2 and 3."""
    cache = make(FULL, SlidingWindow(9))
    request = Request("r", range(40))
    compute(cache, request, 12, 16, 24)
    assert shapes(cache, request) == ["xxxxxx", "..xxxx"]
    table = table_of(cache, request)
    assert cache.invalidate([table.block_ids[0][5]]) == {"r": 20}
    assert (shapes(cache, request), table.num_computed, table.num_slots) == (["xxxxx", "..xxx"], 20, 20)
    assert cache.invalidate([table.block_ids[1][3]]) == {"r": 0}
    assert (shapes(cache, request), table.num_computed) == (["", ""], 0)
    cache.check()


def test_a_bad_block_of_one_group_counts_for_all() -> None:
    cache = make(FULL, SlidingWindow(99), FullAttention(8))
    first, second = Request("a", range(24)), Request("b", range(50, 74))
    for request in (first, second):
        cache.allocate(request, 24)
        cache.commit(request, 24)
    bad = table_of(cache, first).block_ids[1][3]
    assert cache.invalidate([bad]) == {"a": 8}
    assert [len(ids) for ids in table_of(cache, first).block_ids] == [2, 2, 1]
    assert table_of(cache, second).num_computed == 24
    chain = first.block_hashes(cache.hasher)
    for group in cache.groups.all:
        num_good = 12 // group.block_size  # Whole blocks before the bad one are good, and nobody can hit them alone.
        assert set(group.names(chain, 0, num_good)) <= cache.findable(group.group_id)
        assert not set(group.names(chain, num_good, 9)) & cache.findable(group.group_id)
    assert cache.match(first).num_tokens == 8
    cache.check()


@pytest.mark.parametrize(("stops", "num_good"), [([8, 11], 8), ([7, 11], 0), ([8, 12, 14], 0)])
def test_a_state_is_trusted_only_at_a_border_where_it_was_kept(stops: list[int], num_good: int) -> None:
    """The full group's third block is bad. The state's second block is that at 8, that at 7, or let go of."""
    cache = make(FULL, StateSpace(4), publication=0)
    request = Request("r", range(30))
    compute(cache, request, *stops)
    table = table_of(cache, request)
    assert cache.invalidate([table.block_ids[0][2]]) == {"r": num_good}
    assert (table.num_computed, shapes(cache, request)) == (num_good, ["xx", ".x"] if num_good else ["", ""])
    cache.check()


def test_a_bad_block_of_the_encoder_takes_everything() -> None:
    cache = make(FULL, CrossAttention())
    request = Request("r", range(12), encoder_input=EncoderInput("sound", 6))
    compute(cache, request, 12)
    table = table_of(cache, request)
    encoder = table.block_ids[1][:]
    assert cache.invalidate([encoder[1]]) == {"r": 0}
    assert (table.block_ids, cache.findable()) == ([[], encoder], set())
    cache.check()
    compute(cache, request, 12)


def test_members_of_a_batch_leave_it_and_the_others_decode_on() -> None:
    cache = make(FULL, SlidingWindow(99))
    requests = [Request(name, range(start, start + 9)) for name, start in (("a", 0), ("b", 50), ("c", 100))]
    batch = cache.decode_batch()
    for request in requests:
        compute(cache, request, 9)
        request.append(7)
        cache.join(batch, request)
    assert cache.step(batch, [1, 2, 3]).unserved == []
    bad = table_of(cache, requests[1]).block_ids[0][1]
    assert cache.invalidate([bad]) == {"b": 4}
    assert batch.requests == [requests[0], requests[2]]
    table = table_of(cache, requests[1])
    assert (table.is_decoding, table.num_computed, table.num_slots) == (False, 4, 4)
    assert cache.step(batch, [4, 5]).unserved == []
    compute(cache, requests[1], 11)
    cache.check()


@pytest.mark.parametrize("bad", [[-1], [100], [1, 2, 1_000], [99, -5]], ids=str)
def test_blocks_of_another_pool_are_refused(bad: list[int]) -> None:
    cache = make(FULL)
    request = Request("r", range(12))
    compute(cache, request, 12)
    refused = pytest.raises(UsageError, match=r"are not of this pool: it has 1 \.\. 99")
    with nothing_changes(cache, request), refused:
        cache.invalidate(bad)


def test_a_sharer_of_good_content_keeps_its_blocks_where_another_is_cut_back_further() -> None:
    """The first request lost its own window and starts anew. The second shared the prefix, and none of it was bad."""
    cache = make(FULL, SlidingWindow(4))
    first, second = Request("a", range(40)), Request("b", range(13))
    compute(cache, first, 13)
    assert serve(cache, second).num_tokens == 12
    compute(cache, first, 16, 20, 24)
    assert cache.invalidate([table_of(cache, first).block_ids[1][4]]) == {"a": 0}
    table = table_of(cache, second)
    assert (table.num_computed, shapes(cache, second)) == (13, ["xxxx", "..xx"])
    cache.check()
    compute(cache, first, 24)


def test_what_follows_a_gap_in_a_layout_of_windows_is_withdrawn_with_it() -> None:
    """Only the tails at 12 and 24 are published. The content at 24 was computed on top of that at 12."""
    cache = make(SlidingWindow(5), publication=12)
    request = Request("r", range(50))
    compute(cache, request, *range(4, 49, 4))
    cache.free(request)
    hit = cache.match(request, 12)
    assert (hit.num_tokens, cache.match(request, 24).num_tokens) == (12, 24)
    cache.invalidate(hit.block_ids[0])
    assert [cache.match(request, limit).num_tokens for limit in (12, 24)] == [0, 0]


def test_a_bad_large_block_takes_the_small_ones_within_it() -> None:
    """Tokens 0 .. 7 are one block of the full group and two of the window; who computed them has gone."""
    cache = make(FullAttention(8), SlidingWindow(16), publication="every")
    request = Request("r", range(17))
    compute(cache, request, 17)
    bad = table_of(cache, request).block_ids[0][0]
    cache.free(request)
    cache.invalidate([bad])
    assert [cache.findable(group) for group in (0, 1)] == [set(), set()]


def test_a_bad_large_block_takes_those_who_share_its_first_tokens_alone() -> None:
    """They went on from a small block of who had it, which slid out of their window and is something else by now."""
    cache = make(FullAttention(8), SlidingWindow(6), publication="every")
    first, second, third = Request("first", range(9)), *(Request(r, [*range(4), *range(90, 99)]) for r in "ab")
    compute(cache, first, 9)
    bad, shared = (table_of(cache, first).block_ids[group][0] for group in (0, 1))
    cache.free(first)
    compute(cache, second, 9)
    cache.free(second)
    for request in third, Request("fourth", range(13)):
        hit = cache.match(request)
        assert (hit.num_tokens, hit.block_ids[1][0]) == (8, shared)
        assert cache.allocate(request, 4, hit)
        cache.commit(request, 12)
        assert cache.allocate(request, 1)
    cache.free(request)
    other = Request("other", range(1000, 2000))
    while cache._pool.name(shared) is not None:
        compute(cache, other, (table_of(cache, other).num_computed if cache.table(other) else 0) + 4)
    assert cache._pool.name(bad) is not None
    assert cache.invalidate([bad]) == {"b": 0}


# -- hits that are not what a match gave, and commits that end inside a step


HIT_LAYOUT: list[LayerKind] = [FULL, SlidingWindow(6, num_sinks=5), StateSpace()]


def hit_of_24() -> tuple[KVCacheManager, Request, Hit]:
    """A cache in which a request of 30 tokens hits 24 of them."""
    cache = make(*HIT_LAYOUT)
    first, request = Request("first", range(30)), Request("r", range(30))
    compute(cache, first, 24, 30)
    cache.free(first)
    hit = cache.match(request, 27)
    assert hit.num_tokens == 24
    assert ["".join("x" if block else "." for block in ids) for ids in hit.block_ids] == ["xxxxxx", "xx..xx", ".....x"]
    return cache, request, hit


@pytest.mark.parametrize(("group", "at"), [*((0, at) for at in range(6)), (1, 0), (1, 1), (1, 4), (1, 5), (2, 5)])
def test_a_hit_with_a_null_block_where_one_is_needed_is_refused(group: int, at: int) -> None:
    cache, request, hit = hit_of_24()
    hit.block_ids[group][at] = NULL_BLOCK
    with nothing_changes(cache, request), pytest.raises(UsageError, match="'r': the hit is stale or of another"):
        cache.allocate(request, 6, hit)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_hit_with_a_table_too_long_or_too_short_is_refused(group: int) -> None:
    for ahead, cut in (([], 5), ([], 0), ([NULL_BLOCK], 6), ([NULL_BLOCK], 5)):
        cache, request, hit = hit_of_24()
        ids = hit.block_ids[group]
        ids[:] = [*ahead, *ids[:cut]]
        with nothing_changes(cache, request), pytest.raises(UsageError, match="'r': the hit is stale or of another"):
            cache.allocate(request, 6, hit)


def test_a_hit_of_other_groups_is_refused() -> None:
    cache, request, hit = hit_of_24()
    full, window, state = hit.block_ids
    for ids in ((full, window), (full, window, state, full), (window, full, state), (full, full, state), ()):
        with nothing_changes(cache, request), pytest.raises(UsageError, match="'r': the hit is stale or of another"):
            cache.allocate(request, 6, hit._replace(block_ids=ids))
    assert cache.allocate(request, 6, hit) is not None


@pytest.mark.parametrize(
    ("kinds", "num_tokens"),
    [
        *(([FULL], number) for number in (-4, 0, 8, 18, 100)),
        *(([FULL, SlidingWindow(6)], number) for number in (-4, 0, 8, 18, 100)),
    ],
    ids=str,
)
def test_a_hit_of_more_or_fewer_tokens_than_its_blocks_hold_is_refused(kinds: list[LayerKind], num_tokens: int) -> None:
    cache = make(*kinds)
    first, request = Request("first", range(17)), Request("r", range(17))
    compute(cache, first, 17)
    cache.free(first)
    hit = cache.match(request)._replace(num_tokens=num_tokens)
    with nothing_changes(cache, request), pytest.raises(UsageError):
        cache.allocate(request, 1, hit)


@pytest.mark.parametrize("publication", ["ranked", "every", 0])
@pytest.mark.parametrize("kinds", [[StateSpace()], [FULL, StateSpace()], [FULL, StateSpace(8)]], ids=str)
def test_a_commit_that_ends_inside_a_step_is_refused_where_there_are_states(
    kinds: list[LayerKind], publication: Setting
) -> None:
    """A step from 5 to 18 leaves states in the blocks of token 4, where it began, and of token 17, where it ends."""
    cache = make(*kinds, publication=publication)
    request = Request("r", range(30))
    compute(cache, request, 5)
    cache.allocate(request, 13)
    for num_computed in (9, 12, 13, 16):
        refused = pytest.raises(UsageError, match=f"'r': {num_computed} tokens committed, and no state was kept there")
        with nothing_changes(cache, request), refused:
            cache.commit(request, num_computed)
    cache.commit(request, 5)
    cache.commit(request, 18)
    compute(cache, request, 30)


@pytest.mark.parametrize("num_computed", [5, 8, 11, 17])
def test_windows_and_full_groups_may_commit_less_than_was_allocated(num_computed: int) -> None:
    cache = make(FULL, SlidingWindow(6), ChunkedLocal(8))
    request = Request("r", range(30))
    cache.allocate(request, 18)
    cache.commit(request, num_computed)
    compute(cache, request, 30)


# -- states and encoders


def test_scratch_blocks_are_held_for_life() -> None:
    cache = make(FULL, StateSpace(num_scratch_blocks=2), StateSpace(num_scratch_blocks=1))
    request = Request("r", range(9))
    compute(cache, request, 9)
    table = table_of(cache, request)
    scratch = table.scratch_ids[:]
    assert len(set(scratch)) == 3
    assert not set(scratch) & {block for ids in table.block_ids for block in ids}
    assert [cache.holders(block) for block in scratch] == [1, 1, 1]
    for length in range(10, 30):
        request.append(length)
        compute(cache, request, length)
    assert table.scratch_ids == scratch
    cache.free(request)
    assert cache.num_free_blocks == cache.num_usable_blocks
    cache.check()


def test_the_encoder_s_blocks_are_taken_at_once_and_stay_as_they_are() -> None:
    cache = make(FULL, CrossAttention(8), publication="every")
    request = Request("r", range(9), encoder_input=EncoderInput("sound", 20))
    cache.allocate(request, 2)
    assert shapes(cache, request) == ["x", "xxx"]
    table = table_of(cache, request)
    encoder = table.block_ids[1][:]
    assert table.slot_mapping(0, 20, group_id=1).tolist()[-1] == encoder[2] * 8 + 3
    assert table.num_slots == 4, "the decoder's"
    cache.commit(request, 2)
    compute(cache, request, 9)
    for length in range(10, 40):
        request.append(length)
        compute(cache, request, length)
    assert table.block_ids[1] == encoder
    assert cache.findable(1) == set()
    cache.free(request)
    cache.check()
    assert cache.num_free_blocks == cache.num_usable_blocks


def test_a_request_without_an_encoder_has_no_blocks_there() -> None:
    cache = make(FULL, CrossAttention())
    request = Request("r", range(9))
    compute(cache, request, 9)
    assert shapes(cache, request) == ["xxx", ""]


# -- steps


LAYOUT: list[LayerKind] = [FULL, SlidingWindow(6), SlidingWindow(9)]


def pair(*kinds: LayerKind, num_blocks: int = 200, lengths: Sequence[int] = (3, 8, 11, 17), **options: Any) -> Any:
    """Two equal caches with equal requests that have computed all but their last token."""
    caches = [make(*kinds, num_blocks=num_blocks, **options) for _ in range(2)]
    requests = [[Request(str(n), range(50 * n, 50 * n + n)) for n in lengths] for _ in caches]
    for cache, own in zip(caches, requests, strict=True):
        for request in own:
            compute(cache, request, request.num_tokens)
            request.append(5)
            cache.allocate(request, 1)
    return caches, requests


LAYOUTS: list[list[LayerKind]] = [
    LAYOUT,
    [FULL, *[SlidingWindow(6)] * 5],
    [FULL, StateSpace()],
    [SlidingWindow(6)],
    [FullAttention(8), SlidingWindow(6), ChunkedLocal(16)],
    [ChunkedLocal(8), FULL, SlidingWindow(7, num_sinks=6)],
    [StateSpace(block_size=8), SlidingWindow(3, block_size=12), StateSpace(0, num_scratch_blocks=1)],
    [FULL, ChunkedLocal(24)],
    [FULL, CrossAttention(), SlidingWindow(6)],
    [FULL],
]


def told(cache: KVCacheManager) -> Counter[object]:
    """What events say, in no order: a batch tells of one group after another."""
    return Counter(cache.take_events())


@pytest.mark.parametrize("publication", ["ranked", "every", 0, 24])
@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_a_step_of_a_batch_is_the_same_as_calls_for_each(kinds: Sequence[LayerKind], publication: Setting) -> None:
    (batched, single), (in_batch, alone) = pair(*kinds, publication=publication)
    batch = batched.decode_batch()
    for request in in_batch:
        batched.join(batch, request)
    for step in range(40):
        result = batched.step(batch, [step] * 4)
        assert result.unserved == []
        before = [[list(ids) for ids in table_of(single, request).block_ids] for request in alone]
        for request in alone:
            single.commit(request, request.num_tokens)
            request.append(step)
        for request in alone:
            assert single.allocate(request, 1) is not None
        rows = {request.request_id: row for request, row in zip(result.grown, result.block_ids.tolist(), strict=True)}
        assert result.block_ids.shape == (len(result.grown), len(kinds))
        for one, other, held in zip(in_batch, alone, before, strict=True):
            own, expected = table_of(batched, one).block_ids, table_of(single, other).block_ids
            assert own == expected
            new = [ids[len(old) :] for ids, old in zip(expected, held, strict=True)]
            assert rows.get(one.request_id, [NULL_BLOCK] * len(kinds)) == [ids[-1] if ids else 0 for ids in new]
        assert batched.free_block_ids() == single.free_block_ids()
        for group in range(len(kinds)):
            assert batched.findable(group) == single.findable(group)
        assert told(batched) == told(single)
        batched.check()
    batched.leave(batch, in_batch)
    for cache, own in ((batched, in_batch), (single, alone)):
        for request in own:
            cache.free(request)
        cache.check()
    assert batched.free_block_ids() == single.free_block_ids()


@pytest.mark.parametrize("publication", ["ranked", 0])
@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_a_step_without_room_for_all_is_the_same_as_calls_for_each(
    kinds: Sequence[LayerKind], publication: Setting
) -> None:
    """Whoever finds no room is unserved; the last request goes, and the others are asked for once more, in order."""
    (batched, single), (in_batch, alone) = pair(
        *kinds, num_blocks=200, publication=publication, lengths=(3, 8, 11, 17, 4, 9)
    )
    batch = batched.decode_batch()
    for request in in_batch:
        batched.join(batch, request)
    for cache in (batched, single):
        take_all_but(cache, 2 * len(kinds))
    num_unserved, token = 0, 0
    while in_batch:
        token += 1
        unserved = batched.step(batch, [token] * len(in_batch)).unserved
        for request in alone:
            single.commit(request, request.num_tokens)
            request.append(token)
        lacking = [request for request in alone if single.allocate(request, 1) is None]
        while lacking:
            num_unserved += len(lacking)
            assert [request.request_id for request in unserved] == [request.request_id for request in lacking]
            assert batched.free_block_ids() == single.free_block_ids()
            batched.leave(batch, [in_batch[-1]])
            batched.free(in_batch.pop())
            single.free(alone[-1])
            lacking = [request for request in lacking if request is not alone[-1] and not single.allocate(request, 1)]
            alone.pop()
            assert batched.serve(batch) is not bool(lacking)
            unserved = batch.unserved
        for one, other in zip(in_batch, alone, strict=True):
            assert table_of(batched, one).block_ids == table_of(single, other).block_ids
        if token == 60 or not in_batch:
            break
    assert num_unserved or all(group.is_windowed for group in batched.groups.all)
    assert batched.free_block_ids() == single.free_block_ids()
    for group in range(len(kinds)):
        assert batched.findable(group) == single.findable(group)
    pool: Any = batched._pool
    pool.check()


def test_a_step_of_a_list_is_the_same_too() -> None:
    (listed, single), (in_list, alone) = pair(*LAYOUT)
    for step in range(20):
        assert listed.step(in_list, [step] * 4).unserved == []
        for request in alone:
            single.commit(request, request.num_tokens)
            request.append(step)
        for request in alone:
            assert single.allocate(request, 1) is not None
        for one, other in zip(in_list, alone, strict=True):
            assert table_of(listed, one).block_ids == table_of(single, other).block_ids
        assert listed.free_block_ids() == single.free_block_ids()
        listed.check()


def test_a_step_serves_in_order_as_far_as_all_groups_have_room() -> None:
    """Three requests need a block of each of three groups; four are there, so one request is served."""
    cache = make(*LAYOUT)
    requests = [Request(name, range(start, start + 4)) for name, start in (("a", 0), ("b", 50), ("c", 100))]
    batch = cache.decode_batch()
    for request in requests:
        cache.allocate(request, 4)
        cache.join(batch, request)
    take_all_but(cache, 4)
    result = cache.step(batch, [1, 2, 3])
    assert (result.grown, result.unserved) == (requests[:1], requests[1:])
    assert result.block_ids.shape == (1, 3)
    assert cache.serve(batch) is False
    assert [shapes(cache, request) for request in requests] == [["xx"] * 3, ["x"] * 3, ["x"] * 3]
    assert cache.num_free_blocks == 1
    cache.leave(batch, requests[2:])
    cache.free(requests[2])
    assert cache.serve(batch) is True
    assert batch.unserved == []


# -- gauges


def test_gauges_count_every_group_and_no_null_block() -> None:
    """23 of 24 slots are filled in the full group and 7 of 8 in the window; a state fills its block."""
    cache = make(FULL, SlidingWindow(5), StateSpace(), publication=0, num_blocks=21)
    request = Request("r", range(40))
    compute(cache, request, 10, 17, 23)
    cache.allocate(request, 1)
    assert shapes(cache, request) == ["xxxxxx", "....xx", ".....x"]
    num_cached = cache.usage().num_cached
    assert cache.usage() == Usage(20, 9, num_cached, 11 - num_cached, 23 + 7 + 4, 36)
    cache.check()


def test_gauges_where_block_sizes_differ() -> None:
    cache = make(FULL, FullAttention(8), CrossAttention(16), num_blocks=21)
    request = Request("r", range(11), encoder_input=EncoderInput("sound", 20))
    cache.allocate(request, 11)
    cache.commit(request, 9)
    usage = cache.usage()
    assert (usage.num_held, usage.num_held_slots, usage.num_filled_slots) == (7, 12 + 16 + 32, 9 + 9 + 20)
