"""The thread that steps: what goes in comes out, whatever the worker does, and nothing stays behind."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.serving.toy import FailingWorker, HeldWorker, ToyWorker, continued

from kvpool import KVCacheManager, RefusedError
from kvpool.engine.generation import Generation
from kvpool.engine.sampling import SamplingParams
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.engine.step_input import StepAnswer, StepInput, Worker
from kvpool.errors import AbortedError, WorkerDied
from kvpool.serving.engine_loop import EngineLoop, Failed, Report, Stepped


class Told:
    """All that a loop told."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._tokens: dict[str, list[int]] = {}
        self._ended: dict[str, str | Exception] = {}
        loop.start(self._reports.put)

    def end_of(self, request_id: str) -> str | Exception:
        """The text of a request, or what it failed with. Waits for it."""
        while request_id not in self._ended:
            self._take(self._reports.get(timeout=60))
        return self._ended[request_id]

    def _take(self, report: Report) -> None:
        if isinstance(report, Failed):
            self._ended[report.request_id] = report.error
            return
        output = report.output
        for request, token_id in zip(output.requests, output.token_ids, strict=True):
            if token_id is not None:
                self._tokens.setdefault(request.request_id, []).append(token_id)
        for request in output.ended:
            self._ended[request.request_id] = bytes(self._tokens[request.request_id]).decode()


@contextmanager
def looping(cache: KVCacheManager, worker: Worker) -> Iterator[Told]:
    loop = EngineLoop(cache, worker, SchedulerConfig(64, 16, waits_for_prefix=True))
    told = Told(loop)
    try:
        yield told
    finally:
        loop.stop()
    cache.check()
    assert cache.num_live_requests == 0
    assert cache.num_free_blocks == cache.num_usable_blocks


def request(request_id: str, prompt: str, max_tokens: int = 20) -> Generation:
    return Generation(request_id, list(prompt.encode()), max_tokens=max_tokens)


def test_many_at_once_say_what_each_says_alone() -> None:
    cache = KVCacheManager(40, 4)
    prompts = {f"r{at}": "the same beginning of all, then " + "x" * at for at in range(24)}
    with looping(cache, ToyWorker(cache)) as told:
        for request_id, prompt in prompts.items():
            told.loop.add(request(request_id, prompt))
        for request_id, prompt in prompts.items():
            assert told.end_of(request_id) == continued(prompt, 20)
        assert told.loop.figures().num_preemptions > 0
        assert told.loop.figures().num_hit_tokens > 0


def test_a_step_that_fails_fails_its_requests_and_no_others() -> None:
    cache = KVCacheManager(100, 4)
    worker = HeldWorker(FailingWorker(ToyWorker(cache), {3: RuntimeError("out of memory")}))
    with looping(cache, worker) as told:
        told.loop.add(request("a", "first"))
        worker.allow(3)
        error = told.end_of("a")
        assert isinstance(error, AbortedError)
        assert "out of memory" in str(error.__cause__)
        assert "out of memory" not in str(error)
        worker.let_go()
        told.loop.add(request("b", "second"))
        assert told.end_of("b") == continued("second", 20)


def test_an_answer_that_does_not_fit_its_step_fails_it() -> None:
    class Short:
        def execute(self, step: StepInput) -> StepAnswer:
            return StepAnswer(step.token_ids[:0], {}, {})

    cache = KVCacheManager(100, 4)
    with looping(cache, Short()) as told:
        told.loop.add(request("a", "first"))
        assert isinstance(told.end_of("a"), AbortedError)


def test_after_a_death_all_is_computed_again_and_the_text_is_the_same() -> None:
    cache = KVCacheManager(100, 4)
    with looping(cache, FailingWorker(ToyWorker(cache), {7: WorkerDied("killed")})) as told:
        for name in ("a", "b", "c"):
            told.loop.add(request(name, f"prompt of {name}"))
        for name in ("a", "b", "c"):
            assert told.end_of(name) == continued(f"prompt of {name}", 20)


def test_the_contents_of_a_dead_worker_are_not_found_again() -> None:
    cache = KVCacheManager(100, 4)
    worker = FailingWorker(ToyWorker(cache), {21: WorkerDied("killed")})
    with looping(cache, worker) as told:
        told.loop.add(request("before", "a prompt that was cached"))
        assert told.end_of("before") == continued("a prompt that was cached", 20)
        told.loop.add(request("after", "another one"))
        assert told.end_of("after") == continued("another one", 20)
        told.loop.add(request("again", "a prompt that was cached"))
        assert told.end_of("again") == continued("a prompt that was cached", 20)


def test_a_request_under_which_the_worker_died_twice_fails() -> None:
    cache = KVCacheManager(100, 4)
    worker = FailingWorker(ToyWorker(cache), {2: WorkerDied("killed"), 3: WorkerDied("killed")})
    with looping(cache, worker) as told:
        told.loop.add(request("a", "first"))
        error = told.end_of("a")
        assert isinstance(error, AbortedError)
        assert "twice" in str(error)
        told.loop.add(request("b", "second"))
        assert told.end_of("b") == continued("second", 20)


def test_what_a_dead_worker_wrote_is_told_to_nobody() -> None:
    cache = KVCacheManager(100, 4)
    how = "the worker died: exit code 3"
    died = WorkerDied(f"{how}; the last that it wrote:\nsomebody's secret", how=how)
    deaths: dict[int, Exception] = {2: died, 3: died}
    with looping(cache, FailingWorker(ToyWorker(cache), deaths)) as told:
        told.loop.add(request("a", "first"))
        assert str(told.end_of("a")) == "the worker died twice under this request: the worker died: exit code 3"


def test_it_cannot_compute_while_the_worker_cannot_be_started() -> None:
    cache = KVCacheManager(100, 4)
    deaths: dict[int, Exception] = {2: WorkerDied("killed"), 3: WorkerDied("no memory", at_start=True)}
    with looping(cache, FailingWorker(ToyWorker(cache), deaths)) as told:
        told.loop.add(request("a", "first"))
        assert "no memory" in str(told.end_of("a"))
        assert not told.loop.can_compute
        told.loop.add(request("b", "second"))
        assert told.end_of("b") == continued("second", 20)
        assert told.loop.can_compute


def test_what_can_never_fit_is_refused() -> None:
    cache = KVCacheManager(5, 4)
    with looping(cache, ToyWorker(cache)) as told:
        told.loop.add(request("a", "longer than sixteen bytes"))
        assert isinstance(told.end_of("a"), RefusedError)


def test_a_cancelled_request_frees_everything_wherever_it_is() -> None:
    cache = KVCacheManager(100, 4)
    worker = HeldWorker(ToyWorker(cache))
    with looping(cache, worker) as told:
        for at in range(20):
            told.loop.add(request(f"r{at}", f"prompt {at}", 30))
        worker.allow(5)
        for at in range(1, 20):
            told.loop.cancel(f"r{at}")
        told.loop.cancel("nobody")
        worker.let_go()
        assert told.end_of("r0") == continued("prompt 0", 30)


def test_resets_wait_for_idleness_unless_told_otherwise() -> None:
    cache = KVCacheManager(100, 4)
    worker = HeldWorker(ToyWorker(cache))
    with looping(cache, worker) as told:
        told.loop.add(request("a", "a prompt of some length"))
        worker.allow(2)
        asked = told.loop.reset_prefix_cache()
        forced = told.loop.reset_prefix_cache(preempt_running=True)
        worker.let_go()
        assert forced.result(60)
        assert told.end_of("a") == continued("a prompt of some length", 20)
        assert isinstance(asked.result(60), bool)
        assert told.loop.reset_prefix_cache().result(60)
    assert cache.findable() == set()


def test_what_is_left_at_the_end_is_told_so() -> None:
    cache = KVCacheManager(100, 4)
    worker = HeldWorker(ToyWorker(cache))
    with looping(cache, worker) as told:
        told.loop.add(request("a", "endless", 200))
        worker.allow(3)
        stopping = threading.Thread(target=told.loop.stop)
        stopping.start()
        worker.let_go()
        stopping.join(60)
        assert isinstance(told.end_of("a"), AbortedError)
        with pytest.raises(AbortedError):
            told.loop.add(request("b", "too late"))


def test_a_fault_of_our_own_ends_the_loop_and_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCacheManager(100, 4)
    loop = EngineLoop(cache, ToyWorker(cache))
    told = Told(loop)

    def broken(*_: object) -> bool:
        raise AssertionError("invariant 1")

    monkeypatch.setattr(cache, "serve", broken)
    loop.add(request("a", "first"))
    assert isinstance(told.end_of("a"), AbortedError)
    loop.stop()
    assert not loop.is_alive


def test_forks_share_the_prompt_of_the_first() -> None:
    cache = KVCacheManager(100, 4)
    prompt = "a prompt that is computed once"
    with looping(cache, ToyWorker(cache)) as told:
        for at in range(4):
            sampling = SamplingParams(seed=5 + at)
            told.loop.add(Generation(f"r{at}", list(prompt.encode()), sampling, max_tokens=12))
        texts = [told.end_of(f"r{at}") for at in range(4)]
        assert texts == [continued(prompt, 12, 5 + at) for at in range(4)]
        assert told.loop.figures().num_hit_tokens == 3 * 28


def test_steps_tell_what_the_worker_told() -> None:
    cache = KVCacheManager(100, 4)
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    loop = EngineLoop(cache, ToyWorker(cache))
    loop.start(reports.put)
    loop.add(Generation("a", [1, 2, 3], SamplingParams(num_logprobs=2), max_tokens=1))
    report = reports.get(timeout=60)
    loop.stop()
    assert isinstance(report, Stepped)
    assert report.answer is not None
    assert len(report.answer.logprobs[0].top) == 2
