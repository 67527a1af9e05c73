"""What happened when, on the virtual clock: each request's milestones, and the engine's state at regular moments.

Owns: the milestones of every request.
Knows nothing of: the cache and the scheduler; it is told.
"""

from collections.abc import Iterable, Iterator

from kvpool.core.request import RequestLike
from kvpool.replay.report import Life, Percentiles, Sample, Timing
from kvpool.types import RequestId


class Journal:
    """Told of arrivals, admissions, steps and tokens in the order in which they happen."""

    def __init__(self, sample_every_s: float) -> None:
        self._sample_every_s = sample_every_s
        self._lives: dict[RequestId, Life] = {}
        self._before_first_token: list[RequestLike] = []
        self._samples: list[Sample] = []
        self._held_seconds = 0.0
        self._num_steps = self._num_output_tokens = 0
        self.peak_held = 0.0

    def arrived(self, request: RequestLike, now_s: float) -> None:
        self._lives[request.request_id] = Life(request.request_id, now_s)

    def admitted(self, request: RequestLike, now_s: float) -> None:
        """For the first time; resuming after a preemption is not told."""
        self._lives[request.request_id].admitted_s = now_s
        self._before_first_token.append(request)

    def lasted(self, since_s: float, until_s: float, num_running: int, num_waiting: int, held: float) -> None:
        """The engine was in this state from `since_s` until just before `until_s`."""
        self._held_seconds += held * (until_s - since_s)
        self.peak_held = max(self.peak_held, held)
        while (time_s := len(self._samples) * self._sample_every_s) < until_s:
            self._samples.append(Sample(time_s, num_running, num_waiting, held))

    def stepped(self, num_tokens: int, ended: Iterable[RequestLike], now_s: float) -> None:
        """A step ended and gave this many tokens, the last ones of `ended` among them."""
        self._num_steps += 1
        self._num_output_tokens += num_tokens
        if self._before_first_token:
            self._note_first_tokens(now_s)
        for request in ended:
            self._lives[request.request_id].last_token_s = now_s

    def _note_first_tokens(self, now_s: float) -> None:
        waiting = []
        for request in self._before_first_token:
            if request.num_tokens > request.num_prompt_tokens:
                self._lives[request.request_id].first_token_s = now_s
            else:
                waiting.append(request)
        self._before_first_token = waiting

    def mean_held(self, now_s: float) -> float:
        """Share of the usable blocks that were held, over all time until now."""
        return self._held_seconds / now_s if now_s else 0.0

    def timing(self, now_s: float) -> Timing:
        finished = [life for life in self._lives.values() if life.last_token_s is not None]
        return Timing(
            duration_s=now_s,
            num_steps=self._num_steps,
            num_output_tokens=self._num_output_tokens,
            queueing_s=Percentiles.of(_since_arrival(finished, "admitted_s")),
            time_to_first_token_s=Percentiles.of(_since_arrival(finished, "first_token_s")),
            end_to_end_s=Percentiles.of(_since_arrival(finished, "last_token_s")),
            num_finished=len(finished),
            samples=self._samples,
            lives=list(self._lives.values()),
        )


def _since_arrival(lives: Iterable[Life], milestone: str) -> Iterator[float]:
    for life in lives:
        yield getattr(life, milestone) - life.arrival_s
