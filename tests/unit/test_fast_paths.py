"""Shortcuts for what is common give exactly what the general code gives: two caches, one without the shortcut."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.unit.twins import Twins

from kvpool import ChunkedLocal, CrossAttention, FullAttention, KVCacheManager, LayerKind, SlidingWindow, StateSpace
from kvpool.core.publication import Setting

FULL = FullAttention()
NUM_HISTORIES, NUM_CALLS = 5, 150
ENOUGH = {"hit": 2, "grown": 20}
"""How often what a shortcut is for must have happened before histories prove anything."""
SHORTAGES = dict.fromkeys(("allocate short", "decode short", "unserved"), 2)
VERBS = dict.fromkeys(("commit", "go on", "trim", "free", "join", "leave", "step", "step of a list", "invalidate"), 2)


def without_plain(cache: KVCacheManager) -> None:
    """As if a single group that keeps everything were nothing special."""
    assert cache.groups.is_plain
    parts: Any = cache
    cache.groups.is_plain = False
    parts._room._is_plain = False
    parts._publisher.steady = None


def without_steady(cache: KVCacheManager) -> None:
    """As if every block had to be looked at, behind all boundaries too."""
    parts: Any = cache
    assert parts._publisher.steady is not None
    parts._publisher.steady = None


def without_uniform(cache: KVCacheManager) -> None:
    """As if groups could grow by different numbers of blocks."""
    parts: Any = cache
    assert parts._room.is_uniform
    parts._room.is_uniform = False


def compare_histories(
    rng: random.Random,
    kinds: Sequence[LayerKind],
    slow: Callable[[KVCacheManager], None],
    wanted: dict[str, int] = ENOUGH,
    *,
    are_events_ordered: bool = True,
    **options: Any,
) -> None:
    """Random histories in small pools, until all that is wanted has happened so often."""
    total: Counter[str] = Counter()
    number = 0
    while number < NUM_HISTORIES or any(total[name] < count for name, count in wanted.items()):
        number += 1
        assert number < 50 * NUM_HISTORIES, f"some of {wanted} never happens: {total}"
        history = rng.randrange(2**32)
        own = random.Random(history)
        num_blocks = own.choice([8, 16, 40]) * len(kinds)
        caches = [KVCacheManager(num_blocks, 4, kinds, max_in_flight_tokens=64, **options) for _ in range(2)]
        slow(caches[1])
        twins = Twins((caches[0], caches[1]), own, are_events_ordered=are_events_ordered)
        try:
            twins.run(NUM_CALLS)
        except AssertionError as error:
            error.add_note(f"history {number}: random.Random({history})")
            raise
        total += twins.counts


@pytest.mark.parametrize("drop_last_block", [False, True])
@pytest.mark.parametrize("block_size", [None, 1, 8])
def test_one_group_that_keeps_everything_is_handled_like_any_other(
    rng: random.Random, block_size: int | None, drop_last_block: bool
) -> None:
    compare_histories(
        rng, [FullAttention(block_size)], without_plain, ENOUGH | SHORTAGES | VERBS, drop_last_block=drop_last_block
    )


SETTINGS: list[Setting] = ["ranked", "every", "dense", 0, 4, 8, 16]
LAYOUTS: list[tuple[LayerKind, ...]] = [
    (FULL, *[SlidingWindow(6)] * 5),
    (FULL, StateSpace()),
    (SlidingWindow(6, num_sinks=3), SlidingWindow(9, num_sinks=10)),
    (FULL, SlidingWindow(9, num_sinks=5), StateSpace(num_scratch_blocks=1)),
    (FULL, ChunkedLocal(12)),
]


def has_shortcut(kinds: Sequence[LayerKind], publication: Setting) -> bool:
    cache: Any = KVCacheManager(9, 4, kinds, publication=publication)
    steady: object = cache._publisher.steady
    return steady is not None


@pytest.mark.parametrize(
    ("kinds", "without"),
    list(zip(LAYOUTS, [[8, 16], [8, 16], [8, 16], [8, 16], ["dense", 4, 8, 16]], strict=True)),
    ids=str,
)
def test_there_is_a_shortcut_where_what_is_published_does_not_depend_on_the_length(
    kinds: Sequence[LayerKind], without: list[Setting]
) -> None:
    """It does where the tails of an interval leave blocks between them out."""
    assert [setting for setting in SETTINGS if not has_shortcut(kinds, setting)] == without


@pytest.mark.parametrize("drop_last_block", [False, True])
@pytest.mark.parametrize(
    ("kinds", "publication"),
    [(kinds, setting) for kinds in LAYOUTS for setting in SETTINGS if has_shortcut(kinds, setting)],
    ids=str,
)
def test_a_block_behind_all_boundaries_is_published_like_any_other(
    rng: random.Random, kinds: tuple[LayerKind, ...], publication: Setting, drop_last_block: bool
) -> None:
    """Only the order of events within a call may differ."""
    options: dict[str, Any] = {"publication": publication, "drop_last_block": drop_last_block}
    compare_histories(rng, kinds, without_steady, are_events_ordered=False, **options)


@pytest.mark.parametrize("publication", ["ranked", "every", 0, 8])
@pytest.mark.parametrize(
    "kinds", [*LAYOUTS, (FULL, FULL), (SlidingWindow(6),), (StateSpace(), ChunkedLocal(8))], ids=str
)
def test_groups_that_grow_together_grow_as_each_would_alone(
    rng: random.Random, kinds: tuple[LayerKind, ...], publication: Setting
) -> None:
    compare_histories(rng, kinds, without_uniform, publication=publication)


def test_groups_of_different_block_sizes_or_with_an_encoder_do_not_grow_together() -> None:
    layouts: list[list[LayerKind]] = [[FULL, FullAttention(8)], [FULL, CrossAttention()]]
    for kinds in layouts:
        cache: Any = KVCacheManager(9, 4, kinds)
        assert not cache._room.is_uniform
