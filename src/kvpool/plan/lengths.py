"""How many requests of many lengths run at a time, where a plan promises for one length.

At a random moment a request is there for as long as it takes: each of its outputs is a step, so those of long outputs
are met more often. It stands anywhere between its prompt and its end, and grows evenly on the way.

Knows nothing of: traces, arrival times, prefixes that requests share.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from kvpool.errors import ConfigError
from kvpool.plan.demand import MAX_TOKENS
from kvpool.plan.memory import Plan
from kvpool.plan.spec import require_whole

SAFE_SHARE = 0.99
_DEVIATIONS = 2.326347874
"""So many standard deviations above the mean is what 99 % of a normal distribution stays under."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests by prompt and output tokens, and how often each comes. Output 0: a length, and no more is known."""

    counts: tuple[tuple[tuple[int, int], int], ...]

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> "Lengths":
        """From pairs of prompt and output tokens. ConfigError when there are none, or out of range."""
        return cls.counted(Counter(requests).items())

    @classmethod
    def counted(cls, counts: Iterable[tuple[tuple[int, int], int]]) -> "Lengths":
        """From pairs that carry how often they come."""
        kept = []
        for (num_prompt, num_output), count in counts:
            for what, number in (
                ("a prompt's length", num_prompt),
                ("an output's length", num_output),
                ("a count", count),
            ):
                if require_whole(what, number, 0) > MAX_TOKENS:
                    raise ConfigError(f"{what} is above {MAX_TOKENS:,}, which is the most")
            if count and num_prompt + num_output:
                kept.append(((num_prompt, num_output), count))
        if not kept:
            raise ConfigError("no lengths are given: 1 or more requests of 1 token or more")
        return cls(tuple(kept))

    @property
    def num_requests(self) -> int:
        return sum(count for _, count in self.counts)

    @property
    def mean_tokens(self) -> float:
        """Of a request's prompt and outputs."""
        return sum((prompt + output) * count for (prompt, output), count in self.counts) / self.num_requests


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many requests of a distribution a plan runs at a time, when none shares a prefix with another."""

    mean_tokens: float
    """Of prompt and outputs."""
    mean_blocks: float
    """That a request is met with at a random moment."""
    mean_requests: float
    """The pool through that."""
    safe_requests: int
    """So many leave the pool unfilled 99 % of the time."""
    at_full_length: float
    """So many of what is met at a random moment are sure to end: each has room for its full length."""
    num_too_long: int
    """Requests that are longer than `max_model_len` or than the pool: not counted."""


def concurrency(plan: Plan, lengths: Lengths) -> Concurrency:
    """For a plan's pool. ConfigError when every request is too long for it."""
    fitting = [(pair, count) for pair, count in lengths.counts if _fits(plan, sum(pair))]
    if not fitting:
        raise ConfigError(
            f"all {lengths.num_requests:,} requests are longer than what fits: "
            f"{min(plan.longest or plan.max_model_len, plan.max_model_len):,} tokens"
        )
    weights = [max(output, 1) * count for (_, output), count in fitting]
    total = sum(weights)
    ends = [(plan.steady_blocks(max(p, 1)), plan.steady_blocks(max(p + output, 1))) for (p, output), _ in fitting]
    mean = sum(w * (first + last) / 2 for w, (first, last) in zip(weights, ends, strict=True)) / total
    squares = ((first + last) ** 2 / 4 + (last - first) ** 2 / 12 for first, last in ends)
    variance = max(sum(w * square for w, square in zip(weights, squares, strict=True)) / total - mean**2, 0)
    whole = sum(w * plan.admitted_blocks(sum(pair)) for w, (pair, _) in zip(weights, fitting, strict=True)) / total
    return Concurrency(
        lengths.mean_tokens,
        mean,
        plan.num_usable_blocks / mean,
        _safe(plan.num_usable_blocks, mean, sqrt(variance)),
        plan.num_usable_blocks / whole,
        lengths.num_requests - sum(count for _, count in fitting),
    )


def _fits(plan: Plan, num_tokens: int) -> bool:
    return num_tokens <= plan.max_model_len and plan.admitted_blocks(num_tokens) <= plan.num_usable_blocks


def _safe(num_blocks: int, mean: float, deviation: float) -> int:
    """The n for which n means and so many deviations of their sum are the pool."""
    spread = _DEVIATIONS * deviation
    return int(((sqrt(spread * spread + 4 * mean * num_blocks) - spread) / (2 * mean)) ** 2)
