"""What a runner may answer: the scheduler refuses anything else, and nothing has changed then."""

from collections.abc import Sequence

import pytest

from kvpool import KVCacheManager, Request, UsageError
from kvpool.engine.batch import Batch
from kvpool.engine.scheduler import Scheduler, SchedulerConfig


@pytest.fixture
def scheduler() -> Scheduler:
    """One request decodes, one is in the middle of its prompt, one has just got all of its prompt scheduled."""
    scheduler = Scheduler(KVCacheManager(40, 4), SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=8))
    scheduler.add(Request("decoding", range(3), max_tokens=5))
    first = scheduler.schedule()
    scheduler.commit(first, [7])
    scheduler.add(Request("done", range(10, 13), max_tokens=5))
    scheduler.add(Request("long", range(20, 40), max_tokens=5))
    return scheduler


def state(scheduler: Scheduler) -> object:
    cache = scheduler.cache
    requests = [(r.request_id, list(r.token_ids), cache.table(r).__repr__()) for r in scheduler.running]
    return requests, list(scheduler.waiting), cache.free_block_ids(), cache.findable(), cache.num_live_requests


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([1, 2], "3 requests were computed and 2 tokens given"),
        ([1, 2, None, None], "3 requests were computed and 4 tokens given"),
        ([None, 2, None], "None is no answer"),
        ([1, None, None], "'done' has 3 of 3 tokens computed: None is no answer"),
        ([1, 2, 3], "'long' has 4 of 20 tokens computed: 3 is no answer"),
        ([-1, 2, None], "token ids are whole numbers"),
        ([1, -5, None], "token ids are whole numbers"),
        ([1, "x", None], "token ids are whole numbers"),
        ([1, 2.5, None], "token ids are whole numbers"),
        ([1, 2**63, None], "token ids are whole numbers"),
    ],
)
def test_a_wrong_answer_is_refused_and_the_right_one_still_counts(
    scheduler: Scheduler, token_ids: Sequence[int | None], message: str
) -> None:
    batch = scheduler.schedule()
    before = state(scheduler)
    with pytest.raises(UsageError, match=message):
        scheduler.commit(batch, token_ids)
    assert state(scheduler) == before
    assert scheduler.commit(batch, [1, 2, None]) == []
    scheduler.cache.check()
    assert [request.token_ids[-1] for request in scheduler.running] == [1, 2, 39]


def test_a_batch_is_committed_once_and_only_the_latest(scheduler: Scheduler) -> None:
    batch = scheduler.schedule()
    scheduler.commit(batch, [1, 2, None])
    for other in (batch, Batch()):
        with pytest.raises(UsageError, match="not the one scheduled last"):
            scheduler.commit(other, [1, 2, None])


def test_outputs_that_a_request_has_already_count(scheduler: Scheduler) -> None:
    resumed = Request("resumed", range(50, 53), max_tokens=3)
    resumed.append(1)
    resumed.append(2)
    alone = Scheduler(scheduler.cache)
    alone.add(resumed)
    batch = alone.schedule()
    assert alone.commit(batch, [9]) == [resumed]
    assert resumed.num_tokens == 6
    with pytest.raises(UsageError, match="has all 3 outputs"):
        alone.add(resumed)
