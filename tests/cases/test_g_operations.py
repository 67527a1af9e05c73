"""Cases of group G: who is admitted, and how to read the gauges."""
# ruff: noqa: N802

import pytest

from kvpool import KVCacheManager, Request
from kvpool.engine.batch import Batch
from kvpool.engine.scheduler import Scheduler, SchedulerConfig
from kvpool.testing import serve


def run_step(scheduler: Scheduler) -> Batch:
    """One step; a request gets a token once all its tokens are computed."""
    batch = scheduler.schedule()
    scheduler.commit(batch, [7 if start + count == request.num_tokens else None for request, start, count in batch])
    return batch


def test_G02_i_a_prompt_is_admitted_only_when_it_fits_whole() -> None:
    cache = KVCacheManager(27_778 + 1, 16)
    scheduler = Scheduler(cache, SchedulerConfig(max_num_batched_tokens=8_192))
    four = [Request(str(n), [n] * (99_960 + 12 * n)) for n in range(4)]
    for request in four:
        scheduler.add(request)
    while min(request.num_tokens - request.num_prompt_tokens for request in four) < 1:
        run_step(scheduler)
    assert (cache.usage().num_held, cache.num_free_blocks) == (25_000, 2_778)

    fifth = Request("fifth", [5] * 100_000)
    scheduler.add(fifth)
    assert cache.num_blocks_needed(fifth, 8_192) == 512
    assert cache.num_blocks_needed(fifth, 100_000) == 6_250
    assert run_step(scheduler).requests == four
    assert list(scheduler.waiting) == [fifth]

    scheduler.abort(four.pop())
    assert list(run_step(scheduler))[-1] == (fifth, 0, 8_192 - 3)
    assert scheduler.num_preemptions == 0


def scheduler_beside(num_held_blocks: int) -> Scheduler:
    """1,000 blocks of which a running request holds so many, its last one being full; watermark 5 %."""
    scheduler = Scheduler(KVCacheManager(1_000, 16), SchedulerConfig(max_num_batched_tokens=20_000, watermark=0.05))
    if num_held_blocks:
        scheduler.add(Request("running", [1] * (16 * num_held_blocks - 1)))
        run_step(scheduler)
        assert scheduler.cache.usage().num_held == num_held_blocks
    return scheduler


@pytest.mark.parametrize(
    ("num_held", "num_needed", "is_admitted"),
    [(879, 80, False), (879, 71, False), (879, 70, True), (0, 960, True), (0, 999, True)],
    ids=["120 - 80 < 50", "120 - 71 < 50", "120 - 70 = 50", "empty engine", "empty engine, whole pool"],
)
def test_G02_ii_the_watermark_guards_new_admissions(num_held: int, num_needed: int, is_admitted: bool) -> None:
    scheduler = scheduler_beside(num_held)
    assert scheduler.cache.num_free_blocks == 999 - num_held
    new = Request("new", [2] * (16 * num_needed))
    scheduler.add(new)
    assert (new in scheduler.schedule().requests) is is_admitted
    assert (new in scheduler.waiting) is not is_admitted


def test_G02_ii_running_requests_may_grow_below_the_watermark() -> None:
    scheduler = scheduler_beside(989)
    assert scheduler.cache.num_free_blocks == 10
    run_step(scheduler)
    assert scheduler.cache.num_free_blocks == 9
    assert len(scheduler.running) == 1
    assert scheduler.num_preemptions == 0


def test_G05_i_blocks_in_use_are_not_slots_in_use() -> None:
    cache = KVCacheManager(7, 16)
    for number in range(2):
        serve(cache, Request(str(number), [number] * 17))
    usage = cache.usage()
    assert usage.held == pytest.approx(0.667, abs=5e-4)
    assert usage.filled == 17 / 32
    assert usage.held * usage.filled == pytest.approx(0.354, abs=5e-4)


def test_G05_ii_held_cached_and_free_are_three_gauges() -> None:
    cache = KVCacheManager(101, 16)
    request = Request("ended", range(960))
    serve(cache, request)
    assert cache.usage().held == 0.6
    cache.free(request)
    usage = cache.usage()
    assert (usage.held, usage.cached, usage.free) == (0.0, 0.6, 1.0)
    assert (usage.num_held, usage.num_cached, usage.num_empty) == (0, 60, 40)


def test_G05_iii_concurrency_at_full_length_is_no_limit_for_short_requests() -> None:
    cache = KVCacheManager(2_360 + 1, 16)
    assert round(cache.max_concurrency(8_192), 2) == 4.61
    assert [cache.max_blocks(length) for length in (800, 1_000)] == [50, 63]
    assert [int(cache.max_concurrency(length)) for length in (800, 1_000)] == [47, 37]
    requests = [Request(str(n), [n] * 1_000) for n in range(38)]
    served = [cache.allocate(request, 1_000) is not None for request in requests]
    assert served == [True] * 37 + [False]
