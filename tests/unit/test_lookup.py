"""The longest prefix that every group can serve: by hand-made patterns of blocks that are there (x) and that are not.

`found` puts blocks of 4 tokens into a pool of their own, so that each group has just the pattern that it is given.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import (
    NULL_BLOCK,
    BlockHash,
    BlockId,
    BlockPool,
    ChunkedLocal,
    CrossAttention,
    EncoderInput,
    FullAttention,
    GroupId,
    Hit,
    HitEnd,
    KVCacheManager,
    LayerKind,
    Request,
    SlidingWindow,
    StateSpace,
)
from kvpool.core.groups import Groups
from kvpool.core.lookup import Found, longest_hit
from kvpool.testing import serve

Layout = Sequence[tuple[LayerKind, str]]

FULL = FullAttention()


def holding(layout: Layout, *, drops: bool = False, pool_type: type[BlockPool] = BlockPool) -> tuple[BlockPool, Groups]:
    """A pool that has the blocks marked x of each group."""
    groups = Groups([kind for kind, _ in layout], 4, drops_last_block=drops, max_in_flight_tokens=8)
    pool = pool_type(2 + sum(len(pattern) for _, pattern in layout), num_groups=len(layout))
    for group, (_, pattern) in zip(groups.all, layout, strict=True):
        names = group.names(chain(len(pattern) * group.scale), 0, len(pattern))
        present = [name for name, mark in zip(names, pattern, strict=True) if mark == "x"]
        blocks = pool.allocate(len(present))
        assert blocks is not None
        pool.commit(blocks, present, group.group_id)
    return pool, groups


def chain(num_units: int) -> list[bytes]:
    return [n.to_bytes(4, "big") for n in range(num_units)]


def found(layout: Layout, limit: int | None = None, *, drops: bool = False) -> Found:
    """What is found of a prompt that has all the blocks of the longest pattern, and no more."""
    pool, groups = holding(layout, drops=drops)
    num_tokens = max(len(pattern) * group.block_size for group, (_, pattern) in zip(groups.all, layout, strict=True))
    result = longest_hit(pool, groups, chain(num_tokens // groups.unit), num_tokens if limit is None else limit)
    pool.check()
    return result


def shape(block_ids: Sequence[BlockId]) -> str:
    """Which places have a block."""
    return "".join("." if block == NULL_BLOCK else "x" for block in block_ids)


# -- one group


@pytest.mark.parametrize(
    ("window", "pattern", "num_tokens", "blocks"),
    [
        (5, "xxxx", 16, "...x"),
        (6, "xxxx", 16, "..xx"),
        (6, "xx.x", 8, "xx"),
        (5, "xx.x", 16, "...x"),
        (5, "..x.", 12, "..x"),
        (9, "xxx.x", 12, ".xx"),
        (6, ".x.x.x", 0, ""),
        (6, "x.x.x.", 4, "x"),
        (1, "....", 16, "...."),
        (2, "...x", 16, "...x"),
        (13, "xxx.xx..xx", 12, "xxx"),
        (13, ".xx.xxx.xx", 28, "....xxx"),
        (14, ".xx.xxx.xx", 0, ""),
        (100, "xxx.", 12, "xxx"),
        (100, ".xxx", 0, ""),
    ],
)
def test_a_window_needs_its_last_blocks_or_a_leading_run(
    window: int, pattern: str, num_tokens: int, blocks: str
) -> None:
    result = found([(SlidingWindow(window), pattern)])
    assert (result.num_tokens, result.num_found, shape(result.block_ids[0])) == (num_tokens, num_tokens, blocks)


@pytest.mark.parametrize(
    ("sinks", "pattern", "num_tokens", "blocks"),
    [
        (1, "x..x", 16, "x..x"),
        (4, "x..x", 16, "x..x"),
        (5, "x..x", 4, "x"),
        (5, "xx.x", 16, "xx.x"),
        (1, "...x", 0, ""),
        (8, ".x.x", 0, ""),
        (99, "xxxx", 16, "xxxx"),
        (99, "xxx.", 12, "xxx"),
    ],
)
def test_the_sinks_are_needed_beside_the_window(sinks: int, pattern: str, num_tokens: int, blocks: str) -> None:
    result = found([(SlidingWindow(5, num_sinks=sinks), pattern)])
    assert (result.num_tokens, shape(result.block_ids[0])) == (num_tokens, blocks)


@pytest.mark.parametrize(
    ("pattern", "num_tokens", "blocks"),
    [
        ("....", 16, "...."),
        ("....x", 20, "....x"),
        ("....xx.", 24, "....xx"),
        ("....x.x", 20, "....x"),
        ("......x", 16, "...."),
        ("xx.x", 16, "...."),
        ("xx.", 8, "xx"),
        (".x.", 0, ""),
    ],
)
def test_chunked_layers_need_the_current_chunk_and_nothing_at_a_border(
    pattern: str, num_tokens: int, blocks: str
) -> None:
    """Chunks of 16 tokens. Behind a full group that has it all, so that there is something to be hit at a border."""
    result = found([(FULL, "x" * len(pattern)), (ChunkedLocal(16), pattern)])
    assert (result.num_tokens, shape(result.block_ids[1])) == (num_tokens, blocks)


def test_a_prompt_that_was_never_seen_can_hit_where_no_layer_looks_back() -> None:
    """All layers are chunked: at the border of 16 nothing before it matters, whatever it was."""
    cache = make(ChunkedLocal(8), ChunkedLocal(16))
    hit = cache.match(Request("r", range(30)))
    assert (hit.num_tokens, hit.block_ids) == (16, ([NULL_BLOCK] * 4, [NULL_BLOCK] * 4))
    table = cache.allocate(Request("r", range(30)), 14, hit)
    assert table is not None
    assert [shape(ids) for ids in table.block_ids] == ["....xxxx", "....xxxx"]
    cache.check()


@pytest.mark.parametrize(
    ("pattern", "num_tokens", "blocks"), [("...x", 16, "...x"), ("x.x.", 12, "..x"), ("x...", 4, "x"), ("....", 0, "")]
)
def test_a_state_needs_its_checkpoint_exactly_at_the_border(pattern: str, num_tokens: int, blocks: str) -> None:
    result = found([(StateSpace(), pattern)])
    assert (result.num_tokens, shape(result.block_ids[0])) == (num_tokens, blocks)


@pytest.mark.parametrize("limit", [0, 3, 4, 7, 8, 15, 16, 99])
def test_no_more_than_the_limit_is_found(limit: int) -> None:
    layouts: list[Layout] = [
        [(FULL, "xxxx")],
        [(SlidingWindow(6), "xxxx")],
        [(FULL, "xxxx"), (StateSpace(), "xxxx")],
    ]
    for layout in layouts:
        assert found(layout, limit).num_tokens == min(limit // 4 * 4, 16)


# -- several groups


def test_equal_groups_need_the_same_blocks_each() -> None:
    assert found([(FULL, "xxx."), (FULL, "xx.x")]).num_tokens == 8
    window = SlidingWindow(6)
    result = found([(window, "xxxx.x"), (window, ".xxx.."), (FULL, "xxxxxx")])
    assert (result.num_tokens, result.num_shared) == (16, 24)
    assert [shape(ids) for ids in result.block_ids] == ["..xx", "..xx", "xxxx"]


def test_blocks_are_those_of_their_own_group() -> None:
    pool, groups = holding([(FULL, "xxx"), (SlidingWindow(6), ".xx"), (StateSpace(), "..x")])
    assert longest_hit(pool, groups, chain(3), 12).block_ids == ([1, 2, 3], [0, 4, 5], [0, 0, 6])


def test_two_windows_shorten_one_another_until_both_agree() -> None:
    """Each of them could serve a longer prefix at every turn, but not the other."""
    wide, narrow = (SlidingWindow(10), "xxx.xxx..xxx"), (SlidingWindow(6), ".xx.xx.xx.x.")
    assert found([wide]).num_tokens == 48
    assert found([narrow]).num_tokens == 36
    layouts: list[Layout] = [[wide, narrow], [narrow, wide], [(FULL, "x" * 12), wide, narrow]]
    for layout in layouts:
        assert found(layout).num_tokens == 12
    assert found([wide, (SlidingWindow(6), "....xx......")]).num_tokens == 0


def test_what_the_first_groups_share_is_told() -> None:
    result = found([(SlidingWindow(6), "xx...."), (FULL, "xxxxx.")])
    assert (result.num_tokens, result.num_shared) == (8, 20)


@pytest.mark.parametrize(
    ("kinds", "patterns", "num_tokens"),
    [
        ([FULL, FullAttention(8)], ["xxxxx", "xxx"], 16),
        ([FULL, FullAttention(8)], ["xxxx", "x"], 8),
        ([FULL, FullAttention(8)], ["x", "xxx"], 0),
        ([FullAttention(8), FullAttention(12)], ["xxxxxx", "xxxx"], 48),
        ([FullAttention(8), FullAttention(12)], ["xxxxx.", "xxxx"], 24),
        ([FullAttention(8), FullAttention(12)], ["xxxxxx", "xxx."], 24),
        ([FULL, SlidingWindow(5, block_size=8)], ["xxxxxx", ".xx"], 24),
        ([FULL, SlidingWindow(5, block_size=8)], ["xxxxxx", ".x."], 16),
        ([FullAttention(8), SlidingWindow(6)], ["xxx", "..xx.x"], 16),
        ([FullAttention(8), SlidingWindow(6)], ["xxx", ".xx..."], 0),
        ([FullAttention(8), StateSpace(block_size=12)], ["xxxxxx", ".x.."], 24),
        ([FullAttention(8), StateSpace(block_size=12)], ["xxxxxx", "x.x."], 0),
    ],
    ids=str,
)
def test_different_block_sizes_meet_at_common_multiples(
    kinds: Sequence[LayerKind], patterns: Sequence[str], num_tokens: int
) -> None:
    result = found(list(zip(kinds, patterns, strict=True)))
    assert result.num_tokens == num_tokens


@pytest.mark.parametrize(
    ("short", "long"), [("xx..", "xx"), ("xxxx....", "xxxx")], ids=["8 of 16 tokens", "16 of 32 tokens"]
)
def test_full_groups_of_two_block_sizes_are_cut_to_the_shorter(short: str, long: str) -> None:
    for layout in ([(FULL, short), (FullAttention(8), long)], [(FullAttention(8), long), (FULL, short)]):
        result = found(layout)
        assert result.num_tokens == short.count("x") * 4
        assert {len(ids) for ids in result.block_ids} == {result.num_tokens // 4, result.num_tokens // 8}


def test_a_group_of_cross_attention_is_not_looked_up() -> None:
    result = found([(FULL, "xxx"), (CrossAttention(), "")])
    assert (result.num_tokens, result.block_ids) == (12, ([1, 2, 3], []))


# -- a draft model that sees the last block again


def test_the_last_block_found_is_dropped_once_for_all_groups() -> None:
    layout: Layout = [(FULL, "xxxx"), (SlidingWindow(6), "xxxx"), (SlidingWindow(9), "xxxx")]
    result = found(layout, drops=True)
    assert (result.num_tokens, result.num_found) == (12, 16)
    assert [shape(ids) for ids in result.block_ids] == ["xxx", ".xx", ".xx"]


@pytest.mark.parametrize(
    ("pattern", "num_tokens"), [(".xxx", 12), ("..xx", 0), ("xx.x", 4), ("xxx.", 8), ("x...", 0), ("....", 0)]
)
def test_after_the_drop_the_window_is_still_whole(pattern: str, num_tokens: int) -> None:
    """A window of 6 tokens: two blocks before the dropped one, or a leading run."""
    assert found([(FULL, "xxxx"), (SlidingWindow(6), pattern)], drops=True).num_tokens == num_tokens


def test_a_common_border_is_dropped_where_block_sizes_differ() -> None:
    assert found([(FULL, "xxxxxx"), (FullAttention(8), "xxx")], drops=True).num_tokens == 16


def test_a_state_need_not_be_there_at_the_dropped_border() -> None:
    """Found as far as 16 by the full group: 12 are hit, and go on from the state at 12."""
    assert found([(FULL, "xxxx"), (StateSpace(), "..x.")], drops=True).num_tokens == 12


# -- by brute force


KINDS: st.SearchStrategy[LayerKind] = st.one_of(
    st.builds(FullAttention, st.sampled_from([None, 8])),
    st.builds(SlidingWindow, st.integers(1, 20), st.integers(0, 6), st.sampled_from([None, 8, 12])),
    st.builds(ChunkedLocal, st.sampled_from([8, 12, 16])),
    st.builds(StateSpace, block_size=st.sampled_from([None, 8])),
)
PATTERNS = st.text("xxx.", min_size=48, max_size=48)


LAYOUTS = st.lists(st.tuples(KINDS, PATTERNS), min_size=1, max_size=4)


def test_a_hit_of_nothing_in_two_full_groups_is_a_hit() -> None:
    assert found([(FULL, "xx"), (FullAttention(8), "x")], 0).num_tokens == 0


@settings(max_examples=500, deadline=None)
@given(LAYOUTS, st.integers(0, 192), st.booleans())
def test_a_hit_is_the_longest_length_at_which_all_groups_have_what_they_need(
    layout: list[tuple[LayerKind, str]], limit: int, drops: bool
) -> None:
    pool, groups = holding(layout, drops=drops)

    def serves(num_tokens: int) -> bool:
        for group, (_, pattern) in zip(groups.all, layout, strict=True):
            kept = max(num_tokens - groups.num_dropped_tokens, 0)
            stop = kept if group.is_state else num_tokens  # A state behind what is kept is of no use.
            needed = set(range(group.kind.first_live(kept) // group.block_size, stop // group.block_size))
            needed |= set(range(min(group.num_sink_blocks, num_tokens // group.block_size)))
            if not all(pattern[at] == "x" for at in needed):
                return False
        return True

    longest = max(n for n in range(0, limit + 1, groups.alignment) if serves(n))
    result = longest_hit(pool, groups, chain(192 // groups.unit), limit)
    assert (result.num_found, result.num_tokens) == (longest, max(longest - groups.num_dropped_tokens, 0))
    for group, ids in zip(groups.all, result.block_ids, strict=True):
        assert len(ids) == result.num_tokens // group.block_size
        first = group.first_live_block(result.num_tokens)
        names = group.names(chain(192 // groups.unit), 0, len(ids))
        for at, (block, name) in enumerate(zip(ids, names, strict=True)):
            is_needed = at >= first or at < group.num_sink_blocks
            assert pool.name(block) == (name if is_needed else None)


# -- how often blocks are looked at


class CountingPool(BlockPool):
    """Counts how often each name is looked for in each group."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.counts: dict[tuple[GroupId, BlockHash], int] = {}

    def finder(self, group_id: GroupId) -> Callable[[BlockHash], BlockId | None]:
        find = super().finder(group_id)

        def counted(name: BlockHash) -> BlockId | None:
            self.counts[group_id, name] = self.counts.get((group_id, name), 0) + 1
            return find(name)

        return counted


def look_ups(layout: Layout, num_blocks: int) -> dict[tuple[GroupId, BlockHash], int]:
    pool, groups = holding(layout, pool_type=CountingPool)
    assert isinstance(pool, CountingPool)
    pool.counts.clear()
    longest_hit(pool, groups, chain(num_blocks), num_blocks * 4)
    return pool.counts


@pytest.mark.parametrize("num_blocks", [60, 6_000])
def test_no_block_is_looked_at_twice_however_often_windows_shorten_one_another(num_blocks: int) -> None:
    """Runs of two blocks, one after the other by turns: each window refuses what the other has just agreed to."""
    layout: Layout = [
        (FULL, "x" * num_blocks),
        (SlidingWindow(6), ".xx..." * (num_blocks // 6)),
        (SlidingWindow(7), "....xx" * (num_blocks // 6)),
    ]
    counts = look_ups(layout, num_blocks)
    assert max(counts.values()) == 1
    assert len(counts) <= 2 * num_blocks


def test_a_window_as_long_as_the_prompt_is_searched_once() -> None:
    """One block in the middle is missing, and the first one: no length will do, and every one was possible."""
    counts = look_ups([(FULL, "x" * 500), (SlidingWindow(10_000), "." + "x" * 248 + "." + "x" * 250)], 500)
    assert max(counts.values()) == 1


def test_blocks_of_a_hit_are_looked_at_once_more_and_sinks_twice() -> None:
    """12 tokens are hit: three sinks, which the search meets again from behind, and which the answer names."""
    counts = look_ups([(FULL, "x" * 90), (SlidingWindow(9, num_sinks=12), "xxx" + ".x." * 29)], 90)
    assert sorted(counts.values())[-4:] == [1, 2, 3, 3]


# -- through the cache: what is missing, and why


def ended(cache: KVCacheManager, request: Request) -> Request:
    """A request that came and went, its prompt computed in one step."""
    serve(cache, request)
    cache.free(request)
    return request


def evict(cache: KVCacheManager, count: int) -> None:
    """Somebody takes the first `count` blocks of the free queue and gives them back empty."""
    taker = Request("taker", [9_999] * count * 4)
    assert cache.num_blocks_needed(taker, count * 4) >= count
    pool: Any = cache._pool
    pool.free(pool.allocate(count))


def make(*kinds: LayerKind, publication: str | int = "every", **options: Any) -> KVCacheManager:
    return KVCacheManager(60, 4, kinds, publication=publication, **options)


def test_a_hit_of_the_cache_has_blocks_where_they_are_needed() -> None:
    cache = make(FULL, SlidingWindow(6), CrossAttention())
    encoder = EncoderInput("sound", 6)
    ended(cache, Request("a", range(17), encoder_input=encoder))
    hit = cache.match(Request("b", range(17), encoder_input=encoder))
    assert (hit.num_tokens, hit.num_shared_tokens, hit.reason) == (16, 16, HitEnd.PARTIAL_BLOCK)
    assert [shape(ids) for ids in hit.block_ids] == ["xxxx", "..xx", ""]
    request = Request("b", range(17), encoder_input=encoder)
    table = cache.allocate(request, 1, hit)
    assert table is not None
    assert [shape(ids) for ids in table.block_ids] == ["xxxxx", "..xxx", "xx"]
    assert set(table.block_ids[2]).isdisjoint(hit.block_ids[0] + hit.block_ids[1]), "the encoder's are its own"
    cache.check()


@pytest.mark.parametrize(
    ("kinds", "num_tokens", "num_hit", "reason"),
    [
        ([FULL, SlidingWindow(6)], 16, 12, HitEnd.LAST_TOKEN),
        ([FULL, SlidingWindow(6)], 15, 12, HitEnd.PARTIAL_BLOCK),
        ([FULL, FullAttention(8)], 16, 8, HitEnd.LAST_TOKEN),
        ([FULL, FullAttention(8)], 15, 8, HitEnd.PARTIAL_BLOCK),
        ([SlidingWindow(6)], 17, 16, HitEnd.PARTIAL_BLOCK),
    ],
    ids=str,
)
def test_a_hit_ends_at_the_last_token_or_border(
    kinds: list[LayerKind], num_tokens: int, num_hit: int, reason: HitEnd
) -> None:
    cache = make(*kinds)
    ended(cache, Request("a", range(20)))
    hit = cache.match(Request("b", range(num_tokens)))
    assert (hit.num_tokens, hit.reason) == (num_hit, reason)


def test_a_dropped_block_is_a_reason() -> None:
    cache = make(FULL, SlidingWindow(6), drop_last_block=True)
    ended(cache, Request("a", range(20)))
    hit = cache.match(Request("b", range(17)))
    assert (hit.num_tokens, hit.num_shared_tokens, hit.reason) == (12, 16, HitEnd.DROPPED)
    assert cache.match(Request("b", range(4))) == Hit(0, ([], []), HitEnd.LAST_TOKEN, 0)
    assert cache.match(Request("b", range(5))) == Hit(0, ([], []), HitEnd.DROPPED, 4)


def test_a_group_that_holds_less_is_a_reason() -> None:
    """The replay boundary is published alone: a prompt that leaves before it finds no window."""
    cache = make(FULL, SlidingWindow(6), publication=0)
    ended(cache, Request("a", range(20)))
    assert cache.match(Request("b", range(20))).num_tokens == 16
    early = Request("c", [*range(12), 90, 91])
    assert cache.match(early) == Hit(0, ([], []), HitEnd.LAGGING_GROUP, 12)


def test_what_was_never_seen_is_a_reason() -> None:
    cache = make(FULL, SlidingWindow(6))
    ended(cache, Request("a", range(20)))
    hit = cache.match(Request("b", [*range(8), *range(90, 99)]))
    assert (hit.num_tokens, hit.reason) == (8, HitEnd.NEVER_SEEN)
    assert cache.match(Request("c", range(90, 99))).reason is HitEnd.NEVER_SEEN


def test_what_was_evicted_from_the_group_that_keeps_everything_is_a_reason() -> None:
    cache = make(FULL, SlidingWindow(6))
    request = ended(cache, Request("a", range(20)))
    pool: Any = cache._pool
    names = request.block_hashes(cache.hasher)
    third = pool.match(names)[2]
    queue = cache.free_block_ids()
    evict(cache, queue.index(third) + 1)
    hit = cache.match(Request("b", range(20)))
    assert (hit.num_tokens, hit.reason) in [(8, HitEnd.EVICTED), (0, HitEnd.LAGGING_GROUP)]
    assert hit.num_shared_tokens == 8


def test_other_keys_are_a_reason_in_every_layout() -> None:
    for kinds in ([FULL, SlidingWindow(6)], [SlidingWindow(6)], [StateSpace()]):
        cache = make(*kinds)
        ended(cache, Request("a", range(20), cache_salt="s"))
        assert cache.match(Request("b", range(20))).reason is HitEnd.OTHER_KEYS


def test_a_request_that_does_not_read_finds_nothing_in_any_group() -> None:
    cache = make(FULL, SlidingWindow(6), CrossAttention())
    assert cache.match(Request("a", range(20), reads_cache=False)) == Hit(0, ([], [], []), HitEnd.NOT_READ)


def test_a_first_block_that_differs_in_its_second_half_was_never_seen() -> None:
    cache = make(FullAttention(8), SlidingWindow(6))
    ended(cache, Request("a", range(20)))
    assert cache.match(Request("b", [*range(4), *range(90, 99)])).reason is HitEnd.NEVER_SEEN


def test_what_a_window_did_not_publish_was_not_evicted() -> None:
    cache = make(SlidingWindow(4), publication=0)
    ended(cache, Request("a", range(13)))
    hit = cache.match(Request("b", [*range(8), *range(90, 99)]))
    assert (hit.num_tokens, cache.num_evictions) == (0, 0)
    assert hit.reason is HitEnd.NOT_KEPT


def test_a_state_that_no_step_ended_at_was_not_kept() -> None:
    cache = make(StateSpace(), publication=0)
    ended(cache, Request("a", range(13)))
    assert cache.match(Request("b", range(13))).reason is HitEnd.NOT_KEPT
    assert cache.match(Request("c", range(90, 99))).reason is HitEnd.NEVER_SEEN


def test_a_window_that_was_evicted_was_kept_before() -> None:
    cache = make(SlidingWindow(6))
    request = ended(cache, Request("a", range(20)))
    evict(cache, cache.num_free_blocks)
    assert cache.match(request).reason is HitEnd.EVICTED


def test_a_hit_whose_window_was_evicted_is_stale() -> None:
    cache = make(FULL, SlidingWindow(6))
    ended(cache, Request("a", range(17)))
    request = Request("b", range(17))
    hit = cache.match(request)
    assert hit.num_tokens == 16
    window = [block for block in hit.block_ids[1] if block]
    cache.invalidate(window[:1])
    with pytest.raises(ValueError, match="'b': the hit is stale or of another request"):
        cache.allocate(request, 1, hit)
    cache.check()
