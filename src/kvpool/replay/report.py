"""What a replay found, as plain values: counters, and the ratios that follow from them.

Knows nothing of: how a run is made, how it is shown.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Lookup(NamedTuple):
    """One prompt that was looked up: its tokens and full blocks, and how many of these were hit."""

    num_tokens: int
    num_blocks: int
    hit_blocks: int
    ideal_blocks: int
    is_refused: bool


@dataclass(slots=True)
class Tally:
    """Hits of a set of requests. What counts as a block and as a hit is stated in docs/counting.md.

    `ideal_*` is what a cache without end would have hit, asked at the same moments. `recomputed_*` is what it
    would have hit and what was computed again, since it had been evicted; refused requests have none.
    `sum_request_rates` adds up each request's own token hit rate.
    """

    block_size: int
    num_requests: int = 0
    total_blocks: int = 0
    hit_blocks: int = 0
    ideal_hit_blocks: int = 0
    recomputed_blocks: int = 0
    total_tokens: int = 0
    sum_request_rates: float = 0.0

    def add(self, lookup: Lookup) -> None:
        """One more request."""
        self.num_requests += 1
        self.total_blocks += lookup.num_blocks
        self.hit_blocks += lookup.hit_blocks
        self.ideal_hit_blocks += lookup.ideal_blocks
        self.total_tokens += lookup.num_tokens
        self.sum_request_rates += lookup.hit_blocks * self.block_size / lookup.num_tokens
        if not lookup.is_refused:
            self.recomputed_blocks += lookup.ideal_blocks - lookup.hit_blocks

    @property
    def hit_tokens(self) -> int:
        return self.hit_blocks * self.block_size

    @property
    def ideal_hit_tokens(self) -> int:
        return self.ideal_hit_blocks * self.block_size

    @property
    def recomputed_tokens(self) -> int:
        return self.recomputed_blocks * self.block_size

    @property
    def block_hit_rate(self) -> float:
        return _ratio(self.hit_blocks, self.total_blocks)

    @property
    def ideal_block_hit_rate(self) -> float:
        return _ratio(self.ideal_hit_blocks, self.total_blocks)

    @property
    def token_hit_rate(self) -> float:
        return _ratio(self.hit_tokens, self.total_tokens)

    @property
    def ideal_token_hit_rate(self) -> float:
        return _ratio(self.ideal_hit_tokens, self.total_tokens)

    @property
    def mean_request_hit_rate(self) -> float:
        """The mean of the requests' own token hit rates: a short request counts as much as a long one."""
        return _ratio(self.sum_request_rates, self.num_requests)

    def rates(self) -> dict[str, float]:
        return {
            "block_hit_rate": self.block_hit_rate,
            "ideal_block_hit_rate": self.ideal_block_hit_rate,
            "token_hit_rate": self.token_hit_rate,
            "ideal_token_hit_rate": self.ideal_token_hit_rate,
            "mean_request_hit_rate": self.mean_request_hit_rate,
        }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a time over all requests that finished, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Percentiles":
        values = np.array([*seconds] or [0.0])
        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(float(values.mean()), p50, p90, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one moment of the virtual clock."""

    time_s: float
    num_running: int
    num_waiting: int
    held: float
    """Share of the usable blocks that requests hold."""


@dataclass(slots=True)
class Life:
    """When one request arrived, was first admitted, gave its first token and its last; None: not yet."""

    request_id: str
    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """What only engine mode knows: time on the virtual clock."""

    duration_s: float
    num_steps: int
    num_output_tokens: int
    queueing_s: Percentiles
    time_to_first_token_s: Percentiles
    end_to_end_s: Percentiles
    num_finished: int
    samples: list[Sample] = field(repr=False)
    lives: list[Life] = field(repr=False)
    """In order of arrival, of all requests that were not refused."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One run: what was replayed at which size, and what came of it."""

    trace: str
    mode: str
    raw: bool
    policy: str
    block_size: int
    num_blocks: int
    groups: tuple[str, ...]
    """The kinds of layers, in words."""
    publication: str | int
    alignment: int
    """Hits end at multiples of this many tokens."""
    smallest_hit: int | None
    """The smallest prefix, in tokens, that can hit; None: none ever can."""
    seed: int | None
    all: Tally
    by_tenant: dict[str, Tally]
    by_turn: dict[int, Tally]
    num_refused: int
    num_skipped_lines: int
    evictions: int
    peak_held: float
    mean_held: float
    preemptions: int = 0
    preempted_tokens: int = 0
    """Tokens that preempted requests had computed, and had to compute again when they resumed."""
    timing: Timing | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: counters at the top level, ratios beside them, times by percentile."""
        plain = {
            name: getattr(self, name) for name in ("trace", "mode", "raw", "policy", "block_size", "num_blocks", "seed")
        }
        plain |= {name: getattr(self, name) for name in ("groups", "publication", "alignment", "smallest_hit")}
        plain |= _plain_tally(self.all)
        for name in (
            "num_refused",
            "num_skipped_lines",
            "evictions",
            "preemptions",
            "preempted_tokens",
            "peak_held",
            "mean_held",
        ):
            plain[name] = getattr(self, name)
        if self.by_tenant:
            plain["by_tenant"] = {tenant: _plain_tally(tally) for tenant, tally in self.by_tenant.items()}
        if self.by_turn:
            plain["by_turn"] = {str(turn): _plain_tally(tally) for turn, tally in sorted(self.by_turn.items())}
        if self.timing is not None:
            plain["timing"] = {
                name: value for name, value in asdict(self.timing).items() if name not in ("samples", "lives")
            }
        return plain


def _plain_tally(tally: Tally) -> dict[str, Any]:
    counters = ("num_requests", "total_blocks", "hit_blocks", "ideal_hit_blocks", "total_tokens", "hit_tokens")
    more = ("ideal_hit_tokens", "recomputed_tokens")
    return {name: getattr(tally, name) for name in (*counters, *more)} | tally.rates()
