"""Traffic for when there is no trace: seeded, with real token ids, in the shapes that serving meets.

Knows nothing of: the cache. It yields what a trace reader yields.

The same name, seed and parameters give the same requests on every machine.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import ClassVar

import numpy as np

from kvpool.errors import ConfigError
from kvpool.replay.trace import TraceRequest

_VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_requests` requests of one kind, sessions arriving at `rate` a second.

    Kinds: `oneshot` (unrelated prompts), `system` (one question behind one of a few long system prompts), `chat`
    (multi-turn conversations behind system prompts), `agents` (contexts that grow by tool results at short intervals),
    `mixed` (all of them, each its own tenant). Arrivals of sessions are `poisson`, or `bursty`: groups at once.
    """

    name: str = "mixed"
    seed: int = 0
    num_requests: int = 2000
    rate: float = 2.0
    arrivals: str = "poisson"

    format: ClassVar[str] = "workload"
    block_size: ClassVar[None] = None

    def __post_init__(self) -> None:
        for what, value, known in (("workload", self.name, KINDS), ("arrivals", self.arrivals, ARRIVALS)):
            if value not in known:
                raise ConfigError(f"{what} {value!r} is not known: one of {', '.join(known)}")
        if self.num_requests < 1:
            raise ConfigError(f"num_requests is {self.num_requests}: at least 1")
        if not 1e-9 <= self.rate <= 1e9:
            raise ConfigError(f"rate is {self.rate}: sessions a second, from 1e-9 to 1e9")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}: a whole number, 0 or more")

    @property
    def num_skipped(self) -> int:
        """Bad lines: a generator has none."""
        return 0

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests in order of arrival, the first at 0 s."""
        first_s: float | None = None
        for number, request in enumerate(islice(self._by_arrival(), self.num_requests)):
            first_s = request.arrival_s if first_s is None else first_s
            yield request._replace(request_id=f"{self.name}-{number}", arrival_s=request.arrival_s - first_s)

    def _by_arrival(self) -> Iterator[TraceRequest]:
        """The requests of all sessions, without end: those that are due before the next session starts go first."""
        text, rng = _Text(self.seed), random.Random(self.seed)
        pending: list[tuple[float, int, TraceRequest]] = []
        tie = count()
        for number, start_s in enumerate(ARRIVALS[self.arrivals](rng, self.rate)):
            while pending and pending[0][0] <= start_s:
                yield heapq.heappop(pending)[2]
            for request in KINDS[self.name](_Session(rng, text, start_s, f"s{number}")):
                heapq.heappush(pending, (request.arrival_s, next(tie), request))


class _Text:
    """Token ids that mean nothing: fresh ones, and a few fixed system prompts."""

    def __init__(self, seed: int) -> None:
        self._numbers = np.random.default_rng(seed)
        self.system_prompts = [self.fresh(length) for length in (400, 900, 1700, 3000)]

    def fresh(self, num_tokens: int) -> list[int]:
        tokens: list[int] = self._numbers.integers(_VOCABULARY, size=num_tokens).tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class _Session:
    rng: random.Random
    text: _Text
    start_s: float
    session_id: str

    def length(self, median: float, spread: float = 0.6, limit: int = 16_000) -> int:
        """A log-normal number of tokens, as real lengths are."""
        return max(1, min(limit, int(median * self.rng.lognormvariate(0, spread))))

    def system_prompt(self) -> list[int]:
        return self.rng.choices(self.text.system_prompts, (8, 4, 2, 1))[0]

    def request(
        self, at_s: float, prompt: list[int], output: list[int], turn: int = 0, tenant: str | None = None
    ) -> TraceRequest:
        return TraceRequest(
            request_id="",
            arrival_s=at_s,
            num_prompt_tokens=len(prompt),
            num_output_tokens=len(output),
            prompt_token_ids=prompt,
            output_token_ids=output,
            tenant=tenant,
            session=self.session_id,
            turn=turn,
        )

    def turns(
        self, context: list[int], num_turns: int, new_tokens: float, output_tokens: float, pause_s: float
    ) -> list[TraceRequest]:
        """Each turn sends all that was said so far, and something new."""
        at_s, made = self.start_s, []
        for turn in range(num_turns):
            prompt = context + self.text.fresh(self.length(new_tokens))
            output = self.text.fresh(self.length(output_tokens, limit=1_000))
            made.append(self.request(at_s, prompt, output, turn))
            context = prompt + output
            at_s += self.rng.expovariate(1 / pause_s) + len(output) * 0.02
        return made


def _oneshot(session: _Session) -> list[TraceRequest]:
    prompt = session.text.fresh(session.length(700))
    return [session.request(session.start_s, prompt, session.text.fresh(session.length(150, limit=1_000)))]


def _system(session: _Session) -> list[TraceRequest]:
    return session.turns(session.system_prompt(), 1, new_tokens=120, output_tokens=150, pause_s=1)


def _chat(session: _Session) -> list[TraceRequest]:
    num_turns = min(1 + int(session.rng.expovariate(1 / 4)), 20)
    return session.turns(session.system_prompt(), num_turns, new_tokens=80, output_tokens=180, pause_s=30)


def _agents(session: _Session) -> list[TraceRequest]:
    num_turns = min(4 + int(session.rng.expovariate(1 / 10)), 50)
    return session.turns(session.text.system_prompts[-1], num_turns, new_tokens=500, output_tokens=80, pause_s=4)


def _mixed(session: _Session) -> list[TraceRequest]:
    name = session.rng.choices(("oneshot", "system", "chat", "agents"), (4, 4, 3, 1))[0]
    return [request._replace(tenant=name) for request in KINDS[name](session)]


def _poisson(rng: random.Random, rate: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        now_s += rng.expovariate(rate)
        yield now_s


def _bursty(rng: random.Random, rate: float) -> Iterator[float]:
    """Groups of 1 to 15 sessions at once, as many a second on average."""
    for now_s in _poisson(rng, rate / 8):
        yield from repeat(now_s, rng.randrange(1, 16))


KINDS: dict[str, Callable[[_Session], list[TraceRequest]]] = {
    "oneshot": _oneshot,
    "system": _system,
    "chat": _chat,
    "agents": _agents,
    "mixed": _mixed,
}
ARRIVALS: dict[str, Callable[[random.Random, float], Iterator[float]]] = {"poisson": _poisson, "bursty": _bursty}
