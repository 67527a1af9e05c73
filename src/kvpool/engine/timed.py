"""The timed runner: no model, but a clock that moves as if there were one.

Owns: the virtual clock's hands, while a batch runs.
Knows nothing of: blocks and their contents.
"""

from collections.abc import Sequence

from kvpool.engine.batch import Batch, NextTokens
from kvpool.engine.engine import Runner
from kvpool.engine.roofline import StepTime


class VirtualClock:
    """Seconds since the start of a run; moves only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Wait until then; a time that has passed changes nothing."""
        self.now_s = max(self.now_s, now_s)


class TimedRunner:
    """Advances the clock by the estimate of each batch. Tokens come from `next_tokens`, or from an inner runner."""

    def __init__(
        self,
        clock: VirtualClock,
        step_time: StepTime,
        next_tokens: NextTokens = lambda requests: [0] * len(requests),
        inner: Runner | None = None,
    ) -> None:
        self.clock = clock
        self._step_time = step_time
        self._next_tokens = next_tokens
        self._inner = inner

    def run(self, batch: Batch) -> Sequence[int | None]:
        if batch:
            self.clock.advance(self._seconds(batch))
        if self._inner is not None:
            return self._inner.run(batch)
        return batch.sample(self._next_tokens)

    def _seconds(self, batch: Batch) -> float:
        starts, counts = batch.starts[batch.num_decoding :], batch.counts[batch.num_decoding :]
        num_tokens = sum(batch.counts)
        num_pairs = sum(count * (start + count / 2) for start, count in zip(starts, counts, strict=True))
        return self._step_time.seconds(
            num_prefill_tokens=sum(counts),
            num_kv_tokens=num_tokens + sum(batch.starts),
            num_attended_pairs=num_pairs,
        )
