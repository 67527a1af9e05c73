"""Which blocks of windows and states get a name, under every setting; where steps should end; and what events tell."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool import (
    BlockHash,
    BlockStored,
    ChunkedLocal,
    FullAttention,
    Hit,
    KVCacheManager,
    LayerKind,
    Request,
    SlidingWindow,
    StateSpace,
)
from kvpool.core.publication import DEFAULT_PUBLICATION, Setting
from kvpool.testing import golden_adapter, serve

FULL = FullAttention()


def make(*kinds: LayerKind, publication: Setting, **options: Any) -> KVCacheManager:
    return KVCacheManager(200, 4, kinds, publication=publication, **options)


def published(cache: KVCacheManager, request: Request, group_id: int) -> list[int]:
    """Which blocks of the request can be found in the group."""
    group = cache.groups.all[group_id]
    chain = request.block_hashes(cache.hasher)
    names = group.names(chain, 0, len(chain) // group.scale)
    return [at for at, name in enumerate(names) if name in cache.findable(group_id)]


def compute(cache: KVCacheManager, request: Request, *stops: int) -> None:
    """Steps that end at these lengths; the first begins with what can be hit."""
    for stop in stops:
        table = cache.table(request)
        hit = cache.match(request) if table is None else None
        start = table.num_computed if table is not None else hit.num_tokens if hit else 0
        assert cache.allocate(request, stop - start, hit) is not None
        cache.commit(request, stop)
    cache.check()


def decode(cache: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Tokens one by one, all of them computed, until there are so many."""
    while request.num_tokens < num_tokens:
        request.append(request.num_tokens)
        compute(cache, request, request.num_tokens)


# -- windows


@pytest.mark.parametrize(
    ("publication", "blocks"),
    [
        ("every", [0, 1, 2, 3, 4, 5, 6]),
        ("dense", [0, 1, 2, 3, 4, 5, 6]),
        (0, [5, 6]),
        ("ranked", [0, 1, 2, 3, 4, 5, 6]),
        (8, [0, 1, 2, 3, 4, 5, 6]),
        (12, [1, 2, 4, 5, 6]),
        (16, [2, 3, 5, 6]),
        (40, [5, 6]),
    ],
)
def test_a_window_publishes_the_tails_of_chosen_lengths(publication: Setting, blocks: list[int]) -> None:
    """A window of 6 needs two blocks. The replay boundary of 31 tokens is 28, the end of block 6."""
    cache = make(FULL, SlidingWindow(6), publication=publication)
    request = Request("r", range(31))
    compute(cache, request, 31)
    assert published(cache, request, 0) == [0, 1, 2, 3, 4, 5, 6]
    assert published(cache, request, 1) == blocks
    assert cache.match(Request("again", range(31))).num_tokens == 28


@pytest.mark.parametrize("publication", ["every", "dense", 0, 8, 12, 16, 40])
@pytest.mark.parametrize("chunk", [1, 3, 8, 31])
def test_chunks_do_not_change_what_is_published(publication: Setting, chunk: int) -> None:
    caches = [make(FULL, SlidingWindow(6), ChunkedLocal(16), publication=publication) for _ in range(2)]
    for cache, stops in zip(caches, ([31], [*range(chunk, 31, chunk), 31]), strict=True):
        compute(cache, Request("r", range(31)), *stops)
    for group in range(3):
        assert caches[0].findable(group) == caches[1].findable(group)


@pytest.mark.parametrize(
    ("publication", "window", "blocks"),
    [
        ("dense", 1, []),
        ("dense", 2, [0, 1, 2, 3, 4, 5]),
        (8, 1, []),
        (8, 2, [1, 3, 5]),
        (8, 5, [1, 3, 5]),
        (8, 6, [0, 1, 2, 3, 4, 5]),
        (8, 9, [0, 1, 2, 3, 4, 5]),
        (16, 8, [2, 3, 4, 5]),
        (0, 100, [0, 1, 2, 3, 4, 5]),
        (0, 17, [2, 3, 4, 5]),
        (0, 18, [1, 2, 3, 4, 5]),
    ],
)
def test_a_tail_is_what_a_hit_of_that_length_needs(publication: Setting, window: int, blocks: list[int]) -> None:
    """25 tokens: six full blocks, and a replay boundary behind the last."""
    cache = make(FULL, SlidingWindow(window), publication=publication)
    request = Request("r", range(25))
    compute(cache, request, 25)
    assert published(cache, request, 1) == blocks
    assert cache.match(Request("again", range(25))).num_tokens == 24


def test_sinks_are_published_whatever_the_setting() -> None:
    for publication in ("ranked", "every", "dense", 0, 16):
        cache = make(FULL, SlidingWindow(6, num_sinks=5), publication=publication)
        request = Request("r", range(31))
        compute(cache, request, 31)
        assert {0, 1, 5, 6} <= set(published(cache, request, 1))
        assert cache.match(Request("again", range(31))).num_tokens == 28


@pytest.mark.parametrize(("publication", "blocks"), [("every", [0, 1, 2, 3, 4, 5, 6]), (0, [4, 5, 6]), (16, [4, 5, 6])])
def test_chunked_layers_publish_what_of_the_chunk_is_before_a_boundary(publication: Setting, blocks: list[int]) -> None:
    """Chunks of 16: at 28 the current one began with block 4, at 16 and 32 nothing is needed."""
    cache = make(FULL, ChunkedLocal(16), publication=publication)
    request = Request("r", range(31))
    compute(cache, request, 31)
    assert published(cache, request, 1) == blocks


def test_the_block_that_a_draft_model_drops_is_published_with_the_window_before_it() -> None:
    cache = make(FULL, SlidingWindow(6), publication=0, drop_last_block=True)
    request = Request("r", range(31))
    compute(cache, request, 31)
    assert published(cache, request, 1) == [4, 5, 6]
    assert cache.match(Request("again", range(31))).num_tokens == 24


# -- boundaries


@pytest.mark.parametrize(("num_prompt", "replay"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_replay_boundary_is_the_longest_hit_that_the_same_prompt_could_have(num_prompt: int, replay: int) -> None:
    cache = make(FULL, SlidingWindow(2), publication=0)
    request = Request("r", range(num_prompt))
    compute(cache, request, num_prompt)
    assert published(cache, request, 1) == ([replay // 4 - 1] if replay else [])
    assert cache.match(Request("again", range(num_prompt))).num_tokens == replay


def test_a_prompt_that_leaves_a_shared_prefix_publishes_there_what_others_lack() -> None:
    """The first of them finds 12 tokens in the full group, and no window there. Whoever comes next does."""
    cache = make(FULL, SlidingWindow(6), publication=0)
    compute(cache, Request("a", range(31)), 31)
    second = Request("b", [*range(12), *range(100, 119)])
    hit = cache.match(second)
    assert (hit.num_tokens, hit.num_shared_tokens) == (0, 12)
    compute(cache, second, 31)
    assert published(cache, second, 1) == [1, 2, 5, 6]
    assert cache.match(Request("c", [*range(12), *range(200, 219)])).num_tokens == 12


def test_no_junction_is_published_where_the_hit_was_as_long() -> None:
    cache = make(FULL, SlidingWindow(6), publication=0)
    compute(cache, Request("a", range(13)), 13)
    second = Request("b", [*range(12), *range(100, 119)])
    compute(cache, second, 31)
    assert published(cache, second, 1) == [1, 2, 5, 6], "1 and 2 are of the first request"
    table = cache.table(second)
    assert table is not None
    assert table.boundaries == (28,)


def test_borders_of_all_groups_are_boundaries_where_block_sizes_differ() -> None:
    """31 tokens: the last common border of blocks of 4 and 8 is 24."""
    cache = make(FullAttention(8), SlidingWindow(6), publication=0)
    request = Request("r", range(31))
    compute(cache, request, 31)
    assert published(cache, request, 0) == [0, 1, 2]
    assert published(cache, request, 1) == [4, 5]
    assert cache.match(Request("again", range(31))).num_tokens == 24


# -- ranks: what goes first once it is free


def eviction_order(cache: KVCacheManager, request: Request) -> list[tuple[int, int]]:
    """The request lets go. Its named blocks as they will be evicted: group, and position in the table."""
    table = cache.table(request)
    assert table is not None
    places = {block: (group, at) for group, ids in enumerate(table.block_ids) for at, block in enumerate(ids) if block}
    cache.free(request)
    cache.check()
    pool: Any = cache._pool
    return [places[block] for block in cache.free_block_ids() if pool.name(block) is not None and block in places]


@pytest.mark.parametrize("publication", ["every", "dense"])
def test_unranked_blocks_are_evicted_group_by_group_from_the_tail(publication: Setting) -> None:
    cache = make(FULL, SlidingWindow(6), publication=publication)
    request = Request("r", range(31))
    compute(cache, request, 31)
    assert eviction_order(cache, request) == [(group, at) for group in (0, 1) for at in (6, 5, 4, 3, 2, 1, 0)]


def test_ranked_blocks_outside_a_boundary_s_tail_are_evicted_first() -> None:
    """The tail of the replay boundary is blocks 5 and 6 of the window."""
    cache = make(FULL, SlidingWindow(6), publication="ranked")
    request = Request("r", range(31))
    compute(cache, request, 31)
    spare = [(1, at) for at in (4, 3, 2, 1, 0)]
    kept = [*((0, at) for at in (6, 5, 4, 3, 2, 1, 0)), (1, 6), (1, 5)]
    assert eviction_order(cache, request) == spare + kept


def test_sinks_are_kept_too() -> None:
    cache = make(FULL, SlidingWindow(6, num_sinks=7), publication="ranked")
    request = Request("r", range(31))
    compute(cache, request, 31)
    assert eviction_order(cache, request)[:4] == [(1, 4), (1, 3), (1, 2), (0, 6)]


def test_the_tail_of_a_junction_is_kept() -> None:
    """The window of the shared prefix was evicted: the second request computes it again, to be kept."""
    cache = make(FULL, SlidingWindow(6), publication="ranked")
    first = Request("a", range(31))
    compute(cache, first, 31)
    assert eviction_order(cache, first)[:5] == [(1, at) for at in (4, 3, 2, 1, 0)]
    pool: Any = cache._pool
    pool.free(pool.allocate(cache.free_block_ids().index(pool.match(first.block_hashes(cache.hasher))[6])))
    second = Request("b", [*range(12), *range(100, 119)])
    assert (cache.match(second).num_tokens, cache.match(second).num_shared_tokens) == (0, 12)
    compute(cache, second, 31)
    assert [at for group, at in eviction_order(cache, second) if group == 1] == [4, 3, 0, 6, 5, 2, 1]


def test_the_tail_of_the_last_border_is_kept_when_a_request_lets_go() -> None:
    cache = make(FULL, SlidingWindow(6), publication="ranked")
    request = Request("r", range(10))
    compute(cache, request, 10)
    decode(cache, request, 25)
    assert eviction_order(cache, request)[-2:] == [(1, 5), (1, 4)]


def evict_spare(cache: KVCacheManager) -> None:
    """Somebody takes all that goes before the first block of the group that keeps everything, and gives it back."""
    pool: Any = cache._pool
    kept = {pool.finder(0)(name) for name in cache.findable(0)}
    queue = cache.free_block_ids()
    count = next(at for at, block in enumerate(queue) if block in kept)
    pool.free(pool.allocate(count))


ENDS: list[list[LayerKind]] = [
    [FULL, SlidingWindow(6)],
    [FULL, SlidingWindow(6, num_sinks=5)],
    [FULL, ChunkedLocal(12)],
    [FULL, StateSpace()],
    [FULL, SlidingWindow(1), SlidingWindow(13), ChunkedLocal(8), StateSpace(), SlidingWindow(6, num_sinks=9)],
]


@pytest.mark.parametrize("are_spare_evicted", [False, True])
@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("kinds", ENDS, ids=str)
def test_the_next_turn_goes_on_from_the_last_border_of_this_one(
    kinds: list[LayerKind], is_batched: bool, are_spare_evicted: bool
) -> None:
    """At every length where a request may end after it decoded, the last border's tail is whole and is kept."""
    for length in range(20, 41):
        cache = make(*kinds, publication="ranked")
        request = Request("r", range(10))
        compute(cache, request, 10)
        if is_batched:
            request.append(10)
            batch = cache.decode_batch()
            cache.allocate(request, 1)
            cache.join(batch, request)
            while request.num_tokens < length:
                assert cache.step(batch, [request.num_tokens]).unserved == []
            cache.leave(batch, [request])
            cache.commit(request, length)
        else:
            decode(cache, request, length)
        cache.free(request)
        if are_spare_evicted:
            evict_spare(cache)
        assert cache.match(Request("next turn", range(60))).num_tokens == length // 4 * 4
        cache.check()


@pytest.mark.parametrize("kinds", [[SlidingWindow(6)], [SlidingWindow(6), StateSpace()], [ChunkedLocal(12)]], ids=str)
def test_so_it_does_where_no_group_keeps_everything(kinds: list[LayerKind]) -> None:
    for length in range(20, 41):
        cache = make(*kinds, publication="ranked")
        request = Request("r", range(10))
        compute(cache, request, 10)
        decode(cache, request, length)
        cache.free(request)
        assert cache.match(Request("next turn", range(60)), length).num_tokens == length // 4 * 4


def test_a_hit_makes_spare_blocks_worth_as_much_as_others() -> None:
    """The second request goes on from 12 tokens, whose tail was spare."""
    cache = make(FULL, SlidingWindow(6), publication="ranked")
    first, second = Request("a", range(31)), Request("b", [*range(12), 90])
    compute(cache, first, 31)
    compute(cache, second, 13)
    cache.free(second)
    order = eviction_order(cache, first)
    assert order[:3] == [(1, 4), (1, 3), (1, 0)]
    assert set(order[3:]) == {(0, at) for at in range(7)} | {(1, at) for at in (1, 2, 5, 6)}


def test_a_spare_state_is_kept_once_it_is_the_last() -> None:
    cache = make(FULL, StateSpace(), publication="ranked")
    request = Request("r", range(9))
    compute(cache, request, 8, 9)
    decode(cache, request, 21)
    assert published(cache, request, 1) == [1, 2, 3, 4]
    assert eviction_order(cache, request)[-1] == (1, 4)
    assert cache.match(Request("next turn", range(40))).num_tokens == 20


def test_a_request_that_computed_nothing_publishes_nothing_when_it_lets_go() -> None:
    cache = make(FULL, SlidingWindow(6), StateSpace(), publication="ranked")
    request = Request("r", range(10))
    cache.allocate(request, 10)
    cache.free(request)
    compute(cache, request, 3)
    cache.free(request)
    assert [published(cache, request, group) for group in range(3)] == [[], [], []]
    cache.check()


# -- states


def test_a_state_is_published_at_boundaries_that_a_step_ended_at() -> None:
    for stops, blocks in (([31], []), ([28, 31], [6]), ([24, 28, 31], [6]), ([27, 31], [])):
        cache = make(FULL, StateSpace(), publication=0)
        request = Request("r", range(31))
        compute(cache, request, *stops)
        assert published(cache, request, 1) == blocks
        assert cache.match(Request("again", range(31))).num_tokens == 4 * (blocks[-1] + 1 if blocks else 0)


@pytest.mark.parametrize(
    ("state", "publication", "blocks"),
    [
        (StateSpace(), "every", [0, 1, 2, 3, 4, 5, 6]),
        (StateSpace(), "dense", [0, 1, 2, 3, 4, 5, 6]),
        (StateSpace(), 8, [1, 3, 5, 6]),
        (StateSpace(), 0, [6]),
        (StateSpace("none"), "every", []),
        (StateSpace("none"), "ranked", []),
        (StateSpace(), "ranked", [0, 1, 2, 3, 4, 5, 6]),
        (StateSpace(0), "every", [6]),
        (StateSpace(12), "every", [2, 5, 6]),
        (StateSpace(12), 0, [2, 5, 6]),
        (StateSpace(4, max_checkpoints=3), 0, [2, 5, 6]),
        (StateSpace(4, max_checkpoints=2), 0, [3, 6]),
        (StateSpace(8, max_checkpoints=3), 0, [1, 3, 5, 6]),
        (StateSpace(8, max_checkpoints=2), 0, [3, 6]),
        (StateSpace(4, max_checkpoints=1), 0, [6]),
        (StateSpace(4, max_checkpoints=0), 0, [6]),
        (StateSpace(max_checkpoints=3), "every", [2, 5, 6]),
    ],
    ids=str,
)
def test_which_states_are_kept_when_steps_end_where_they_should(
    state: StateSpace, publication: Setting, blocks: list[int]
) -> None:
    """31 tokens; 28 is the replay boundary. Chunks of 4 pass every border."""
    cache = make(FULL, state, publication=publication)
    request = Request("r", range(31))
    compute(cache, request, 4, 8, 12, 16, 20, 24, 28, 31)
    assert published(cache, request, 1) == blocks


@pytest.mark.parametrize(("max_tokens", "blocks"), [(None, [2, 5, 6]), (1, [2, 5, 6]), (30, [4, 6])])
def test_outputs_to_come_widen_the_interval_too(max_tokens: int | None, blocks: list[int]) -> None:
    """Seven borders in 31 tokens and 15 in 61; three may be kept: every third, or every fifth."""
    cache = make(FULL, StateSpace(4, max_checkpoints=3), publication=0)
    request = Request("r", range(31), max_tokens=max_tokens)
    compute(cache, request, 4, 8, 12, 16, 20, 24, 28, 31)
    assert published(cache, request, 1) == blocks


@pytest.mark.parametrize("publication", ["ranked", "every", "dense", 0, 4])
@pytest.mark.parametrize("stops", [[5, 10], [7, 9], [8, 9], [6, 7, 11]])
def test_a_state_is_named_after_the_border_only_where_a_step_ended_there(
    publication: Setting, stops: list[int]
) -> None:
    """The block of the state after 5 tokens is that of the border at 8, and a step from 5 to 10 leaves it as it is."""
    cache = make(StateSpace(), publication=publication)
    request = Request("r", range(12))
    compute(cache, request, *stops)
    cache.free(request)
    assert published(cache, request, 0) == ([1] if 8 in stops else [])
    cache.check()


def test_the_state_at_a_junction_is_published() -> None:
    cache = make(FULL, StateSpace(), publication=0)
    compute(cache, Request("a", range(31)), 28, 31)
    second = Request("b", [*range(13), *range(100, 118)])
    hit = cache.match(second)
    assert (hit.num_tokens, hit.num_shared_tokens) == (0, 12)
    assert cache.step_end(second, 0, 31, hit) == 12
    compute(cache, second, 12, 28, 31)
    assert published(cache, second, 1) == [2, 6]
    assert cache.match(Request("c", [*range(13), *range(200, 218)])).num_tokens == 12


# -- where steps should end


def ends(cache: KVCacheManager, request: Request, budget: int, hit: Hit | None = None) -> list[int]:
    """The steps of a scheduler that asks each time."""
    stops, start = [], hit.num_tokens if hit else 0
    while start < request.num_tokens:
        stop = min(start + budget, request.num_tokens)
        start = cache.step_end(request, start, stop, hit)
        stops.append(start)
    return stops


@pytest.mark.parametrize(
    ("kinds", "publication", "budget", "stops"),
    [
        ([FULL], "every", 31, [31]),
        ([FULL, SlidingWindow(6)], 0, 31, [31]),
        ([FULL, StateSpace()], 0, 31, [28, 31]),
        ([FULL, StateSpace()], 0, 10, [10, 20, 28, 31]),
        ([FULL, StateSpace()], "every", 31, [28, 31]),
        ([FULL, StateSpace()], "every", 10, [8, 16, 24, 28, 31]),
        ([FULL, StateSpace()], "every", 3, [3, 4, 7, 8, 11, 12, 15, 16, 19, 20, 23, 24, 27, 28, 31]),
        ([FULL, StateSpace(8)], 0, 31, [8, 16, 24, 28, 31]),
        ([FULL, StateSpace(8)], 0, 6, [6, 8, 14, 16, 22, 24, 28, 31]),
        ([FULL, StateSpace("none")], 0, 31, [31]),
        ([FULL, StateSpace(0)], "every", 31, [28, 31]),
        ([FULL, StateSpace(8, max_checkpoints=2)], 0, 31, [16, 28, 31]),
        ([FULL, StateSpace(8), StateSpace(12)], 0, 31, [8, 12, 16, 24, 28, 31]),
        ([FullAttention(8), StateSpace()], 0, 31, [24, 31]),
    ],
    ids=str,
)
def test_steps_end_where_a_state_is_kept(
    kinds: list[LayerKind], publication: Setting, budget: int, stops: list[int]
) -> None:
    cache = make(*kinds, publication=publication)
    request = Request("r", range(31))
    assert ends(cache, request, budget) == stops


def test_a_live_request_is_asked_for_its_own_boundaries() -> None:
    cache = make(FULL, StateSpace(), publication=0)
    compute(cache, Request("a", range(31)), 28, 31)
    second = Request("b", [*range(13), *range(100, 118)])
    assert ends(cache, second, 31, cache.match(second)) == [12, 28, 31]
    compute(cache, second, 5)
    assert cache.step_end(second, 5, 31) == 12
    assert cache.step_end(second, 12, 31) == 28
    assert cache.step_end(second, 12, 20) == 20


@pytest.mark.parametrize("publication", [DEFAULT_PUBLICATION, "every", 0, 4])
def test_states_hit_where_a_draft_model_drops_the_last_block(publication: Setting) -> None:
    cache = make(FULL, StateSpace(), publication=publication, drop_last_block=True)
    first = Request("a", range(31))
    compute(cache, first, *ends(cache, first, 31))
    cache.free(first)
    assert cache.match(Request("b", range(31))).num_tokens == 24


# -- events


def stored(cache: KVCacheManager, group_id: int) -> list[BlockStored]:
    return [e for e in cache.take_events() if isinstance(e, BlockStored) and e.group_id == group_id]


@pytest.mark.parametrize("publication", ["ranked", "every", 0, 16])
def test_events_of_sparse_runs_have_their_own_parents_tokens_and_sizes(publication: Setting) -> None:
    kinds: Sequence[LayerKind] = [FullAttention(8), SlidingWindow(6), SlidingWindow(6, block_size=8)]
    cache = make(*kinds, publication=publication)
    request = Request("r", range(100, 150))
    compute(cache, request, 20, 50)
    cache.free(request)
    chain = request.block_hashes(cache.hasher)
    events = cache.take_events()
    for group in cache.groups.all:
        names = list(group.names(chain, 0, len(chain) // group.scale))
        told: list[BlockHash] = []
        for event in events:
            assert isinstance(event, BlockStored)
            if event.group_id != group.group_id:
                continue
            first = names.index(event.block_hashes[0])
            stop = first + len(event.block_hashes)
            assert list(event.block_hashes) == names[first:stop]
            assert event.parent_block_hash == (names[first - 1] if first else None)
            assert event.block_size == group.block_size
            assert list(event.token_ids) == request.token_ids[first * group.block_size : stop * group.block_size]
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            told += names[first:stop]
        assert set(told) == cache.findable(group.group_id)
        assert len(told) == len(set(told))


def test_the_events_of_one_prompt_block_by_block() -> None:
    cache = make(FULL, SlidingWindow(6), publication=12)
    request = Request("r", range(31))
    compute(cache, request, 31)
    names = request.block_hashes(cache.hasher)
    assert cache.take_events() == [
        BlockStored(tuple(names), None, tuple(range(28)), 4, 0),
        BlockStored(tuple(names[1:3]), names[0], tuple(range(4, 12)), 4, 1),
        BlockStored(tuple(names[4:7]), names[3], tuple(range(16, 28)), 4, 1),
    ]


def test_the_event_of_a_state_is_its_last_block() -> None:
    cache = make(FULL, StateSpace(), publication=0)
    request = Request("r", range(31))
    compute(cache, request, 28, 31)
    names = request.block_hashes(cache.hasher)
    assert stored(cache, 1) == [BlockStored((names[6],), names[5], tuple(range(24, 28)), 4, 1)]


# -- what commits answer, and defaults


def test_a_commit_counts_the_blocks_of_all_groups() -> None:
    cache = make(FULL, SlidingWindow(6), publication=0)
    request = Request("r", range(31))
    cache.allocate(request, 31)
    assert cache.commit(request, 8) == 2
    assert cache.commit(request, 28) == 5 + 2
    assert cache.commit(request, 31) == 0


def test_what_lies_behind_the_last_common_border_waits_for_the_next() -> None:
    cache = make(FullAttention(8), SlidingWindow(99, block_size=12), publication="every")
    request = Request("r", range(50))
    for count in (8, 12, 23):
        compute(cache, request, count)
        assert [published(cache, request, group) for group in (0, 1)] == [[], []]
    compute(cache, request, 24)
    assert [published(cache, request, group) for group in (0, 1)] == [[0, 1, 2], [0, 1]]
    compute(cache, request, 50)
    assert [published(cache, request, group) for group in (0, 1)] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]


def test_golden_histories_publish_boundaries_alone_unless_told() -> None:
    groups: list[LayerKind] = [FULL, SlidingWindow(20)]
    request = Request("r", range(150))
    for adapter, blocks in (
        (golden_adapter(num_blocks=60, groups=groups), [7, 8]),
        (golden_adapter(num_blocks=60, groups=groups, publication="dense"), list(range(9))),
    ):
        serve(adapter.cache, request)
        assert published(adapter.cache, request, 1) == blocks
