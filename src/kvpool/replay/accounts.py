"""Counting hits: of every request, of each tenant and turn, and beside them what an infinite cache would have hit.

Owns: the tallies, and every name that was ever looked up.
Knows nothing of: the cache, and why it hit or missed.
"""

from collections.abc import Sequence
from itertools import takewhile

from kvpool.replay.report import Tally
from kvpool.replay.trace import TraceRequest
from kvpool.types import BlockHash


class Accounts:
    """Tallies of the requests counted so far."""

    def __init__(self, block_size: int) -> None:
        self.all = Tally()
        self.by_tenant: dict[str, Tally] = {}
        self.by_turn: dict[int, Tally] = {}
        self._block_size = block_size
        self._seen: set[BlockHash] = set()

    def count(
        self,
        traced: TraceRequest,
        names: Sequence[BlockHash],
        num_tokens: int,
        num_hit_blocks: int,
        max_hit_blocks: int,
    ) -> None:
        """A prompt of `num_tokens` tokens with these full blocks was looked up, at most `max_hit_blocks` deep."""
        num_seen = len(list(takewhile(self._seen.__contains__, names)))
        self._seen.update(names[num_seen:])
        # An output can be hit before its request ends and is remembered.
        ideal = max(min(num_seen, max_hit_blocks), num_hit_blocks)
        figures = (len(names), num_tokens, num_hit_blocks, ideal, self._block_size)
        self.all.add(*figures)
        if traced.tenant is not None:
            self.by_tenant.setdefault(traced.tenant, Tally()).add(*figures)
        if traced.turn is not None:
            self.by_turn.setdefault(traced.turn, Tally()).add(*figures)

    def remember(self, names: Sequence[BlockHash]) -> None:
        """These blocks, of an output, were cached: an infinite cache holds them from now on."""
        self._seen.update(names)
