"""What follows from the kinds of all groups: units, borders, bundles, bounds; and layouts that cannot work."""

from collections.abc import Callable
from math import gcd, lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import (
    ChunkedLocal,
    ConfigError,
    CrossAttention,
    FullAttention,
    KVCacheManager,
    LayerKind,
    SlidingWindow,
    StateSpace,
)
from kvpool.core.groups import Groups
from kvpool.plan.demand import MAX_TOKENS


def make(*kinds: LayerKind, block_size: int = 4, in_flight: int = 8, drops: bool = False) -> Groups:
    return Groups(kinds, block_size, drops_last_block=drops, max_in_flight_tokens=in_flight)


# -- where groups agree


@pytest.mark.parametrize(
    ("sizes", "unit", "alignment"),
    [([4], 4, 4), ([4, 4], 4, 4), ([4, 8], 4, 8), ([8, 12], 4, 24), ([2, 3], 1, 6), ([16, 16, 48, 32], 16, 96)],
)
def test_units_divide_all_blocks_and_borders_are_where_all_end(sizes: list[int], unit: int, alignment: int) -> None:
    groups = make(*[FullAttention(size) for size in sizes])
    assert (groups.unit, groups.alignment) == (unit, alignment) == (gcd(*sizes), lcm(*sizes))
    assert [group.scale for group in groups.all] == [size // unit for size in sizes]
    assert [groups.align(n) for n in (0, alignment - 1, alignment, 2 * alignment + 1)] == [
        0, 0, alignment, 2 * alignment,
    ]  # fmt: skip


def test_cross_attention_has_no_say_in_borders() -> None:
    groups = make(FullAttention(), CrossAttention(7), CrossAttention(3))
    assert (groups.unit, groups.alignment) == (4, 4)
    assert [group.group_id for group in groups.decoder] == [0]
    assert [group.block_size for group in groups.all] == [4, 7, 3]


def test_a_group_without_a_block_size_has_the_cache_s() -> None:
    groups = make(FullAttention(), SlidingWindow(9, block_size=8), StateSpace(block_size=2))
    assert [group.block_size for group in groups.all] == [4, 8, 2]
    assert len(groups) == 3


def test_equal_groups_are_looked_up_together_and_those_that_keep_everything_first() -> None:
    window, full = SlidingWindow(5), FullAttention()
    kinds: list[LayerKind] = [
        window,
        full,
        SlidingWindow(6),
        CrossAttention(),
        window,
        full,
        SlidingWindow(5, block_size=8),
    ]
    bundles = make(*kinds).bundles
    assert [[group.group_id for group in bundle] for bundle in bundles] == [[1, 5], [0, 4], [2], [6]]


def test_a_block_is_named_after_its_last_unit() -> None:
    groups = make(FullAttention(4), FullAttention(12))
    chain = [bytes([n]) for n in range(7)]
    one, other = groups.all
    assert one.names(chain, 2, 5) == [b"\2", b"\3", b"\4"]
    assert list(other.names(chain, 0, 2)) == [b"\2", b"\5"]
    assert list(other.names(chain, 1, 9)) == [b"\5"], "only full blocks have names"
    assert list(other.names(chain, 0, 0)) == []


# -- where a window's first block changes


@pytest.mark.parametrize(
    ("kind", "slides"),
    [
        (FullAttention(), ()),
        (SlidingWindow(1), ((4, 0),)),
        (SlidingWindow(2), ((4, 1),)),
        (SlidingWindow(6), ((4, 1),)),
        (SlidingWindow(8), ((4, 3),)),
        (SlidingWindow(8, block_size=16), ((16, 7),)),
        (ChunkedLocal(8), ((4, 0),)),
        (ChunkedLocal(24), ((4, 0),)),
        (StateSpace(), ((4, 1),)),
        (CrossAttention(), ()),
    ],
    ids=str,
)
def test_a_request_gives_up_blocks_at_few_lengths(kind: LayerKind, slides: object) -> None:
    groups = make(FullAttention(), kind)
    assert groups.slides == slides
    group = groups.all[1]
    for n in range(1, 200):
        if group.first_live_block(n) != group.first_live_block(n - 1):
            assert any(n % size == rest for size, rest in groups.slides)


def test_a_request_needs_blocks_behind_the_borders_of_the_decoder_s_groups() -> None:
    groups = make(FullAttention(8), SlidingWindow(2, block_size=12), StateSpace(block_size=8), CrossAttention(3))
    assert groups.block_sizes == (8, 12)


# -- prediction


@pytest.mark.parametrize(
    ("kinds", "drops", "smallest"),
    [
        ([FullAttention()], False, 4),
        ([FullAttention()], True, 8),
        ([FullAttention(), SlidingWindow(6)], False, 4),
        ([FullAttention(16), StateSpace(block_size=24)], False, 48),
        ([FullAttention(16), StateSpace(block_size=24)], True, 96),
        ([FullAttention(), StateSpace(checkpoints="none")], False, None),
        ([FullAttention(), StateSpace(), StateSpace(checkpoints="none")], False, None),
    ],
    ids=str,
)
def test_the_smallest_prefix_that_can_hit(kinds: list[LayerKind], drops: bool, smallest: int | None) -> None:
    assert make(*kinds, drops=drops).smallest_hit == smallest
    assert KVCacheManager(64, 4, kinds, drop_last_block=drops).smallest_hit == smallest


# -- how much fits


def test_the_most_blocks_are_those_of_all_groups() -> None:
    """100 tokens in blocks of 4, 8 in flight: 25, the window's 5 + 1, two states and three scratch blocks, 2 of 5."""
    kinds: list[LayerKind] = [FullAttention(), SlidingWindow(10), StateSpace(num_scratch_blocks=3), CrossAttention()]
    groups = make(*kinds)
    assert groups.max_blocks(100) == 25 + 6 + 2 + 3
    assert groups.max_blocks(100, num_encoder_tokens=5) == 25 + 6 + 2 + 3 + 2
    assert groups.max_blocks(0) == 3
    assert KVCacheManager(64, 4, kinds, max_in_flight_tokens=8, publication=0).max_blocks(100, 5) == 38


LAYERS: st.SearchStrategy[LayerKind] = st.one_of(
    st.builds(FullAttention, st.sampled_from([None, 2, 8])),
    st.builds(SlidingWindow, st.integers(1, 40), st.integers(0, 9), st.sampled_from([None, 8])),
    st.builds(ChunkedLocal, st.sampled_from([8, 24])),
    st.builds(StateSpace, num_scratch_blocks=st.integers(0, 3)),
    st.builds(CrossAttention),
)
LAYOUTS = st.lists(LAYERS, min_size=1, max_size=5).filter(lambda kinds: any(k != CrossAttention() for k in kinds))


@settings(max_examples=200, deadline=None)
@given(LAYOUTS, st.integers(1, 20), st.integers(0, 60), st.integers(0, 9))
def test_the_longest_request_is_the_most_blocks_turned_round(
    kinds: list[LayerKind], in_flight: int, num_blocks: int, encoder: int
) -> None:
    groups = make(*kinds, in_flight=in_flight)
    longest = groups.max_tokens(num_blocks, encoder)
    assert longest == 0 or groups.max_blocks(longest, encoder) <= num_blocks
    assert longest == MAX_TOKENS or groups.max_blocks(longest + 1, encoder) > num_blocks


@settings(max_examples=200, deadline=None)
@given(LAYOUTS, st.integers(1, 20), st.integers(0, 200))
def test_a_longer_request_never_takes_fewer_blocks(kinds: list[LayerKind], in_flight: int, num_tokens: int) -> None:
    groups = make(*kinds, in_flight=in_flight)
    assert groups.max_blocks(num_tokens) <= groups.max_blocks(num_tokens + 1)


@pytest.mark.parametrize(
    ("kinds", "num_blocks", "longest"),
    [
        ([FullAttention()], 10, 40),
        ([FullAttention()], 0, 0),
        ([FullAttention(), FullAttention()], 11, 20),
        ([SlidingWindow(10)], 5, 20),
        ([SlidingWindow(10)], 6, MAX_TOKENS),
        ([FullAttention(), SlidingWindow(10)], 16, 40),
        ([StateSpace()], 2, MAX_TOKENS),
        ([FullAttention(), StateSpace(num_scratch_blocks=9)], 11, 4),
    ],
    ids=str,
)
def test_the_longest_request_that_fits(kinds: list[LayerKind], num_blocks: int, longest: int) -> None:
    """Blocks of 4; the window of 10 holds at most 6 of them with 8 tokens in flight."""
    assert make(*kinds).max_tokens(num_blocks) == longest


def test_the_cache_answers_for_its_groups() -> None:
    kinds: list[LayerKind] = [FullAttention(8), SlidingWindow(9, block_size=12)]
    cache = KVCacheManager(21, 4, kinds, max_in_flight_tokens=4)
    assert (cache.alignment, cache.smallest_hit, cache.hasher.block_size) == (24, 24, 4)
    assert (cache.max_blocks(100), cache.max_tokens()) == (13 + 2, 144)
    assert cache.max_concurrency(100) == 20 / 15


# -- layouts that cannot work


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make(), "no groups are given: at least 1"),
        (lambda: make(*[FullAttention()] * 257), "257 groups are given: at most 256 share a pool"),
        (lambda: make(CrossAttention(), CrossAttention()), "all 2 groups are cross attention"),
        (lambda: make(FullAttention(), block_size=0), "block_size is 0: a block holds at least 1 token"),
        (lambda: make(FullAttention(-8)), "block_size is -8: a block holds at least 1 token"),
        (lambda: make(FullAttention(), CrossAttention(0)), "block_size is 0: a block holds at least 1 token"),
        (lambda: make(FullAttention(), in_flight=0), "max_in_flight_tokens is 0: a step computes at least 1 token"),
        (
            lambda: make(FullAttention(), ChunkedLocal(100), block_size=16),
            "chunk_size 100 is no multiple of the block size 16: 10 is the largest",
        ),
        (
            lambda: make(FullAttention(2**16), FullAttention(2**16 - 1)),
            r"block sizes \[65535, 65536\] meet every 4294901760 tokens only, 2147483647 is the longest request",
        ),
        (lambda: make(FullAttention(2**31)), r"block sizes \[2147483648\] meet every 2147483648 tokens only"),
    ],
)
def test_a_layout_that_cannot_work_is_refused(build: Callable[[], Groups], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_256_groups_share_a_pool() -> None:
    assert len(make(*[FullAttention()] * 256)) == 256
    KVCacheManager(1_000, 4, [FullAttention()] * 256).check()


@pytest.mark.parametrize(
    ("interval", "neighbours"), [(12, "8 or 16"), (4, "0 or 8"), (-4, "0 or 8"), (-8, "0 or 8"), (17, "16 or 24")]
)
def test_an_interval_that_no_hit_can_end_at_names_both_neighbours(interval: int, neighbours: str) -> None:
    with pytest.raises(ConfigError, match=f"publication is every {interval} tokens, .* of 8 only: {neighbours} work"):
        KVCacheManager(64, 4, [FullAttention(8), SlidingWindow(5)], publication=interval)
    if interval > 0:
        with pytest.raises(ConfigError, match=f"checkpoints is every {interval} tokens, .* 8 only: {neighbours} work"):
            KVCacheManager(64, 4, [FullAttention(8), StateSpace(interval)])


@pytest.mark.parametrize("publication", ["all", "", "Dense", "0"])
def test_an_unknown_setting_is_refused_with_the_known_ones(publication: str) -> None:
    with pytest.raises(ConfigError, match=f"publication is '{publication}': ranked, every, dense, or an interval"):
        KVCacheManager(64, 4, [FullAttention(), SlidingWindow(5)], publication=publication)
