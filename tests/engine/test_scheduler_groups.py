"""The scheduler over several groups of layers: what it refuses and warns of, loads, bad blocks, and kept room."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvpool import (
    ChunkedLocal,
    ConfigError,
    CrossAttention,
    EncoderInput,
    FullAttention,
    KVCacheManager,
    LayerKind,
    RefusedError,
    Request,
    SlidingWindow,
    StateSpace,
    UsageError,
)
from kvpool.engine.batch import Batch
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler, SchedulerConfig

FULL = FullAttention()


def engine_of(
    *kinds: LayerKind,
    num_blocks: int = 60,
    budget: int = 16,
    loadable: dict[str, int] | None = None,
    watermark: float = 0.0,
) -> Engine:
    cache = KVCacheManager(num_blocks, 4, kinds, max_in_flight_tokens=budget)
    num_loadable = None if loadable is None else lambda request, start: max(loadable[request.request_id] - start, 0)
    scheduler = Scheduler(cache, SchedulerConfig(budget, 8, watermark), num_loadable)
    return Engine(scheduler, CheckingRunner(cache))


def state(scheduler: Scheduler) -> tuple[object, ...]:
    """All that can be seen of a scheduler and its cache."""
    cache = scheduler.cache
    tables = [repr(cache.table(request)) for request in scheduler.running]
    queues = [list(own) for own in (scheduler.waiting, scheduler.prefilling, scheduler.loading, scheduler.running)]
    names = [cache.findable(group.group_id) for group in cache.groups.all]
    return queues, tables, cache.free_block_ids(), names, repr(cache.stats), scheduler.num_preemptions


def finish(engine: Engine) -> None:
    """Steps until all are done, with what they left checked."""
    scheduler = engine.scheduler
    for _ in range(1_000):
        if not scheduler.has_work:
            break
        engine.step()
        scheduler.cache.check()
    assert not scheduler.has_work
    assert scheduler.cache.num_free_blocks == scheduler.cache.num_usable_blocks


# -- how much may be in flight


@pytest.mark.parametrize("kind", [SlidingWindow(6), ChunkedLocal(8), StateSpace()], ids=str)
def test_a_step_larger_than_what_windows_count_on_is_refused(kind: LayerKind) -> None:
    cache = KVCacheManager(60, 4, [FULL, kind], max_in_flight_tokens=64)
    with pytest.raises(
        ConfigError,
        match="max_num_batched_tokens is 65, and the cache has windows that count on 64 tokens in flight: make it with "
        "max_in_flight_tokens=65, or lower the first",
    ):
        Scheduler(cache, SchedulerConfig(max_num_batched_tokens=65, max_num_seqs=8))
    Scheduler(cache, SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8))


def test_the_defaults_of_both_go_together() -> None:
    Scheduler(KVCacheManager(60, 4, [FULL, SlidingWindow(6)]))


@pytest.mark.parametrize("kinds", [[FULL], [FULL, FullAttention(8)], [FULL, CrossAttention()]], ids=str)
def test_where_nothing_slides_any_step_will_do(kinds: list[LayerKind]) -> None:
    cache = KVCacheManager(60, 4, kinds, max_in_flight_tokens=8)
    Scheduler(cache, SchedulerConfig(max_num_batched_tokens=100_000))


# -- what is warned of


@pytest.mark.parametrize(
    ("kinds", "block_size", "drops", "message"),
    [
        ([FullAttention(1_040)], 16, False, "smallest prefix that can hit: 1040 tokens (block sizes [1040])"),
        ([FullAttention(528)], 16, True, "smallest prefix that can hit: 1056 tokens (block sizes [528])"),
        (
            [FullAttention(48), SlidingWindow(99, block_size=64), FullAttention(80)],
            16,
            True,
            "smallest prefix that can hit: 1920 tokens (block sizes [48, 64, 80])",
        ),
        ([FULL, StateSpace(block_size=4_096)], 16, False, "prefix that can hit: 4096 tokens (block sizes [16, 4096])"),
        ([FULL, StateSpace("none")], 16, False, "no prefix can ever hit: a group of states keeps no checkpoints"),
    ],
    ids=str,
)
def test_a_cache_that_hits_long_prefixes_alone_says_so_once(
    kinds: list[LayerKind], block_size: int, drops: bool, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        KVCacheManager(60, block_size, kinds, drop_last_block=drops)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert message in caplog.text


@pytest.mark.parametrize(
    ("kinds", "drops"),
    [
        ([FULL], True),
        ([FullAttention(1_024)], False),
        ([FullAttention(512)], True),
        ([FULL, SlidingWindow(4_096), StateSpace(), ChunkedLocal(8_192)], True),
        ([FULL, CrossAttention(4_096)], False),
    ],
    ids=str,
)
def test_other_caches_are_quiet(kinds: list[LayerKind], drops: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="kvpool"):
        KVCacheManager(60, 16, kinds, drop_last_block=drops)
    assert caplog.records == []


# -- tokens from outside


LAYOUTS: list[list[LayerKind]] = [[FULL], [FULL, SlidingWindow(6)], [FullAttention(8), SlidingWindow(6), StateSpace()]]


@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_loads_end_well_or_not_and_every_request_ends_as_if_alone(kinds: list[LayerKind]) -> None:
    engine = engine_of(*kinds, loadable={"a": 24, "b": 16, "c": 0})
    scheduler = engine.scheduler
    a, b, c = (Request(name, [n] * 30, max_tokens=6) for n, name in enumerate("abc"))
    for request in (a, b, c):
        scheduler.add(request)
    batch = scheduler.schedule()
    assert batch.loads == [(a, 0, 24), (b, 0, 16)]
    assert list(batch) == [(c, 0, batch.counts[0])]
    assert scheduler.running == [c, a, b]
    scheduler.commit(batch, engine.runner.run(batch))
    scheduler.loaded(a)
    scheduler.load_failed(b)
    assert (scheduler.loading, list(scheduler.waiting)) == ([], [b])
    finish(engine)
    for n, request in enumerate((a, b, c)):
        alone = [n] * 30
        for _ in range(6):
            alone.append((alone[-1] * 31 + len(alone)) % 32_000)
        assert request.token_ids == alone
    assert scheduler.num_preemptions == 0


def test_what_is_loaded_is_found_by_others_once_it_is_there() -> None:
    engine = engine_of(FULL, SlidingWindow(6), loadable={"a": 24, "b": 0})
    scheduler = engine.scheduler
    a, b = (Request(name, range(30), max_tokens=2) for name in "ab")
    scheduler.add(a)
    scheduler.commit(scheduler.schedule(), [])
    assert scheduler.cache.match(b).num_tokens == 0
    batch = scheduler.schedule()
    assert (len(batch), batch.loads) == (0, [])
    scheduler.commit(batch, [])
    runner = engine.runner
    assert isinstance(runner, CheckingRunner)
    runner.load(a, 0, 24)
    scheduler.loaded(a)
    assert scheduler.cache.match(b).num_tokens == 24
    finish(engine)


@pytest.mark.parametrize(
    ("loadable", "hit", "load"),
    [(100, 0, 28), (29, 0, 28), (27, 0, 24), (3, 0, 0), (100, 16, 12), (17, 16, 0), (23, 16, 4)],
)
def test_whole_blocks_are_loaded_behind_the_hit_and_never_the_last_token(loadable: int, hit: int, load: int) -> None:
    engine = engine_of(FULL, loadable={"first": 0, "r": loadable})
    scheduler = engine.scheduler
    if hit:
        scheduler.add(Request("first", range(hit + 1), max_tokens=1))
        finish(engine)
    request = Request("r", range(30), max_tokens=1)
    scheduler.add(request)
    batch = scheduler.schedule()
    assert batch.loads == ([(request, hit, hit + load)] if load else [])
    assert list(batch) == ([] if load else [(request, hit, min(30 - hit, 16))])


MISUSE: dict[str, Callable[[Scheduler, Request], object]] = {
    "loaded": Scheduler.loaded,
    "load_failed": Scheduler.load_failed,
}


@pytest.mark.parametrize("verb", MISUSE.values(), ids=MISUSE)
def test_only_who_waits_for_tokens_from_outside_can_be_told_of_them(
    verb: Callable[[Scheduler, Request], object],
) -> None:
    """Not who waits, is being prefilled, decodes, has ended, was aborted, is unknown; nor a load that has ended."""
    engine = engine_of(FULL, SlidingWindow(6), loadable=dict.fromkeys("abcdex", 0) | {"load": 8, "again": 8})
    scheduler = engine.scheduler
    requests = {name: Request(name, [n] * 20, max_tokens=9) for n, name in enumerate("abcde")}
    requests |= {name: Request(name, [50 + n] * 20, max_tokens=9) for n, name in enumerate(("load", "again"))}
    requests["e"].max_tokens = 1
    for name in ("load", "again", "e", "d", "a", "b", "c"):
        scheduler.add(requests[name])
    for _ in range(3):
        engine.step()
    queues = (scheduler.loading, scheduler.decoding.requests, scheduler.prefilling, scheduler.waiting)
    assert [[request.request_id for request in own] for own in queues] == [["load", "again"], ["d"], ["a"], ["b", "c"]]
    scheduler.loaded(requests["load"])
    scheduler.load_failed(requests["again"])
    scheduler.abort(requests["d"])
    assert not scheduler.loading
    everybody = [*requests.values(), Request("x", range(9)), Request("a", range(9))]
    for request in everybody:
        before = state(scheduler)
        with pytest.raises(UsageError, match=f"request '{request.request_id}' does not wait for tokens from outside"):
            verb(scheduler, request)
        assert state(scheduler) == before


@pytest.mark.parametrize("verb", MISUSE.values(), ids=MISUSE)
def test_another_request_of_the_same_id_is_not_meant(verb: Callable[[Scheduler, Request], object]) -> None:
    engine = engine_of(FULL, loadable={"r": 8})
    scheduler = engine.scheduler
    request = Request("r", range(20))
    scheduler.add(request)
    scheduler.commit(scheduler.schedule(), [])
    before = state(scheduler)
    with pytest.raises(UsageError, match="request 'r' does not wait for tokens from outside"):
        verb(scheduler, Request("r", range(20)))
    assert state(scheduler) == before
    verb(scheduler, request)


# -- bad blocks


@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_who_holds_a_bad_block_is_computed_again_and_the_others_go_on(kinds: list[LayerKind]) -> None:
    engine = engine_of(*kinds)
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    a, b, c = (Request(name, [n] * 9, max_tokens=12) for n, name in enumerate("abc"))
    for request in (a, b, c):
        scheduler.add(request)
    while len(scheduler.decoding) < 3:
        engine.step()
    table = cache.table(b)
    assert table is not None
    assert scheduler.invalidate([table.block_ids[0][0]]) == [b]
    assert (scheduler.running, list(scheduler.waiting), b.num_preemptions) == ([a, c], [b], 1)
    cache.check()
    finish(engine)
    for n, request in enumerate((a, b, c)):
        alone = [n] * 9
        for _ in range(12):
            alone.append((alone[-1] * 31 + len(alone)) % 32_000)
        assert request.token_ids == alone


def test_requests_cut_back_wait_in_the_order_in_which_they_ran() -> None:
    engine = engine_of(FULL, SlidingWindow(6), loadable={"a": 0, "b": 0, "load": 8})
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    a, b, load = (Request(name, [n] * 9, max_tokens=12) for n, name in enumerate(("a", "b", "load")))
    for request in (a, b, load):
        scheduler.add(request)
    engine.step()
    engine.step()
    assert scheduler.running == [a, b, load]
    tables = [cache.table(request) for request in (load, a, b)]
    bad = [table.block_ids[0][0] for table in tables if table is not None]
    assert scheduler.invalidate(bad) == [a, b, load]
    assert (scheduler.running, list(scheduler.waiting)) == ([], [a, b, load])
    assert cache.num_free_blocks == cache.num_usable_blocks
    with pytest.raises(UsageError, match="'load' does not wait for tokens from outside"):
        scheduler.loaded(load)
    engine.step()
    engine.step()
    assert scheduler.loading == [load]
    scheduler.load_failed(load)
    finish(engine)


def test_bad_blocks_while_a_batch_is_in_flight() -> None:
    """The tokens of a request that was cut back meanwhile are passed over."""
    engine = engine_of(FULL, SlidingWindow(6))
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    a, b = (Request(name, [n] * 7, max_tokens=12) for n, name in enumerate("ab"))
    for request in (a, b):
        scheduler.add(request)
    engine.step()
    batch = scheduler.schedule()
    assert batch.requests == [a, b]
    table = cache.table(a)
    assert table is not None
    token_ids = engine.runner.run(batch)
    assert scheduler.invalidate(table.block_ids[1]) == [a]
    scheduler.commit(batch, token_ids)
    assert (a.num_tokens, b.num_tokens) == (8, 9)
    finish(engine)


@pytest.mark.parametrize("bad", [[60], [-1], [1, 2, 99]], ids=str)
def test_blocks_that_are_not_of_the_pool_change_nothing(bad: Sequence[int]) -> None:
    engine = engine_of(FULL, SlidingWindow(6))
    engine.scheduler.add(Request("a", range(9), max_tokens=4))
    engine.step()
    before = state(engine.scheduler)
    with pytest.raises(UsageError, match=r"are not of this pool: it has 1 \.\. 59"):
        engine.scheduler.invalidate(bad)
    assert state(engine.scheduler) == before
    assert engine.scheduler.invalidate([0]) == []
    assert engine.scheduler.invalidate([]) == []
    assert state(engine.scheduler) == before


# -- room that is kept for prompts in part computed


def admitted(batch: Batch) -> list[str]:
    first = len(batch) - batch.num_admitted
    return [request.request_id for request in batch.requests[first:]]


CHECKPOINTS: list[LayerKind] = [StateSpace(checkpoints=8), FULL]


@pytest.mark.parametrize(("num_usable", "names"), [(17, [["a"], ["b"]]), (18, [["a", "b"]])])
def test_who_would_need_the_room_of_a_prompt_in_part_computed_waits(num_usable: int, names: list[list[str]]) -> None:
    """Steps of a end every 8 tokens, which leaves budget for b. The two need 10 + 2 and 4 + 2 blocks."""
    engine = engine_of(*CHECKPOINTS, num_blocks=num_usable + 1)
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    a, b = Request("a", range(40), max_tokens=1), Request("b", [1] * 16, max_tokens=1)
    assert [cache.max_blocks(request.num_tokens) for request in (a, b)] == [12, 6]
    for request in (a, b):
        scheduler.add(request)
    seen = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert "b" not in admitted(batch) or num_usable == 18 or a not in scheduler.running
        seen.append(admitted(batch))
        scheduler.commit(batch, engine.runner.run(batch))
    assert [own for own in seen if own] == names
    assert scheduler.num_preemptions == 0


def test_a_small_request_passes_nobody_that_waits_for_room() -> None:
    """First come first served: c would fit beside a, and b, which does not, came before it."""
    engine = engine_of(*CHECKPOINTS, num_blocks=18)
    for name, length in (("a", 40), ("b", 16), ("c", 2)):
        engine.scheduler.add(Request(name, [ord(name)] * length, max_tokens=1))
    batch = engine.scheduler.schedule()
    assert admitted(batch) == ["a"]
    engine.scheduler.commit(batch, engine.runner.run(batch))
    finish(engine)
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("leave", ["abort", "preempt", "end"])
def test_room_is_kept_no_longer_once_the_prompt_is_done_or_gone(leave: str) -> None:
    engine = engine_of(*CHECKPOINTS, num_blocks=18)
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    a, b = Request("a", range(40), max_tokens=9), Request("b", [1] * 16, max_tokens=1)
    for request in (a, b):
        scheduler.add(request)
    engine.step()
    kept: Any = scheduler._num_reserved
    assert kept() == 12 - cache.num_held_blocks(a) > 0
    match leave:
        case "abort":
            scheduler.abort(a)
        case "preempt":
            scheduler.reset_prefix_cache(preempt_running=True)
        case _:
            while a in scheduler.prefilling:
                engine.step()
    assert kept() == 0
    finish(engine)


def test_what_is_loaded_keeps_its_room_until_its_prompt_is_computed() -> None:
    """a holds 4 of its 10 blocks while it loads 16 tokens; 11 of 17 are free, and b may have 7 of them, not 8."""
    for num_prompt, is_admitted in ((20, True), (21, False)):
        engine = engine_of(FULL, num_blocks=16, loadable={"a": 16, "b": 0}, budget=64)
        scheduler = engine.scheduler
        scheduler.add(Request("a", range(40), max_tokens=1))
        scheduler.add(Request("b", [7] * num_prompt, max_tokens=1))
        batch = scheduler.schedule()
        assert [name for name in admitted(batch) if name == "b"] == ["b"] * is_admitted
        assert len(batch.loads) == 1


def test_an_encoder_s_blocks_are_part_of_what_a_request_needs() -> None:
    cache = KVCacheManager(11, 4, [FULL, CrossAttention()])
    scheduler = Scheduler(cache)
    fits, not_so = EncoderInput("sound", 16), EncoderInput("longer sound", 17)
    with pytest.raises(RefusedError, match="24 prompt tokens and up to 1 outputs need 11 blocks, the pool has 10"):
        scheduler.add(Request("r", range(24), max_tokens=1, encoder_input=not_so))
    scheduler.add(Request("r", range(24), max_tokens=1, encoder_input=fits))
    engine = Engine(scheduler, CheckingRunner(cache))
    finish(engine)
