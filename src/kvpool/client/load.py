"""Load on a server: requests sent when they arrive, or so many at a time, and what came of each.

Knows nothing of: tables, percentiles.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvpool.client.answer import Answer, AnswerError
from kvpool.client.prompts import WORDS, Prompts
from kvpool.client.server import Server
from kvpool.errors import ConfigError, MissingExtraError
from kvpool.replay.trace import TraceRequest

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("msgspec", "client") from error

_COMPLETIONS = "/v1/completions"
_FEWEST_LETTERS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent: at their times, `speed` times as fast, or with a `concurrency` so many at a time.

    Prompts and outputs are cut at so many tokens. With `ends_early` the model may end an answer before its length.
    `separates_tenants` gives each tenant a salt of its own.
    """

    speed: float = 1.0
    concurrency: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    ends_early: bool = False
    separates_tenants: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"speed is {self.speed}: more than 0, 2 for twice as fast as the requests arrived")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one request; `error` None when it was answered. `late_s`: sent so much after it was due."""

    num_prompt: int
    late_s: float
    answer: Answer
    ended_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A server that takes the load, and how its prompts are made."""

    server: Server
    model: str
    prompts: Prompts

    def body(self, prompt: list[int] | str, num_outputs: int, load: Load, tenant: str | None = None) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_outputs,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not load.ends_early:
            fields["ignore_eos"] = True
        if load.separates_tenants and tenant is not None:
            fields["cache_salt"] = tenant
        return msgspec.json.encode(fields)


async def aim(server: Server, model: str | None, block_size: int | None, load: Load) -> Target:
    """Find out what a server serves and takes: prompts of token ids, or of words. AnswerError when it takes neither."""
    name = model or (await server.models())[0]
    try:
        ids = sorted(set(await server.tokenize(name, " ".join(WORDS))))
    except AnswerError:
        ids = []
    if len(ids) >= _FEWEST_LETTERS:
        target = Target(server, name, Prompts(ids, block_size))
        try:
            await _tried(target, ids[:_FEWEST_LETTERS], load)
        except AnswerError as error:
            if error.status not in (400, 422):
                raise
        else:
            return target
    target = Target(server, name, Prompts(WORDS, block_size))
    await _tried(target, " ".join(WORDS[:_FEWEST_LETTERS]), load)
    return target


async def drive(
    target: Target, requests: Iterable[TraceRequest], load: Load, advance: Callable[[int], None]
) -> list[Outcome]:
    """Send all requests, and wait for their ends. `advance` is told how many have ended."""
    outcomes: list[Outcome] = []
    running: set[asyncio.Task[None]] = set()

    async def send(due_s: float, request: TraceRequest, body: bytes) -> None:
        outcomes.append(await _outcome(target, request, body, due_s))
        advance(len(outcomes))

    pending = _bodies(target, requests, load)
    try:
        async for due_s, request, body in _when_due(pending, running, load):
            task = asyncio.create_task(send(due_s, request, body))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            done, _ = await asyncio.wait(running)
            for task in done:
                task.result()
    finally:
        for task in running:
            task.cancel()
    return outcomes


async def _when_due(
    pending: Iterator[tuple[TraceRequest, bytes]], running: "set[asyncio.Task[None]]", load: Load
) -> AsyncIterator[tuple[float, TraceRequest, bytes]]:
    """Each request at its time, or when there is room for it. It is made before that, so that it goes at once."""
    began_s, first_s = monotonic(), None
    for request, body in pending:
        if load.concurrency is not None:
            while len(running) >= load.concurrency:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            yield monotonic(), request, body
            continue
        first_s = request.arrival_s if first_s is None else first_s
        due_s = began_s + (request.arrival_s - first_s) / load.speed
        await asyncio.sleep(max(due_s - monotonic(), 0))
        yield due_s, request, body


def _bodies(target: Target, requests: Iterable[TraceRequest], load: Load) -> Iterator[tuple[TraceRequest, bytes]]:
    for serial, request in enumerate(requests):
        prompt = target.prompts.prompt(request, serial, load.max_prompt_tokens)
        num_outputs = min(request.num_output_tokens or 1, load.max_output_tokens or request.num_output_tokens or 1)
        yield request, target.body(prompt, num_outputs, load, request.tenant)


async def _outcome(target: Target, request: TraceRequest, body: bytes, due_s: float) -> Outcome:
    answer, error = Answer(), None
    try:
        async for _ in target.server.stream(_COMPLETIONS, body, answer):
            pass
        if answer.first_token_s is None:
            error = "the answer has neither text nor an end"
    except AnswerError as failure:
        error = str(failure)
    return Outcome(request.num_prompt_tokens, answer.sent_s - due_s, answer, monotonic(), error)


async def _tried(target: Target, prompt: list[int] | str, load: Load) -> None:
    async for _ in target.server.stream(_COMPLETIONS, target.body(prompt, 1, load), Answer()):
        pass
