"""The thread that steps: requests, cancels and resets go in through a queue, what each step gave comes out.

Owns: the scheduler, the runner and the cache, while it runs.
Knows nothing of: asyncio, texts, HTTP.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TypeAlias

from kvpool.core.manager import KVCacheManager
from kvpool.engine.batch import Batch
from kvpool.engine.engine import Engine, StepOutput
from kvpool.engine.generation import Generation
from kvpool.engine.model_runner import ModelRunner
from kvpool.engine.scheduler import Scheduler, SchedulerConfig
from kvpool.engine.step_input import StepAnswer, Worker
from kvpool.errors import AbortedError, KVPoolError, UsageError, WorkerDied
from kvpool.types import RequestId

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step gave, and what the worker told beside the tokens, by row of the step."""

    output: StepOutput
    answer: StepAnswer | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ends without its answer."""

    request_id: RequestId
    error: KVPoolError


Report: TypeAlias = Stepped | Failed


@dataclass(frozen=True, slots=True)
class Figures:
    """Where the engine stands; each figure is right at some moment of late."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_evictions: int
    num_held_blocks: int
    num_usable_blocks: int


class EngineLoop:
    """Steps on a thread of its own from `start` to `stop`. All methods may be called on any thread, and none waits.

    A step that the worker cannot compute fails its requests. When the worker died all contents are lost: the running
    requests are preempted and computed again, each of them once.
    """

    def __init__(self, cache: KVCacheManager, worker: Worker, config: SchedulerConfig | None = None) -> None:
        self.cache = cache
        self._scheduler = Scheduler(cache, config or SchedulerConfig(waits_for_prefix=True))
        self._runner = _Tried(ModelRunner(self._scheduler, worker))
        self._engine = Engine(self._scheduler, self._runner)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._tell: Callable[[Report], None] = _nobody
        self._live: dict[RequestId, Generation] = {}
        self._retried: set[RequestId] = set()
        self._is_stopping = False
        self._is_over = False
        self.can_compute = True
        """False while the worker cannot be started; each step tries again."""
        self._closing = Lock()
        self._thread = Thread(target=self._run, name="kvpool-engine", daemon=True)

    def start(self, tell: Callable[[Report], None]) -> None:
        """From now on steps are made. `tell` is called on the engine's thread and must not wait."""
        self._tell = tell
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def add(self, request: Generation) -> None:
        """The request joins the queue; nobody else touches it from now on. AbortedError when the engine has ended."""
        self._put(partial(self._add, request))

    def cancel(self, request_id: RequestId) -> None:
        """The request lets go of all it holds, and nothing more is told of it. One that has ended is passed over."""
        self._inbox.put(partial(self._cancel, request_id))

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> "Future[bool]":
        """See `Scheduler.reset_prefix_cache`. AbortedError when the engine has ended."""
        done: Future[bool] = Future()
        self._put(partial(self._reset, done, preempt_running))
        return done

    def stop(self) -> None:
        """End after the step that runs, and wait for that. What is left is told as failed."""
        self._inbox.put(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    def figures(self) -> Figures:
        cache, scheduler = self.cache, self._scheduler
        return Figures(
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=cache.stats.num_queried_tokens,
            num_hit_tokens=cache.stats.num_hit_tokens,
            num_evictions=cache.num_evictions,
            num_held_blocks=cache.num_usable_blocks - cache.num_free_blocks,
            num_usable_blocks=cache.num_usable_blocks,
        )

    # -- on the engine's thread

    def _put(self, command: Callable[[], None]) -> None:
        with self._closing:
            if self._is_over:
                raise AbortedError("the engine has ended: start the server anew")
            self._inbox.put(command)

    def _run(self) -> None:
        why = "the engine stops"
        try:
            while not self._is_stopping:
                self._take_inbox()
                if self._scheduler.has_work and not self._is_stopping:
                    self._step()
        except Exception as error:
            _LOG.exception("the engine ends by a fault of its own")
            why = f"the engine ended by a fault of its own: {error!r}"
        self._end(why)

    def _take_inbox(self) -> None:
        """Do what was asked for; wait for it when there is nothing else to do."""
        if not self._scheduler.has_work:
            self._inbox.get()()
        for command in _taken(self._inbox):
            command()

    def _step(self) -> None:
        try:
            output = self._engine.step()
        except WorkerDied as error:
            self._retry_running(error)
        except (_StepError, UsageError) as error:
            # UsageError: the answer did not fit the step, and nothing was changed.
            _LOG.error("a step of %d requests failed", len(self._runner.batch), exc_info=error)
            # Clients are not told more: what a worker raises may have been made of anybody's request.
            failed = AbortedError("the step could not be computed: the server's log says why")
            failed.__cause__ = error
            self._fail_step(failed)
        else:
            self.can_compute = True
            self._tell(Stepped(output, self._runner.inner.answer))
            for request in output.ended:
                self._forget(request.request_id)

    def _fail_step(self, error: KVPoolError) -> None:
        for request in self._runner.batch.requests:
            self._fail(request.request_id, error)

    def _retry_running(self, error: WorkerDied) -> None:
        _LOG.error("the worker died with %d requests running", self._scheduler.num_running, exc_info=error)
        self.can_compute = not error.at_start
        for request in self._scheduler.running:
            if request.request_id in self._retried:
                self._fail(request.request_id, AbortedError(f"the worker died twice under this request: {error.how}"))
            else:
                self._retried.add(request.request_id)
        was_cleared = self._scheduler.reset_prefix_cache(preempt_running=True)
        assert was_cleared, "invariant 2: nobody runs, and blocks are held"

    def _fail(self, request_id: RequestId, error: KVPoolError) -> None:
        self._tell(Failed(request_id, error))
        self._cancel(request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._live.pop(request_id, None)
        self._retried.discard(request_id)

    def _end(self, why: str) -> None:
        with self._closing:
            self._is_over = True
        error = AbortedError(why)
        for command in _taken(self._inbox):
            self._attempt(command)
        for request_id in list(self._live):
            self._attempt(partial(self._fail, request_id, error))

    def _attempt(self, act: Callable[[], None]) -> None:
        """After a fault of our own nothing is sure any more, and still everybody is told."""
        try:
            act()
        except Exception:
            _LOG.exception("the engine could not end in order")

    # -- commands

    def _add(self, request: Generation) -> None:
        try:
            self._scheduler.add(request)
        except KVPoolError as error:
            self._tell(Failed(request.request_id, error))
        else:
            self._live[request.request_id] = request

    def _cancel(self, request_id: RequestId) -> None:
        request = self._live.get(request_id)
        if request is not None:
            self._forget(request_id)
            self._scheduler.abort(request)

    def _reset(self, done: "Future[bool]", preempt_running: bool) -> None:
        if done.set_running_or_notify_cancel():
            done.set_result(self._scheduler.reset_prefix_cache(preempt_running=preempt_running))

    def _stop(self) -> None:
        self._is_stopping = True


def _nobody(_: Report) -> None:
    """Is told before the start."""


class _StepError(KVPoolError):
    """What the worker raised, as text."""


class _Tried:
    """A runner that remembers its batch, and tells the worker's errors from our own."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.batch = Batch()

    def run(self, batch: Batch) -> Sequence[int | None]:
        self.batch = batch
        try:
            return self.inner.run(batch)
        except WorkerDied:
            raise
        except Exception as error:
            raise _StepError(f"{type(error).__name__}: {error}") from error


def _taken(inbox: "SimpleQueue[Callable[[], None]]") -> Sequence[Callable[[], None]]:
    """All that is in there now."""
    taken: list[Callable[[], None]] = []
    try:
        while True:
            taken.append(inbox.get_nowait())
    except Empty:
        return taken
