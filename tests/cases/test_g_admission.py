"""Cases of group G about requests that are never admitted: none waits for ever beside an empty engine."""
# ruff: noqa: N802

import random
from collections.abc import Sequence

import pytest

from kvpool import FullAttention, KVCacheManager, LayerKind, RefusedError, Request, SlidingWindow, StateSpace
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler, SchedulerConfig
from kvpool.plan.grouping import group_layers
from kvpool.plan.kinds import cdiv
from kvpool.plan.spec import Attention

NUM_BLOCKS = 14_022


def _kinds() -> Sequence[LayerKind]:
    """30 layers, every sixth full: blocks of 16 in windows of 1,024, of 32 in full layers, so that pages are equal."""
    window = Attention(num_kv_heads=8, head_dim=256, kind=SlidingWindow(1_024))
    full = Attention(num_kv_heads=2, head_dim=512)
    layout = group_layers([*[window] * 5, full] * 5)
    assert [len(group.layers) for group in layout.groups] == [5] * 6
    assert sorted(kind.block_size or 0 for kind in layout.kinds) == [16] * 5 + [32]
    assert str(layout.waste) == "no padding layers"
    return layout.kinds


def _cache() -> KVCacheManager:
    return KVCacheManager(NUM_BLOCKS, 16, _kinds(), max_in_flight_tokens=2_048)


def test_G01_the_pool_is_sized_for_1_53_requests_of_full_length() -> None:
    """8,192 blocks in the full group, 193 in each of five windows; a count without groups would say 37,392 tokens."""
    cache = _cache()
    assert cache.max_blocks(262_144) == 8_192 + 5 * 193 == 9_157
    assert round(cache.max_concurrency(262_144), 2) == round(NUM_BLOCKS / 9_157, 2) == 1.53
    assert NUM_BLOCKS // 6 * 16 == 37_392


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(40_784, 2_240), (40_800, 2_240), (100_000, 4_090), (262_144, 9_157)]
)
def test_G01_a_prompt_is_admitted_by_what_its_windows_hold_and_runs_within_it(num_tokens: int, num_blocks: int) -> None:
    """A gate that counts windows in full would admit 40,784 tokens, and wait for ever with one token more."""
    cache = _cache()
    uncapped = cdiv(num_tokens, 32) + 5 * cdiv(num_tokens, 16)
    assert (uncapped <= NUM_BLOCKS - 1) is (num_tokens <= 40_784)
    assert uncapped > num_blocks
    assert cache.max_blocks(num_tokens) == num_blocks

    scheduler = Scheduler(cache, SchedulerConfig(max_num_batched_tokens=2_048))
    request = Request("R", range(num_tokens), max_tokens=1)
    assert cache.num_blocks_to_finish(request, num_tokens) == num_blocks
    scheduler.add(request)
    held = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch.requests == [request]
        held.append(cache.num_usable_blocks - cache.num_free_blocks)
        scheduler.commit(batch, [7 if batch.starts[0] + batch.counts[0] == num_tokens else None])
    assert len(held) == cdiv(num_tokens, 2_048)
    assert max(held) <= num_blocks
    assert scheduler.num_preemptions == 0
    assert request.num_tokens == num_tokens + 1
    cache.check()


def test_G01_the_uncapped_gate_ends_at_40_784() -> None:
    """The limit that prompts ran into, as a fact about the numbers."""
    fits = [n for n in range(40_000, 42_000) if cdiv(n, 32) + 5 * cdiv(n, 16) <= NUM_BLOCKS - 1]
    assert fits[-1] == 40_784


def test_G01_what_can_never_fit_is_refused_at_once() -> None:
    """14,021 blocks less five windows leave 13,056 of 32 tokens: 417,792, and not one more, outputs included."""
    cache = _cache()
    scheduler = Scheduler(cache, SchedulerConfig(max_num_batched_tokens=2_048))
    assert cache.max_tokens() == (NUM_BLOCKS - 1 - 5 * 193) * 32 == 417_792
    with pytest.raises(
        RefusedError,
        match=r"417793 prompt tokens .* need 14022 blocks with up to 2048 tokens in flight, the pool has 14021",
    ):
        scheduler.add(Request("long", range(417_793), max_tokens=1))
    with pytest.raises(RefusedError, match="need 14022 blocks with up to 2048 tokens in flight, the pool has 14021"):
        scheduler.add(Request("talkative", range(100_000), max_tokens=317_794))
    with pytest.raises(RefusedError, match="417793 prompt tokens"):
        scheduler.add(Request("open end", range(417_793)))
    assert not scheduler.has_work
    # The last token that is sampled is never computed.
    scheduler.add(Request("just fits", range(100_000), max_tokens=317_793))
    assert len(scheduler.schedule()) == 1


@pytest.mark.parametrize("num_blocks", [11, 12, 13, 16, 20, 40])
def test_G01_a_request_is_refused_or_it_runs(num_blocks: int) -> None:
    """Prompts of every length, one at a time in a small pool: one function says what fits, and keeps its word."""
    kinds: list[LayerKind] = [FullAttention(block_size=8), SlidingWindow(10), SlidingWindow(7)]
    for num_tokens in range(1, 120):
        cache = KVCacheManager(num_blocks, 4, kinds, max_in_flight_tokens=8)
        scheduler = Scheduler(cache, SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4))
        engine = Engine(scheduler, CheckingRunner(cache))
        request = Request("R", range(num_tokens), max_tokens=5)
        fits = cache.max_blocks(num_tokens + 4) <= num_blocks - 1
        assert fits is (num_tokens + 4 <= cache.max_tokens())
        if not fits:
            with pytest.raises(RefusedError):
                scheduler.add(request)
            assert not scheduler.has_work
            continue
        scheduler.add(request)
        while scheduler.has_work:
            assert engine.step().requests == [request]
        assert request.num_tokens == num_tokens + 5
        assert scheduler.num_preemptions == 0


A_LOADABLE, B_LOADABLE = 8_192, 11_776


def test_G03_a_load_is_not_begun_where_the_rest_of_another_would_not_fit() -> None:
    """A needs 1,600 blocks and loads 512 of them, B needs 1,200 and would load 736: 2,047 are too few for both.

    A reserves all of its blocks, which leaves 447. It runs and ends, then B.
    """
    cache = KVCacheManager(2_048, 16)
    a, b = Request("A", range(25_596), max_tokens=1), Request("B", [1] * 19_196, max_tokens=1)
    assert [cache.max_blocks(request.num_tokens) for request in (a, b)] == [1_600, 1_200]
    # Without a reservation: both loads would end, and leave too little for A, at the head, and enough for B.
    assert 2_047 - 512 - 736 == 799 < 1_600 - 512
    assert 1_200 - 736 == 464 <= 799

    loadable = {"A": A_LOADABLE, "B": B_LOADABLE}
    scheduler = Scheduler(cache, num_loadable=lambda request, start: loadable[request.request_id] - start)
    scheduler.add(a)
    scheduler.add(b)
    batch = scheduler.schedule()
    assert (batch.loads, len(batch)) == ([(a, 0, 8_192)], 0)
    assert (scheduler.loading, list(scheduler.waiting)) == ([a], [b])
    assert cache.num_free_blocks == 2_047 - 512
    assert scheduler._num_reserved() == 1_600 - 512
    assert cache.num_free_blocks - scheduler._num_reserved() == 447
    scheduler.commit(batch, [])
    batch = scheduler.schedule()
    assert (batch.loads, len(batch)) == ([], 0)
    scheduler.commit(batch, [])

    scheduler.loaded(a)
    steps = []
    while a in scheduler.running:
        batch = scheduler.schedule()
        assert batch.requests == [a]
        assert batch.loads == []
        steps += list(zip(batch.starts, batch.counts, strict=True))
        is_done = batch.starts[0] + batch.counts[0] == 25_596
        scheduler.commit(batch, [7 if is_done else None])
    assert steps == [(8_192, 8_192), (16_384, 8_192), (24_576, 1_020)]

    batch = scheduler.schedule()
    assert (batch.loads, len(batch)) == ([(b, 0, 11_776)], 0)
    assert cache.num_free_blocks == 2_047 - 736
    scheduler.commit(batch, [])
    scheduler.loaded(b)
    batch = scheduler.schedule()
    assert list(batch) == [(b, 11_776, 19_196 - 11_776)]
    assert scheduler.commit(batch, [7]) == [b]
    assert not scheduler.has_work
    assert scheduler.num_preemptions == 0
    cache.check()


@pytest.mark.parametrize("ends", ["load_failed", "abort"])
def test_G03_a_load_that_does_not_end_well_gives_its_reservation_back(ends: str) -> None:
    """A's load fails: it is computed instead, and B waits for it. Or A is aborted: B goes on at once."""
    cache = KVCacheManager(2_048, 16)
    a, b = Request("A", range(25_596), max_tokens=1), Request("B", [1] * 19_196, max_tokens=1)
    loadable = {"A": A_LOADABLE, "B": B_LOADABLE}
    scheduler = Scheduler(cache, num_loadable=lambda request, start: loadable[request.request_id] - start)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.commit(scheduler.schedule(), [])
    getattr(scheduler, ends)(a)
    assert cache.num_free_blocks == 2_047
    batch = scheduler.schedule()
    if ends == "abort":
        assert (batch.loads, len(batch)) == ([(b, 0, 11_776)], 0)
    else:
        assert (batch.loads, list(batch)) == ([], [(a, 0, 8_192)])
        assert list(scheduler.waiting) == [b]


def test_G03_a_prompt_whose_step_ends_at_a_checkpoint_keeps_its_room() -> None:
    """A's first step ends early, which leaves budget for B; but the two prompts do not fit side by side."""
    cache = KVCacheManager(17, 4, [StateSpace(checkpoints=8), FullAttention()], max_in_flight_tokens=16)
    a, b = Request("A", range(40), max_tokens=1), Request("B", [1] * 40, max_tokens=1)
    scheduler = Scheduler(cache, SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8))
    engine = Engine(scheduler, CheckingRunner(cache))
    scheduler.add(a)
    scheduler.add(b)
    while scheduler.has_work:
        assert len(engine.step().requests) == 1
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("watermark", [0.0, 0.2])
@pytest.mark.parametrize(
    "kinds",
    [[FullAttention()], [FullAttention(), SlidingWindow(9)], [FullAttention(block_size=8), SlidingWindow(9)]],
    ids=["full", "full and window", "two block sizes"],
)
def test_G03_with_nothing_running_some_request_can_move(
    kinds: Sequence[LayerKind], watermark: float, rng: random.Random
) -> None:
    """A random walk: requests arrive, some with tokens from outside; loads end in any order, late, well or not.

    A step with nothing running before it begins something when anybody waits. One in which somebody holds blocks, and
    waits for nothing from outside, computes something, or preempts. All that arrived end, with what was to be said.
    """
    for number in range(12):
        _walk(rng, kinds, watermark, num_blocks=rng.randint(16, 40), name=f"{number}")


def _walk(rng: random.Random, kinds: Sequence[LayerKind], watermark: float, num_blocks: int, name: str) -> None:
    cache = KVCacheManager(num_blocks, 4, kinds, max_in_flight_tokens=16)
    loadable: dict[str, int] = {}
    scheduler = Scheduler(
        cache,
        SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=6, watermark=watermark),
        lambda request, start: max(loadable[request.request_id] - start, 0),
    )
    runner = CheckingRunner(cache)
    added: list[Request] = []
    left, num_steps = 25, 0
    while left or scheduler.has_work:
        while left and rng.random() < 0.4:
            left -= 1
            prompt = [*range(rng.randint(0, 20)), *rng.choices(range(100, 200), k=rng.randint(1, 30))]
            request = Request(f"{name}/{left}", prompt, max_tokens=rng.randint(1, 12))
            loadable[request.request_id] = rng.choice((0, 0, 8, 16, 40))
            try:
                scheduler.add(request)
            except RefusedError:
                assert cache.max_blocks(len(prompt) + (request.max_tokens or 0) - 1) > num_blocks - 1
            else:
                added.append(request)
        for loading in rng.sample(scheduler.loading, len(scheduler.loading)):
            if rng.random() < 0.3:
                (scheduler.load_failed if rng.random() < 0.3 else scheduler.loaded)(loading)
        if rng.random() < 0.05:
            scheduler.invalidate(rng.sample(range(num_blocks), 2))
        is_idle, num_loading, preemptions = not scheduler.num_running, len(scheduler.loading), scheduler.num_preemptions
        is_waiting_only = scheduler.num_running == num_loading
        batch = scheduler.schedule()
        if not len(batch) and not batch.loads:
            assert not (is_idle and scheduler.waiting), "nothing runs, and nobody moves"
            assert is_waiting_only or scheduler.num_preemptions > preemptions, "somebody could move, and nobody did"
        cache.check()
        scheduler.commit(batch, runner.run(batch))
        num_steps += 1
        assert num_steps < 5_000, "the walk does not end"
    assert [request.num_tokens - request.num_prompt_tokens for request in added] == [r.max_tokens for r in added]
    assert cache.num_free_blocks == num_blocks - 1
    cache.check()
