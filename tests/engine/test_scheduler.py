"""The scheduler: rules one by one, and random workloads in tiny pools under the checking runner."""

import random
from collections.abc import Callable

import pytest

from kvpool import ConfigError, KVCacheManager, RefusedError, Request, RequestLike, UsageError
from kvpool.engine.batch import Batch
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler, SchedulerConfig

NUM_WORKLOADS, NUM_DEEP_WORKLOADS = 300, 10_000


def engine_of(num_blocks: int, block_size: int, config: SchedulerConfig | None = None) -> Engine:
    cache = KVCacheManager(num_blocks, block_size)
    return Engine(Scheduler(cache, config), CheckingRunner(cache))


def generated_alone(prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of a request that nobody disturbs: what the checking runner's echo gives."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append((tokens[-1] * 31 + len(tokens)) % 32_000)
    return tokens


# -- random workloads


class Workload:
    """Requests with shared prefixes that arrive over time, some of them aborted, some too long for the pool."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        num_seqs = rng.randint(1, 6)
        self.config = SchedulerConfig(num_seqs + rng.randint(0, 15), num_seqs, rng.choice([0.0, 0.1, 0.3]))
        self.engine = engine_of(rng.randint(3, 15), rng.randint(1, 5), self.config)
        self.scheduler, self.cache = self.engine.scheduler, self.engine.scheduler.cache
        self.families = [[rng.randrange(3) for _ in range(20)] for _ in range(2)]
        self.expected: dict[Request, list[int]] = {}
        self.ended: set[RequestLike] = set()
        self.num_arrived = 0
        self.num_refused = 0

    def arrive(self) -> None:
        prompt = [*self.rng.choice(self.families)[: self.rng.randint(1, 20)], self.rng.randrange(3)]
        max_tokens, salt = self.rng.randint(1, 12), self.rng.choice([None, None, "s"])
        self.num_arrived += 1
        request = Request(str(self.num_arrived), prompt, cache_salt=salt, max_tokens=max_tokens)
        needed = -(-(len(prompt) + max_tokens - 1) // self.cache.block_size)
        if needed <= self.cache.num_usable_blocks:
            self.scheduler.add(request)
            self.expected[request] = generated_alone(prompt, max_tokens)
            return
        numbers = f"{len(prompt)} prompt tokens and up to {max_tokens} outputs need {needed} blocks, the pool has"
        with pytest.raises(RefusedError, match=f"{numbers} {self.cache.num_usable_blocks}"):
            self.scheduler.add(request)
        self.num_refused += 1

    def abort(self) -> None:
        request = self.rng.choice([request for request in self.expected if request not in self.ended])
        self.scheduler.abort(request)
        del self.expected[request]
        assert self.cache.table(request) is None

    def step(self) -> None:
        """One step; sometimes a request is aborted, or all are preempted, while the batch is in flight."""
        if not self.scheduler.has_work:
            return
        before = {request: request.num_preemptions for request in self.scheduler.running}
        batch = self.scheduler.schedule()
        if any(request.num_preemptions > count for request, count in before.items()):
            assert batch.num_admitted == 0, "nobody is admitted in a step that preempted"
            assert set(self.scheduler.running) <= set(before)
        token_ids = self.engine.runner.run(batch)
        self.disturb()
        self.ended |= set(self.scheduler.commit(batch, token_ids))
        self.check()

    def disturb(self) -> None:
        if self.rng.random() < 0.03 and len(self.ended) < len(self.expected):
            self.abort()
        if self.rng.random() < 0.01:
            assert self.scheduler.reset_prefix_cache(preempt_running=True)
            assert self.cache.findable() == set()

    def check(self) -> None:
        self.cache.check()
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        numbers = [int(request.request_id) for request in [*self.scheduler.running, *self.scheduler.waiting]]
        assert numbers == sorted(numbers), "first come, first served"
        assert self.cache.num_live_requests == len(self.scheduler.running)

    def run(self) -> None:
        for _ in range(60):
            self.rng.choice([self.arrive, self.step, self.step])()
            self.disturb()
        num_steps = 0
        while self.scheduler.has_work:
            self.step()
            num_steps += 1
            assert num_steps < 10_000, f"{self.scheduler.waiting} wait for ever"
        self.check_end()

    def check_end(self) -> None:
        assert self.ended == set(self.expected)
        for request, tokens in self.expected.items():
            assert request.token_ids == tokens, f"request {request.request_id} went another way than alone"
        assert self.cache.num_free_blocks == self.cache.num_usable_blocks
        assert len(self.engine.scheduler.schedule()) == 0


class BudgetedRunner(CheckingRunner):
    """Also checks what a batch is: within the budget, every start where the computed tokens end, room for all."""

    def __init__(self, cache: KVCacheManager, config: SchedulerConfig) -> None:
        super().__init__(cache)
        self.cache, self.config = cache, config

    def run(self, batch: Batch) -> list[int | None]:
        assert 0 < sum(batch.counts) <= self.config.max_num_batched_tokens
        assert min(batch.counts) > 0
        for row, (request, start, count) in enumerate(batch):
            table = self.cache.table(request)
            assert table is not None
            assert start == (request.num_tokens - 1 if row < batch.num_decoding else table.num_computed)
            assert start + count <= min(table.num_slots, request.num_tokens)
        return super().run(batch)


def run_workload(seed: int, index: int) -> Workload:
    workload = Workload(random.Random(f"{seed}/{index}"))
    workload.engine.runner = BudgetedRunner(workload.cache, workload.config)
    try:
        workload.run()
    except Exception as error:
        error.add_note(f"--seed {seed}, workload {index}")
        raise
    return workload


def test_every_request_of_a_random_workload_ends_as_if_alone(seed: int, request: pytest.FixtureRequest) -> None:
    count = NUM_DEEP_WORKLOADS if request.config.getoption("--deep") else NUM_WORKLOADS
    workloads = [run_workload(seed, index) for index in range(count)]
    assert sum(workload.scheduler.num_preemptions for workload in workloads) > count / 2
    assert sum(workload.cache.stats.num_hit_tokens for workload in workloads) > count
    assert sum(workload.cache.stats.num_resumed_requests for workload in workloads) > count / 2
    assert sum(workload.num_refused for workload in workloads) > count


# -- rules


def test_running_requests_go_first_and_prompts_come_in_chunks() -> None:
    engine = engine_of(20, 4, SchedulerConfig(max_num_batched_tokens=6, max_num_seqs=6))
    a, b = Request("a", range(8), max_tokens=3), Request("b", range(50, 60), max_tokens=3)
    batches = []
    for request in (a, b):
        engine.scheduler.add(request)
    for _ in range(4):
        batch = engine.scheduler.schedule()
        batches.append(list(batch))
        engine.scheduler.commit(batch, engine.runner.run(batch))
    assert batches == [
        [(a, 0, 6)],
        [(a, 6, 2), (b, 0, 4)],
        [(a, 8, 1), (b, 4, 5)],
        [(a, 9, 1), (b, 9, 1)],
    ]


def test_a_hit_is_known_before_tokens_are_scheduled() -> None:
    engine = engine_of(20, 4)
    engine.scheduler.add(Request("a", range(9), max_tokens=1))
    engine.step()
    b = Request("b", range(9), max_tokens=1)
    engine.scheduler.add(b)
    assert list(engine.scheduler.schedule()) == [(b, 8, 1)]


def test_a_prefix_is_shared_while_its_first_request_still_runs() -> None:
    """The prompt's full blocks can be found right after its prefill, before its unfilled block is full."""
    engine = engine_of(20, 4)
    engine.scheduler.add(Request("a", range(10), max_tokens=9))
    engine.step()
    b = Request("b", range(10), max_tokens=9)
    engine.scheduler.add(b)
    assert list(engine.scheduler.schedule())[1] == (b, 8, 2)


def test_no_more_run_than_max_num_seqs() -> None:
    engine = engine_of(20, 4, SchedulerConfig(max_num_seqs=2))
    for name in "abc":
        engine.scheduler.add(Request(name, [1, 2], max_tokens=2))
    steps = [engine.step() for _ in range(3)]
    assert [[request.request_id for request in step.requests] for step in steps] == [["a", "b"], ["a", "b"], ["c"]]
    assert [[request.request_id for request in step.ended] for step in steps] == [[], ["a", "b"], []]


def test_the_newest_is_preempted_waits_first_and_resumes_with_what_is_cached() -> None:
    """Four usable blocks of two tokens; both need a third block for their fifth token."""
    engine = engine_of(5, 2)
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    a, b, c = (Request(name, [n] * 3, max_tokens=4) for n, name in enumerate("abc"))
    for request in (a, b, c):
        scheduler.add(request)
    engine.step()
    assert scheduler.running == [a, b]
    engine.step()
    engine.step()
    assert scheduler.running == [a]
    assert list(scheduler.waiting) == [b, c]
    assert (a.num_preemptions, b.num_preemptions, scheduler.num_preemptions) == (0, 1, 1)
    assert b.num_tokens == 5
    while scheduler.has_work:
        engine.step()
    assert [r.token_ids for r in (a, b, c)] == [generated_alone([n] * 3, 4) for n in range(3)]
    assert cache.stats.num_resumed_requests == 1
    assert cache.stats.num_resumed_queried_tokens == 5


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"), [(16, 1, True), (15, 2, True), (16, 2, False), (17, 1, False)]
)
def test_the_last_token_needs_no_slot(num_prompt: int, max_tokens: int, fits: bool) -> None:
    engine = engine_of(5, 4)
    request = Request("r", range(num_prompt), max_tokens=max_tokens)
    if fits:
        engine.scheduler.add(request)
        while engine.scheduler.has_work:
            engine.step()
        assert request.num_tokens == num_prompt + max_tokens
        assert engine.scheduler.num_preemptions == 0
    else:
        numbers = f"{num_prompt} prompt tokens and up to {max_tokens} outputs need 5 blocks, the pool has 4"
        with pytest.raises(RefusedError, match=f"'r' can never fit: its {numbers}"):
            engine.scheduler.add(request)
        assert not engine.scheduler.has_work


def test_a_refused_id_may_be_used_again() -> None:
    scheduler = engine_of(5, 4).scheduler
    with pytest.raises(RefusedError):
        scheduler.add(Request("r", range(99)))
    scheduler.add(Request("r", range(9)))


def test_two_requests_of_one_id_are_refused_until_the_first_ended() -> None:
    engine = engine_of(9, 4)
    engine.scheduler.add(Request("r", range(4), max_tokens=2))
    for _ in range(2):
        with pytest.raises(UsageError, match="'r' is waiting or running already"):
            engine.scheduler.add(Request("r", range(4), max_tokens=2))
        engine.step()
    engine.scheduler.add(Request("r", range(4), max_tokens=2))


def test_a_waiting_and_a_running_request_can_be_aborted_once() -> None:
    engine = engine_of(9, 4, SchedulerConfig(max_num_seqs=1))
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    running, waiting = Request("running", range(6), max_tokens=9), Request("waiting", range(6), max_tokens=9)
    scheduler.add(running)
    scheduler.add(waiting)
    engine.step()
    for request in (running, waiting):
        scheduler.abort(request)
        with pytest.raises(UsageError, match="is neither waiting nor running"):
            scheduler.abort(request)
    assert not scheduler.has_work
    assert cache.num_free_blocks == cache.num_usable_blocks
    assert len(cache.findable()) == 1
    scheduler.add(Request("running", range(6), max_tokens=1))


def test_an_abort_in_the_middle_of_a_prefill_leaves_what_was_computed() -> None:
    engine = engine_of(9, 4, SchedulerConfig(max_num_batched_tokens=6, max_num_seqs=6))
    request = Request("r", range(16), max_tokens=1)
    engine.scheduler.add(request)
    engine.step()
    engine.scheduler.abort(request)
    assert engine.scheduler.cache.findable() == {request.block_hashes(engine.scheduler.cache.hasher)[0]}


def test_what_leaves_while_its_batch_is_in_flight_is_passed_over() -> None:
    engine = engine_of(20, 4)
    scheduler = engine.scheduler
    decoding, other, new = (Request(name, [n] * 5, max_tokens=9) for n, name in enumerate(("decoding", "other", "new")))
    scheduler.add(decoding)
    scheduler.add(other)
    engine.step()
    scheduler.add(new)
    batch = scheduler.schedule()
    assert batch.requests == [decoding, other, new]
    scheduler.abort(decoding)
    scheduler.abort(new)
    assert scheduler.commit(batch, [1, 2, 3]) == []
    assert (decoding.num_tokens, other.num_tokens, new.num_tokens) == (6, 7, 5)
    assert other.token_ids[-1] == 2
    assert scheduler.running == [other]
    scheduler.cache.check()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SchedulerConfig(max_num_batched_tokens=0), "max_num_batched_tokens is 0: at least 1"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs is 0: at least 1"),
        (lambda: SchedulerConfig(6, 7), "max_num_batched_tokens is 6, below max_num_seqs 7"),
        (lambda: SchedulerConfig(watermark=1.0), "watermark is 1.0: a share from 0 up to"),
        (lambda: SchedulerConfig(watermark=-0.1), "watermark is -0.1: a share from 0 up to"),
    ],
)
def test_a_scheduler_that_could_never_finish_is_refused(make: Callable[[], SchedulerConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
