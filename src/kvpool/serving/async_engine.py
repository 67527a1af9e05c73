"""The engine as asyncio programs see it: streams of outputs, and no more of them than may wait.

Owns: which request belongs to which stream, and the thread on which requests are prepared.
Knows nothing of: texts, HTTP.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TypeVar

from kvpool.core.manager import KVCacheManager
from kvpool.engine.generation import Generation
from kvpool.errors import AbortedError, ConfigError, KVPoolError, RefusedError
from kvpool.serving.engine_loop import EngineLoop, Failed, Report, Stepped
from kvpool.serving.metrics import Metrics
from kvpool.serving.stream import Finish, Output, Stream
from kvpool.types import RequestId

T = TypeVar("T")


class FullError(KVPoolError):
    """As many requests as may wait do so: come again later."""


class AsyncEngine:
    """Makes streams of an engine loop, which it starts and stops. One asyncio loop uses it.

    `max_model_len` bounds prompt and outputs of a request; never above what the cache holds for one. At most
    `max_waiting` requests are accepted and not admitted yet.
    """

    def __init__(self, loop: EngineLoop, *, max_model_len: int | None = None, max_waiting: int = 1024) -> None:
        if max_waiting < 1:
            raise ConfigError(
                f"max_waiting is {max_waiting}: at least 1, since every request waits until it is admitted"
            )
        self.max_model_len = fitting_len(loop.cache, max_model_len)
        self.max_waiting = max_waiting
        self.metrics = Metrics(loop.figures)
        self.num_waiting = 0
        self._loop = loop
        self._streams: set[Stream] = set()
        self._places: dict[RequestId, tuple[Stream, int]] = {}
        self._is_closing = False
        self._is_idle = asyncio.Event()
        self._num_inputs = 0
        self._input = ThreadPoolExecutor(1, "kvpool-input")

    async def start(self) -> None:
        here = asyncio.get_running_loop()
        self._loop.start(lambda report: _later(here, self._take, report))

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def is_serving(self) -> bool:
        return self._loop.is_alive and not self._is_closing

    @property
    def is_well(self) -> bool:
        """It serves, and as far as is known its worker computes."""
        return self.is_serving and self._loop.can_compute

    @contextmanager
    def stream(self, num_requests: int) -> Iterator[Stream]:
        """A stream with a place in the queue; what is not done when it is left is cancelled.

        FullError when too many wait, AbortedError when the engine does not serve any more.
        """
        stream = self.open(num_requests)
        try:
            yield stream
        finally:
            self.close(stream)

    def open(self, num_requests: int) -> Stream:
        """As `stream`, for whoever closes it elsewhere."""
        if not self.is_serving:
            raise AbortedError("the server stops: send the request to another one, or later")
        if self.num_waiting + num_requests > self.max_waiting:
            raise FullError(f"{self.num_waiting} requests wait and {self.max_waiting} may: send it again later")
        self.num_waiting += num_requests
        stream = Stream(num_requests, monotonic())
        self._streams.add(stream)
        self._is_idle.clear()
        return stream

    def close(self, stream: Stream) -> None:
        """Cancel what is not done. A stream may be closed twice."""
        for index in list(stream.open):
            self.cancel(stream, index)
        self.num_waiting -= len(stream.not_admitted)
        stream.not_admitted.clear()
        self._streams.discard(stream)
        if not self._streams:
            self._is_idle.set()

    def cancel(self, stream: Stream, index: int) -> None:
        """No more of this request is computed or told."""
        stream.open.discard(index)
        request_id = stream.requests[index].request_id if stream.requests else None
        if request_id in self._places:
            del self._places[request_id]
            self._loop.cancel(request_id)

    async def send(self, stream: Stream, make: Callable[[], Sequence[Generation]]) -> None:
        """Make the requests of a stream and hash their prompts on the input thread, then queue them.

        Raises what `make` raises; RefusedError when one is longer than may be.
        """
        requests = await self.on_input(lambda: self._prepared(make()))
        if stream not in self._streams:
            raise AbortedError("the server stops: send the request to another one, or later")
        stream.requests = requests
        for index, request in enumerate(requests):
            self._places[request.request_id] = (stream, index)
            self._loop.add(request)

    async def on_input(self, make: Callable[[], T]) -> T:
        """The result of what takes a while, made beside the steps. FullError when too much of it waits."""
        if self._num_inputs >= self.max_waiting:
            raise FullError(f"{self._num_inputs} requests wait to be read, {self.max_waiting} may: send it again later")
        self._num_inputs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._input, make)
        finally:
            self._num_inputs -= 1

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached content; False, and nothing changes, while requests run, unless these are preempted."""
        return await asyncio.wrap_future(self._loop.reset_prefix_cache(preempt_running=preempt_running))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Accept nothing more, let what is there go on for so long, then end what is left. May be called twice."""
        self._is_closing = True
        if self._streams:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), drain_s)
        for stream in list(self._streams):
            stream.put(AbortedError("the server stops: send the request to another one, or later"))
        await asyncio.to_thread(self._loop.stop)
        self._input.shutdown(wait=False)

    def _prepared(self, requests: Sequence[Generation]) -> Sequence[Generation]:
        for request in requests:
            self._require_fitting(request)
            request.block_hashes(self._loop.cache.hasher)
        return requests

    def _require_fitting(self, request: Generation) -> None:
        num_prompt, most = request.num_prompt_tokens, self.max_model_len
        if num_prompt >= most:
            raise RefusedError(
                f"the prompt has {num_prompt} tokens, and prompt and outputs together may have {most}: shorten it to "
                f"{most - 1} or less"
            )
        if request.max_tokens is None:
            request.max_tokens = most - num_prompt
        if num_prompt + request.max_tokens > most:
            raise RefusedError(
                f"{num_prompt} prompt tokens and max_tokens {request.max_tokens} are more than the {most} that a "
                f"request may have: ask for {most - num_prompt} or less, or shorten the prompt"
            )

    # -- what the engine tells

    def _take(self, report: Report) -> None:
        match report:
            case Failed(request_id, error):
                place = self._places.pop(request_id, None)
                if place is not None:
                    place[0].put(error)
            case Stepped():
                self._take_step(report)

    def _take_step(self, step: Stepped) -> None:
        output, batch = step.output, step.output.batch
        ended = {request.request_id for request in output.ended}
        first_admitted = len(batch) - batch.num_admitted
        now_s = monotonic()
        for row, (request, token_id) in enumerate(zip(batch.requests, output.token_ids, strict=True)):
            place = self._places.get(request.request_id)
            if place is None:
                continue
            stream, index = place
            if row >= first_admitted:
                self._admitted(stream, index, batch.starts[row])
            if step.answer is not None and row in step.answer.prompt_logprobs:
                stream.take_prompt_logprobs(index, batch.starts[row], step.answer.prompt_logprobs[row])
            if token_id is None:
                continue
            finish = None
            if request.request_id in ended:
                del self._places[request.request_id]
                finish = Finish.STOP if token_id in stream.requests[index].stop_token_ids else Finish.LENGTH
            logprobs = step.answer.logprobs.get(row) if step.answer is not None else None
            self._count(stream, index, now_s)
            stream.put(Output(index, token_id, logprobs, finish))

    def _admitted(self, stream: Stream, index: int, num_cached: int) -> None:
        """The first time counts: what a request finds when it resumes is often its own."""
        if index not in stream.not_admitted:
            return
        stream.not_admitted.discard(index)
        self.num_waiting -= 1
        stream.cached[index] = num_cached
        self.metrics.prompt_tokens.inc(stream.requests[index].num_prompt_tokens)
        self.metrics.cached_tokens.inc(num_cached)

    def _count(self, stream: Stream, index: int, now_s: float) -> None:
        waited_s = now_s - stream.token_at_s[index]
        latency = self.metrics.next_token if stream.num_tokens[index] else self.metrics.first_token
        latency.observe(waited_s)
        self.metrics.generated_tokens.inc()
        stream.num_tokens[index] += 1
        stream.token_at_s[index] = now_s


def fitting_len(cache: KVCacheManager, max_model_len: int | None) -> int:
    """The most tokens of a request, outputs included. ConfigError when the cache does not hold that for one."""
    most = cache.max_tokens() + 1
    if max_model_len is None:
        return most
    if not 2 <= max_model_len <= most:
        raise ConfigError(f"max_model_len is {max_model_len}: the cache holds 2 to {most} tokens of one request")
    return max_model_len


def _later(loop: asyncio.AbstractEventLoop, act: Callable[[Report], None], report: Report) -> None:
    loop.call_soon_threadsafe(act, report)
