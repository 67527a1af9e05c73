"""Cases of group C about content that turns out bad: who must compute it again, and what must not be found any more."""
# ruff: noqa: N802

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from kvpool import BlockTable, FullAttention, KVCacheManager, LayerKind, Request, SlidingWindow, UsageError
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler
from kvpool.testing import serve

TOKENS_1 = list(range(48))
TOKENS_2 = [*range(32), *range(100, 116)]


def table_of(cache: KVCacheManager, request: Request) -> BlockTable:
    table = cache.table(request)
    assert table is not None
    return table


def _two_sharers() -> tuple[KVCacheManager, Request, Request]:
    """R1 in blocks 1, 2, 3, the first two of them loaded; R2 in 1, 2, 4; 48 tokens of each are computed."""
    cache = KVCacheManager(12, 16)
    r1, r2 = Request("R1", TOKENS_1), Request("R2", TOKENS_2)
    table = cache.allocate(r1, 16, num_external_tokens=32)
    assert table is not None
    cache.commit(r1, 48)
    assert serve(cache, r2).num_tokens == 32
    assert (table.block_ids, table_of(cache, r2).block_ids) == ([[1, 2, 3]], [[1, 2, 4]])
    return cache, r1, r2


def test_C09_every_sharer_of_a_bad_block_goes_back_to_the_good_prefix() -> None:
    """Block 2 is bad: both are cut back to 16 tokens, and the hashes of 2, 3 and 4 are withdrawn. Block 1 keeps its."""
    cache, r1, r2 = _two_sharers()
    first = r1.block_hashes(cache.hasher)[0]
    cache.take_events()
    assert cache.invalidate({2}) == {"R1": 16, "R2": 16}
    for request in (r1, r2):
        table = table_of(cache, request)
        assert (table.num_computed, table.num_committed, table.num_slots) == (16, 16, 16)
        assert table.block_ids == [[1]]
    assert cache.findable() == {first}
    assert [cache.holders(block) for block in range(5)] == [0, 2, 0, 0, 0]
    gone = {*r1.block_hashes(cache.hasher), *r2.block_hashes(cache.hasher)} - {first}
    assert {name for event in cache.take_events() for name in event.block_hashes} == gone  # type: ignore[union-attr]
    assert cache.match(Request("R3", [*TOKENS_1, 1])).block_ids == ([1],)
    cache.check()


def test_C09_nobody_runs_past_the_good_prefix_on_bad_content() -> None:
    """Each computes the rest into a block of its own; until then there is nothing behind 16 to commit or decode on."""
    cache, r1, r2 = _two_sharers()
    cache.invalidate([2])
    with pytest.raises(UsageError, match="16 are allocated"):
        cache.commit(r2, 32)
    with pytest.raises(UsageError, match="room for 16"):
        cache.step([r2], [1])
    for request in (r1, r2):
        assert cache.allocate(request, 32) is not None
    one, other = table_of(cache, r1).block_ids[0], table_of(cache, r2).block_ids[0]
    assert (one[0], other[0]) == (1, 1)
    assert not set(one[1:]) & set(other[1:])
    assert cache.match(Request("R3", [*TOKENS_1, 1])).num_tokens == 16
    cache.commit(r2, 48)
    assert cache.match(Request("R3", [*TOKENS_1, 1])).block_ids == ([1, other[1]],)
    cache.commit(r1, 48)
    assert cache.match(Request("R3", [*TOKENS_1, 1])).block_ids == ([1, other[1], one[2]],)
    cache.check()


def _spoil(cache: KVCacheManager, runner: CheckingRunner, block_ids: Collection[int]) -> None:
    """Wrong values in these blocks: no verb of the runner writes any, so its memory is written to."""
    size = runner._memory.shape[1] // cache.num_blocks
    for block in block_ids:
        runner._memory[:, block * size : (block + 1) * size] = np.uint64(13)


def _outputs(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """What these say when they run to their end."""
    for _ in range(100):
        if not engine.scheduler.has_work:
            return [request.token_ids[request.num_prompt_tokens :] for request in requests]
        engine.step()
        engine.scheduler.cache.check()
    raise AssertionError("requests do not end")


@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize(
    "kinds",
    [[FullAttention()], [FullAttention(), SlidingWindow(40)], [SlidingWindow(20), FullAttention(block_size=32)]],
    ids=["full", "full and window", "two block sizes"],
)
def test_C09_running_requests_go_on_from_what_is_good(kinds: Sequence[LayerKind], num_steps: int) -> None:
    """The load is found to be bad when both are computed, or some tokens later. All that was computed is spoiled."""
    undisturbed = [Request(name, tokens, max_tokens=20) for name, tokens in (("R1", TOKENS_1), ("R2", TOKENS_2))]
    cache = KVCacheManager(40, 16, kinds)
    engine = Engine(Scheduler(cache), CheckingRunner(cache))
    for request in undisturbed:
        engine.scheduler.add(request)
    expected = _outputs(engine, undisturbed)

    cache = KVCacheManager(40, 16, kinds)
    outside = {"R1": 32}
    scheduler = Scheduler(cache, num_loadable=lambda request, start: outside.get(request.request_id, start) - start)
    runner = CheckingRunner(cache)
    engine = Engine(scheduler, runner)
    r1, r2 = (Request(name, tokens, max_tokens=20) for name, tokens in (("R1", TOKENS_1), ("R2", TOKENS_2)))
    scheduler.add(r1)
    engine.step()
    assert scheduler.loading == [r1]
    scheduler.loaded(r1)
    scheduler.add(r2)
    assert engine.step().requests == [r1, r2]
    assert cache.stats.num_hit_tokens == 32
    for _ in range(num_steps):
        engine.step()

    full = next(at for at, kind in enumerate(kinds) if isinstance(kind, FullAttention))
    size = cache.groups.all[full].block_size
    tables = [table_of(cache, request).block_ids for request in (r1, r2)]
    bad = tables[0][full][16 // size]
    assert bad == tables[1][full][16 // size]
    kept = [{block for ids in own for block in ids[: 16 // size]} for own in zip(*tables, strict=True)]
    touched = {block for own in tables for ids in own for block in ids}
    _spoil(cache, runner, touched.difference(*kept, [0]))
    outside.clear()
    assert scheduler.invalidate([bad]) == [r1, r2]
    assert list(scheduler.waiting) == [r1, r2]
    assert scheduler.running == []
    good = 16 // size * size
    assert all(len(cache.findable(group)) <= good // 16 for group in range(len(kinds)))
    num_computed = [request.num_tokens for request in (r1, r2)]
    batch = scheduler.schedule()
    assert list(batch) == [(r, good, n - good) for r, n in zip((r1, r2), num_computed, strict=True)]
    scheduler.commit(batch, runner.run(batch))
    assert _outputs(engine, (r1, r2)) == expected


def test_C09_requests_may_end_with_an_error_instead() -> None:
    """Both are aborted: nothing stays cached from block 2 on, and the pool is whole."""
    cache = KVCacheManager(12, 16)
    scheduler = Scheduler(cache)
    engine = Engine(scheduler, CheckingRunner(cache))
    r1, r2 = Request("R1", TOKENS_1), Request("R2", TOKENS_2)
    for request in (r1, r2):
        scheduler.add(request)
        engine.step()
    assert cache.holders(2) == 2
    for victim in scheduler.invalidate([2]):
        scheduler.abort(victim)
    assert not scheduler.has_work
    assert cache.findable() == set(r1.block_hashes(cache.hasher)[:1])
    assert (cache.num_live_requests, cache.num_free_blocks) == (0, 11)
    cache.check()


def _hybrid() -> tuple[KVCacheManager, Request]:
    """Blocks of 256 in the full group, of 64 in the group with a window of 128."""
    cache = KVCacheManager(40, 64, [FullAttention(block_size=256), SlidingWindow(128)])
    assert (cache.alignment, cache.groups.unit) == (256, 64)
    return cache, Request("R", range(600))


def test_C09_hybrid_all_groups_go_back_to_a_common_border() -> None:
    """The window's block 5 holds tokens 320 to 383: down to 256 in all groups, where the window has blocks 2 and 3."""
    cache, request = _hybrid()
    table = cache.allocate(request, 512)
    assert table is not None
    cache.commit(request, 512)
    full, window = (list(ids) for ids in table.block_ids)
    assert (len(full), len(window)) == (2, 8)
    assert cache.invalidate({0, window[5]}) == {"R": 256}
    assert (table.num_computed, table.num_committed, table.num_slots) == (256, 256, 256)
    assert table.block_ids == [full[:1], window[:4]]
    names = request.block_hashes(cache.hasher)
    # Block 4 of the window, tokens 256 to 319, is good, and nobody can hit it without what comes behind.
    assert [cache.findable(group) for group in (0, 1)] == [{names[3]}, set(names[:5])]
    assert cache.match(Request("R'", range(600))).num_tokens == 256
    cache.check()
    assert cache.allocate(request, 344) is not None
    cache.commit(request, 600)
    assert table.block_ids[1].count(0) == 2
    assert [cache.findable(group) for group in (0, 1)] == [{names[3], names[7]}, set(names[:8])]
    cache.check()


def _hybrid_without_2_and_3(cache: KVCacheManager, request: Request) -> list[int]:
    """512 tokens are computed, and the window has let go of all before block 5. Answers its blocks."""
    table = cache.allocate(request, 448)
    assert table is not None
    cache.commit(request, 448)
    assert cache.allocate(request, 64) is table
    cache.commit(request, 512)
    window = list(table.block_ids[1])
    assert [bool(block) for block in window] == [False] * 5 + [True] * 3
    return window


def test_C09_hybrid_where_the_window_has_let_go_all_goes_back_to_nothing() -> None:
    cache, request = _hybrid()
    window = _hybrid_without_2_and_3(cache, request)
    table = table_of(cache, request)
    assert cache.invalidate({0, window[5]}) == {"R": 0}
    assert (table.num_computed, table.num_committed, table.num_slots) == (0, 0, 0)
    assert table.block_ids == [[], []]
    names = request.block_hashes(cache.hasher)
    assert names[7] not in cache.findable(0)
    assert not set(names[5:8]) & cache.findable(1)
    assert cache.num_free_blocks == 39
    cache.check()
    assert cache.allocate(request, 600) is table
    cache.commit(request, 600)
    assert cache.findable(0) == {names[3], names[7]}
    cache.check()


def test_C09_hybrid_what_was_computed_before_the_bad_block_is_still_found() -> None:
    """The request goes back to nothing since it let go of its window, but 256 tokens of it are cached, and good."""
    cache, request = _hybrid()
    window = _hybrid_without_2_and_3(cache, request)
    assert cache.match(request, 256).num_tokens == 256
    cache.invalidate([window[5]])
    assert cache.match(request, 256).num_tokens == 256


@pytest.mark.parametrize("bad", [[], [0], [0, 0]])
def test_C09_the_null_block_is_never_bad(bad: list[int]) -> None:
    """Tables are full of it; nothing happens."""
    cache, request = _hybrid()
    _hybrid_without_2_and_3(cache, request)
    before = repr(cache.table(request)), cache.free_block_ids(), cache.findable(0), cache.findable(1)
    assert cache.invalidate(bad) == {}
    assert (repr(cache.table(request)), cache.free_block_ids(), cache.findable(0), cache.findable(1)) == before
