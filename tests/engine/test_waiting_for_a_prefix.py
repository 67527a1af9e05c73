"""What many ask for at once is computed once: `SchedulerConfig(waits_for_prefix=True)`."""

import pytest

from kvpool import KVCacheManager, Request
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler, SchedulerConfig

PREFIX = list(range(100, 140))


def engine(*, waits: bool, budget: int = 256, num_blocks: int = 200) -> Engine:
    cache = KVCacheManager(num_blocks, 4)
    scheduler = Scheduler(cache, SchedulerConfig(budget, 16, waits_for_prefix=waits))
    return Engine(scheduler, CheckingRunner(cache))


def add(engine: Engine, number: int, prompt: list[int], **keywords: object) -> Request:
    request = Request(f"r{number}", prompt, max_tokens=3, **keywords)  # type: ignore[arg-type]
    engine.scheduler.add(request)
    return request


def num_computed(engine: Engine) -> int:
    """Prompt tokens that were computed until there is no more work."""
    total = 0
    while engine.scheduler.has_work:
        batch = engine.scheduler.schedule()
        total += sum(batch.counts[batch.num_decoding :])
        engine.scheduler.commit(batch, engine.runner.run(batch))
    engine.scheduler.cache.check()
    return total


@pytest.mark.parametrize("budget", [7, 16, 256])
def test_a_shared_prefix_is_computed_once(budget: int) -> None:
    told = {waits: engine(waits=waits, budget=max(budget, 16)) for waits in (False, True)}
    for each in told.values():
        for number in range(5):
            add(each, number, [*PREFIX, number])
    assert num_computed(told[True]) == 40 + 5
    if budget == 256:
        assert num_computed(told[False]) == 5 * 41


def test_others_do_not_wait() -> None:
    made = engine(waits=True)
    first, twin = add(made, 0, [*PREFIX, 1]), add(made, 1, [*PREFIX, 2])
    other = add(made, 2, list(range(30)))
    assert made.scheduler.schedule().requests == [first, other]
    assert list(made.scheduler.waiting) == [twin]


def test_a_request_that_finds_nothing_by_right_does_not_wait() -> None:
    made = engine(waits=True)
    first = add(made, 0, PREFIX)
    salted = add(made, 1, PREFIX, cache_salt="mine")
    apart = add(made, 2, PREFIX, reads_cache=False)
    assert made.scheduler.schedule().requests == [first, salted, apart]


def test_those_that_wait_keep_their_order_and_go_on_when_the_other_is_gone() -> None:
    made = engine(waits=True)
    first = add(made, 0, PREFIX)
    waiting = [add(made, number, PREFIX) for number in range(1, 4)]
    made.scheduler.schedule()
    assert list(made.scheduler.waiting) == waiting
    made.scheduler.abort(first)
    batch = made.scheduler.schedule()
    assert batch.requests == waiting[:1]
    assert list(made.scheduler.waiting) == waiting[1:]
    made.scheduler.commit(batch, made.runner.run(batch))
    assert made.scheduler.schedule().requests == waiting


def test_a_last_token_is_nothing_to_wait_for() -> None:
    """It is computed anyway: a block that ends with it would not be read."""
    made = engine(waits=True)
    both = [add(made, number, PREFIX[:4]) for number in range(2)]
    assert made.scheduler.schedule().requests == both
