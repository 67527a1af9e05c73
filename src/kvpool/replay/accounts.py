"""Counting hits: of every request, of each tenant and turn, and beside them what an infinite cache would have hit.

Owns: the tallies, and the name of every block that was ever computed.
Knows nothing of: the cache, and why it hit or missed.
"""

from collections.abc import Sequence
from itertools import takewhile

from kvpool.core.groups import Groups
from kvpool.replay.report import Lookup, Tally
from kvpool.replay.trace import TraceRequest
from kvpool.types import BlockHash


class Accounts:
    """Tallies of the requests counted so far, in blocks as they are named: the largest that all groups have whole.

    Hits, those of a cache without end too, end where `groups` let them.
    """

    def __init__(self, groups: Groups) -> None:
        block_size = groups.unit
        self.all = Tally(block_size)
        self.by_tenant: dict[str, Tally] = {}
        self.by_turn: dict[int, Tally] = {}
        self.num_refused = 0
        self._block_size = block_size
        self._aligned_blocks = groups.alignment // block_size
        self._dropped_blocks = groups.num_dropped_tokens // block_size
        self._never_hits = groups.smallest_hit is None
        self._reaches_all = not self._never_hits and groups.smallest_hit == block_size
        self._computed: set[BlockHash] = set()

    def count(
        self, traced: TraceRequest, num_tokens: int, names: Sequence[BlockHash], hit_blocks: int, max_blocks: int
    ) -> None:
        """A prompt with these full blocks was looked up, at most `max_blocks` deep, and hit `hit_blocks` of them."""
        ideal_blocks = self._reachable(hit_blocks + self._num_computed(names[hit_blocks:max_blocks]))
        self._tally(traced, Lookup(num_tokens, len(names), hit_blocks, ideal_blocks, is_refused=False))

    def count_refused(self, traced: TraceRequest, num_tokens: int, names: Sequence[BlockHash], max_blocks: int) -> None:
        """A prompt was too large for the pool and hit nothing. A cache without end would have computed it."""
        ideal_blocks = self._reachable(self._num_computed(names[:max_blocks]))
        self._tally(traced, Lookup(num_tokens, len(names), 0, ideal_blocks, is_refused=True))
        self.remember(names)
        self.num_refused += 1

    def _reachable(self, num_blocks: int) -> int:
        """How many of so many computed blocks a hit can have."""
        if self._reaches_all:
            return num_blocks
        if self._never_hits:
            return 0
        return max(num_blocks - num_blocks % self._aligned_blocks - self._dropped_blocks, 0)

    def _num_computed(self, names: Sequence[BlockHash]) -> int:
        """How many of these consecutive blocks, from the first on, a cache without end holds."""
        return len(list(takewhile(self._computed.__contains__, names)))

    def remember(self, names: Sequence[BlockHash]) -> None:
        """These blocks are computed: a cache without end holds them from now on."""
        self._computed.update(names)

    def _tally(self, traced: TraceRequest, lookup: Lookup) -> None:
        self.all.add(lookup)
        if traced.tenant is not None:
            self.by_tenant.setdefault(traced.tenant, Tally(self._block_size)).add(lookup)
        if traced.turn is not None:
            self.by_turn.setdefault(traced.turn, Tally(self._block_size)).add(lookup)
