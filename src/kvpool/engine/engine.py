"""The engine's step: schedule, run, commit, collect.

Owns: nothing but the three parts it connects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.core.request import RequestLike
from kvpool.engine.batch import Batch
from kvpool.engine.generation import Generation
from kvpool.engine.scheduler import Scheduler


class Runner(Protocol):
    """Computes a batch. The scheduler's tables say where each token's keys and values go."""

    def run(self, batch: Batch) -> Sequence[int | None]:
        """The next token of each request of the batch, None for those whose tokens are not all computed yet."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave: `token_ids[i]` is the next token of `requests[i]`, None while its prompt is being computed.

    `ended` are the requests that got their last token: as many as they asked for, or one that ends them.
    """

    batch: Batch
    token_ids: Sequence[int | None]
    ended: Sequence[RequestLike]
    num_tokens: int
    """How many requests got a token."""

    @property
    def requests(self) -> Sequence[RequestLike]:
        return self.batch.requests


_MANY_STOP_IDS = 1000


class Engine:
    """Runs what its scheduler is given, one step at a time."""

    _stop_ids: frozenset[int] = frozenset()
    """Tokens that end some request that runs, or ran until lately."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    def step(self) -> StepOutput:
        """One step of all that can run; empty when there is no work."""
        batch = self.scheduler.schedule()
        token_ids = self.runner.run(batch)
        ended = [*self.scheduler.commit(batch, token_ids)]
        for request in self._stopped(batch, token_ids):
            if request not in ended:
                self.scheduler.abort(request)
                ended.append(request)
        num_tokens = batch.num_decoding + sum(token_id is not None for token_id in token_ids[batch.num_decoding :])
        return StepOutput(batch, token_ids, ended, num_tokens)

    def _stopped(self, batch: Batch, token_ids: Sequence[int | None]) -> list[RequestLike]:
        """Those that got a token that ends them."""
        # Every request has a chunk before it decodes.
        first = batch.num_decoding if len(self._stop_ids) < _MANY_STOP_IDS else 0
        stops = [request.stop_token_ids for request in batch.requests[first:] if isinstance(request, Generation)]
        if stops:
            self._stop_ids = frozenset().union(*stops, self._stop_ids if first else ())
        if self._stop_ids.isdisjoint(token_ids):
            return []
        given = zip(batch.requests, token_ids, strict=True)
        return [
            request for request, token in given if isinstance(request, Generation) and token in request.stop_token_ids
        ]
