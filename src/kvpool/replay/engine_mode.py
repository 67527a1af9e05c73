"""Engine mode: the scheduler on a virtual clock, with concurrency, queueing, preemption and growing outputs.

The engine is the real one; a clock stands in place of a model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from kvpool.core.request import RequestLike
from kvpool.engine.batch import Batch
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler
from kvpool.engine.timed import TimedRunner, VirtualClock
from kvpool.errors import RefusedError
from kvpool.replay.accounts import Accounts
from kvpool.replay.intake import Intake
from kvpool.replay.journal import Journal
from kvpool.replay.outcome import report_of
from kvpool.replay.report import ReplayReport
from kvpool.replay.settings import ReplaySettings, Source
from kvpool.replay.trace import TraceRequest
from kvpool.types import BlockHash, RequestId


class EngineRun:
    """One run in engine mode."""

    def __init__(self, source: Source, settings: ReplaySettings) -> None:
        self._source = source
        self._settings = settings
        self._cache = settings.cache_for(source)
        self._block_size = self._cache.groups.unit
        self._scheduler = Scheduler(self._cache, settings.scheduler)
        self._clock = VirtualClock()
        self._runner = TimedRunner(self._clock, settings.step_time, self._next_tokens, self._checking_runner())
        self._intake = Intake(source, settings, self._block_size)
        self._accounts = Accounts(self._cache.groups)
        self._journal = Journal(settings.sample_every_s)
        self._traced: dict[RequestId, TraceRequest] = {}
        self._outputs: dict[RequestId, Sequence[int]] = {}

    def _checking_runner(self) -> CheckingRunner | None:
        return CheckingRunner(self._cache, next_tokens=self._next_tokens) if self._settings.check else None

    def _next_tokens(self, requests: Sequence[RequestLike]) -> list[int]:
        """What the trace says comes next; 0 where it does not say."""
        if not self._outputs:
            return [0] * len(requests)
        return [self._next_token(request) for request in requests]

    def _next_token(self, request: RequestLike) -> int:
        outputs = self._outputs.get(request.request_id, ())
        position = request.num_tokens - request.num_prompt_tokens
        return outputs[position] if position < len(outputs) else 0

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """Until the last request has ended, or the clock passes the stop. Time counts from the first arrival."""
        clock, engine = self._clock, Engine(self._scheduler, _Watched(self))
        arrivals = iter(requests)
        coming = next(arrivals, None)
        start_s = coming.arrival_s if coming is not None else 0.0
        while clock.now_s < self._settings.stop_at_s and (coming is not None or self._scheduler.has_work):
            while coming is not None and coming.arrival_s - start_s <= clock.now_s:
                self._arrive(coming, coming.arrival_s - start_s)
                coming = next(arrivals, None)
            if self._scheduler.has_work:
                output = engine.step()
                self._journal.stepped(output.num_tokens, output.ended, clock.now_s)
                self._forget(output.ended)
            elif coming is not None:
                self._journal.lasted(clock.now_s, coming.arrival_s - start_s, 0, 0, 0.0)
                clock.advance_to(coming.arrival_s - start_s)
        if self._settings.check:
            self._cache.check()
            assert self._cache.num_live_requests == self._scheduler.num_running, (
                "invariant 1: a request that ended holds blocks"
            )

    def _arrive(self, traced: TraceRequest, arrival_s: float) -> None:
        request = self._intake.request(traced)
        try:
            self._scheduler.add(request)
        except RefusedError:
            self._accounts.count_refused(traced, *self._prompt(request))
        else:
            self._traced[request.request_id] = traced
            if traced.output_token_ids is not None:
                self._outputs[request.request_id] = traced.output_token_ids
            self._journal.arrived(request, arrival_s)

    def _forget(self, ended: Iterable[RequestLike]) -> None:
        for request in ended:
            del self._traced[request.request_id]
            self._outputs.pop(request.request_id, None)
            self._remember(request, request.num_prompt_tokens, request.num_tokens - 1)

    def _remember(self, request: RequestLike, start: int, stop: int) -> None:
        """Tokens start .. stop - 1 of the request are computed."""
        names = request.block_hashes(self._cache.hasher)
        self._accounts.remember(names[start // self._block_size : stop // self._block_size])

    def _prompt(self, request: RequestLike) -> tuple[int, Sequence[BlockHash], int]:
        """A prompt's tokens, the names of its full blocks, and how many of them can hit."""
        size, num_tokens = self._block_size, request.num_prompt_tokens
        return num_tokens, request.block_hashes(self._cache.hasher)[: num_tokens // size], (num_tokens - 1) // size

    def admit(self, request: RequestLike, num_hit_tokens: int) -> None:
        """The scheduler admitted a request. It counts once, however often it is preempted and comes back."""
        if request.num_preemptions == 0:
            num_tokens, names, max_blocks = self._prompt(request)
            traced = self._traced[request.request_id]
            self._accounts.count(traced, num_tokens, names, num_hit_tokens // self._block_size, max_blocks)
            self._journal.admitted(request, self._clock.now_s)

    def prefilled(self, request: RequestLike, start: int, count: int) -> None:
        """A chunk of a prompt was computed."""
        self._remember(request, start, start + count)

    def run_batch(self, batch: Batch) -> Sequence[int | None]:
        """Let the batch take its time, and note the state that the engine is in meanwhile."""
        since_s = self._clock.now_s
        token_ids = self._runner.run(batch)
        running, waiting = self._scheduler.num_running, len(self._scheduler.waiting)
        held = 1 - self._cache.num_free_blocks / self._cache.num_usable_blocks
        self._journal.lasted(since_s, self._clock.now_s, running, waiting, held)
        return token_ids

    def report(self) -> ReplayReport:
        now_s, journal = self._clock.now_s, self._journal
        held = (journal.peak_held, journal.mean_held(now_s))
        return replace(
            report_of(self._source, self._settings, self._cache, self._accounts, *held),
            preemptions=self._scheduler.num_preemptions,
            preempted_tokens=self._scheduler.num_recomputed_tokens,
            timing=journal.timing(now_s),
        )


class _Watched:
    """The run's runner as the engine sees it: tells the run what is about to be computed."""

    def __init__(self, run: EngineRun) -> None:
        self._run = run

    def run(self, batch: Batch) -> Sequence[int | None]:
        first = len(batch) - batch.num_admitted
        for request, num_hit_tokens in zip(batch.requests[first:], batch.starts[first:], strict=True):
            self._run.admit(request, num_hit_tokens)
        token_ids = self._run.run_batch(batch)
        for request, start, count in islice(batch, batch.num_decoding, None):
            self._run.prefilled(request, start, count)
        return token_ids
