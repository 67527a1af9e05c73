"""Plain counters of what the cache did, and a snapshot of what its blocks are doing.

Knows nothing of: how the figures are shown or exported.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Counters since the cache was made; they only grow.

    A request is counted once each time it is admitted (its first `allocate`), with all its tokens as queried. Requests
    that come back after a preemption are counted apart, so that retries do not inflate the hit rate; requests that
    decline to read the cache are not counted as queries at all.
    """

    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_resumed_requests: int = 0
    num_resumed_queried_tokens: int = 0
    num_resumed_hit_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens / queried tokens of first admissions; 0 before the first."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What every block is doing at one moment. `num_held + num_cached + num_empty == num_usable` (invariant 1).

    `num_usable` leaves out the null block. `num_cached` blocks are free and still hold findable content: they are the
    first thing consumed under load, so they count as free. Of the `num_held_slots` slots of held blocks,
    `num_filled_slots` have a computed token (a state fills its block), a shared block counted once.
    """

    num_usable: int
    num_held: int
    num_cached: int
    num_empty: int
    num_filled_slots: int
    num_held_slots: int

    @property
    def held(self) -> float:
        """Share of the usable blocks that some request holds, 0 to 1: what engines print as cache usage."""
        return self.num_held / self.num_usable

    @property
    def cached(self) -> float:
        """Share of the usable blocks that nobody holds and that can still be found."""
        return self.num_cached / self.num_usable

    @property
    def free(self) -> float:
        """Share of the usable blocks that an allocation can take, cached ones included."""
        return 1.0 - self.held

    @property
    def filled(self) -> float:
        """Share of the slots in held blocks that hold a computed token; the rest is the unfilled end of last blocks."""
        return self.num_filled_slots / self.num_held_slots if self.num_held_slots else 0.0
