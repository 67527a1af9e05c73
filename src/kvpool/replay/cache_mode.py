"""Cache mode: requests are looked up one after another, each leaving before the next comes.

The classical cache experiment: no time, no concurrency, no outputs. What counts is stated in docs/counting.md.
"""

from collections.abc import Iterable

from kvpool.core.hit import Hit
from kvpool.core.request import RequestLike
from kvpool.replay.accounts import Accounts
from kvpool.replay.intake import Intake
from kvpool.replay.outcome import report_of
from kvpool.replay.report import ReplayReport
from kvpool.replay.settings import ReplaySettings, Source
from kvpool.replay.trace import TraceRequest


class CacheRun:
    """One run in cache mode."""

    def __init__(self, source: Source, settings: ReplaySettings) -> None:
        self._source = source
        self._settings = settings
        self._cache = settings.cache_for(source)
        self._block_size = self._cache.groups.unit
        self._intake = Intake(source, settings, self._block_size)
        self._accounts = Accounts(self._cache.groups)
        self._num_usable = self._cache.num_usable_blocks
        self._longest = self._cache.max_tokens()
        self._peak_held = self._sum_held = 0

    def run(self, requests: Iterable[TraceRequest]) -> None:
        for traced in requests:
            request = self._intake.request(traced)
            limit = request.num_tokens if self._settings.raw else request.num_tokens - 1
            self._look_up(traced, request, limit)
        if self._settings.check:
            self._cache.check()

    def _look_up(self, traced: TraceRequest, request: RequestLike, limit: int) -> None:
        """The request takes its blocks, fills them and leaves; one that is too large is refused."""
        cache, num_tokens, max_blocks = self._cache, request.num_tokens, limit // self._block_size
        names = request.block_hashes(cache.hasher)
        hit = cache.match(request, limit)
        if num_tokens > self._longest:
            self._accounts.count_refused(traced, num_tokens, names, max_blocks)
            return
        held, hit_blocks = self._compute(request, hit), hit.num_tokens // self._block_size
        self._sum_held += held
        self._peak_held = max(self._peak_held, held)
        cache.free(request)
        self._accounts.count(traced, num_tokens, names, hit_blocks, max_blocks)
        self._accounts.remember(names[hit_blocks:])

    def _compute(self, request: RequestLike, hit: Hit) -> int:
        """Compute what the hit left, in steps where windows or states need them; the most blocks that were held."""
        cache, start, num_tokens = self._cache, hit.num_tokens, request.num_tokens
        if not cache.groups.are_windowed:
            return self._compute_at_once(request, num_tokens - start, hit)
        given: Hit | None = hit
        longest, most = cache.groups.max_in_flight_tokens, 0
        while True:
            stop = cache.step_end(request, start, min(start + longest, num_tokens), given)
            most = max(most, self._compute_at_once(request, stop - start, given))
            if stop == num_tokens:
                return most
            start, given = stop, None

    def _compute_at_once(self, request: RequestLike, num_tokens: int, hit: Hit | None) -> int:
        """Compute the next tokens of the only request that there is; the blocks that it holds."""
        table = self._cache.allocate(request, num_tokens, hit)
        assert table is not None, "invariant 12: what fits alone has room"
        self._cache.commit(request, table.num_computed + num_tokens)
        return self._num_usable - self._cache.num_free_blocks

    def report(self) -> ReplayReport:
        usable = self._cache.num_usable_blocks
        num_served = self._accounts.all.num_requests - self._accounts.num_refused
        mean_held = self._sum_held / usable / num_served if num_served else 0.0
        peak_held = self._peak_held / usable
        return report_of(self._source, self._settings, self._cache, self._accounts, peak_held, mean_held)
