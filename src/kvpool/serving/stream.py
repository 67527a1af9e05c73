"""The outputs of requests that belong together, as they come, for one asyncio task.

Owns: what was told and not read yet.
Knows nothing of: threads, texts.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvpool.engine.generation import Generation
from kvpool.engine.sampling import Logprobs
from kvpool.errors import KVPoolError


class Finish(StrEnum):
    """Why a request got no more tokens."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Output:
    """The next token of request `index`; `finish` with its last one."""

    index: int
    token_id: int
    logprobs: Logprobs | None = None
    finish: Finish | None = None


class Stream:
    """Iterate for the outputs, in the order of steps; raises what a request failed with.

    `cached` says how many tokens of each request were found when it was first admitted.
    """

    def __init__(self, num_requests: int, arrived_s: float) -> None:
        self.num_requests = num_requests
        self.requests: Sequence[Generation] = ()
        self.cached = [0] * num_requests
        self.prompt_logprobs: list[list[Logprobs]] = [[] for _ in range(num_requests)]
        self.token_at_s = [arrived_s] * num_requests
        """When the last token of each was given; when it arrived, before the first."""
        self.num_tokens = [0] * num_requests
        self.not_admitted = set(range(num_requests))
        self.open = set(range(num_requests))
        """Those of which more is to be read."""
        self._told: asyncio.Queue[Output | KVPoolError] = asyncio.Queue()

    def put(self, item: Output | KVPoolError) -> None:
        self._told.put_nowait(item)

    def take_prompt_logprobs(self, index: int, start: int, told: Sequence[Logprobs]) -> None:
        """Of the prompt's tokens start + 1 and later; what is computed once more after a preemption is told again."""
        own = self.prompt_logprobs[index]
        del own[start:]
        own += told

    async def outputs(self) -> AsyncIterator[Output]:
        while self.open:
            item = await self._told.get()
            if isinstance(item, KVPoolError):
                raise item
            if item.index not in self.open:
                continue
            if item.finish is not None:
                self.open.discard(item.index)
            yield item
