"""What a load on a server gave, as plain values.

Knows nothing of: servers, tables.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from kvpool.client.load import Outcome
from kvpool.replay.report import Percentiles


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Times are in seconds, of requests that were answered; None where there is nothing to tell.

    `num_cached` is None where the server does not say how much of a prompt it had, and `hit_rate` with it.
    """

    num_requests: int
    errors: dict[str, int]
    duration_s: float
    num_prompt: int
    num_cached: int | None
    num_outputs: int
    time_to_first_token_s: Percentiles | None
    time_per_output_token_s: Percentiles | None
    inter_token_s: Percentiles | None
    end_to_end_s: Percentiles | None
    late_s: Percentiles | None

    @property
    def num_answered(self) -> int:
        return self.num_requests - sum(self.errors.values())

    @property
    def hit_rate(self) -> float | None:
        return None if self.num_cached is None or not self.num_prompt else self.num_cached / self.num_prompt

    def rates(self) -> dict[str, float]:
        """What went through in a second."""
        counts = (self.num_answered, self.num_prompt, self.num_outputs)
        names = ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s")
        return {
            name: count / self.duration_s if self.duration_s else 0.0 for name, count in zip(names, counts, strict=True)
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"num_answered": self.num_answered, "hit_rate": self.hit_rate, **asdict(self), **self.rates()}


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """Of all that was sent."""
    answered = [outcome for outcome in outcomes if outcome.error is None]
    cached = [each.answer.usage.num_cached for each in answered if each.answer.usage is not None]
    first_s = min((outcome.answer.sent_s for outcome in outcomes), default=0.0)
    return Figures(
        num_requests=len(outcomes),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common()),
        duration_s=max((outcome.ended_s for outcome in outcomes), default=0.0) - first_s,
        num_prompt=sum(each.answer.usage.num_prompt if each.answer.usage else each.num_prompt for each in answered),
        num_cached=sum(count or 0 for count in cached) if any(count is not None for count in cached) else None,
        num_outputs=sum(map(num_outputs, answered)),
        time_to_first_token_s=_percentiles(each.answer.first_token_s or 0.0 for each in answered),
        time_per_output_token_s=_percentiles(_per_token_s(each) for each in answered if num_outputs(each) > 1),
        inter_token_s=_percentiles(
            later - earlier for each in answered for earlier, later in pairwise(each.answer.piece_at_s)
        ),
        end_to_end_s=_percentiles(each.answer.last_token_s or 0.0 for each in answered),
        late_s=_percentiles(outcome.late_s for outcome in outcomes),
    )


def num_outputs(outcome: Outcome) -> int:
    """As the server counted; else as many as there were pieces."""
    usage = outcome.answer.usage
    return usage.num_outputs if usage is not None and usage.num_outputs else len(outcome.answer.piece_at_s)


def _per_token_s(outcome: Outcome) -> float:
    """Between the first token and the last one, a token."""
    answer = outcome.answer
    return ((answer.last_token_s or 0.0) - (answer.first_token_s or 0.0)) / (num_outputs(outcome) - 1)


def _percentiles(seconds: Iterable[float]) -> Percentiles | None:
    values = list(seconds)
    return Percentiles.of(values) if values else None
