"""Cache mode: requests are looked up one after another, each leaving before the next comes.

The classical cache experiment: no time, no concurrency, no outputs. What counts is stated in docs/counting.md.
"""

from collections.abc import Iterable

from kvpool.core.manager import KVCacheManager
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
        self._block_size = settings.block_size_for(source)
        self._cache = KVCacheManager(settings.num_blocks, self._block_size, events=False)
        self._intake = Intake(source, settings)
        self._accounts = Accounts(self._block_size)
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
        table = cache.allocate(request, num_tokens - hit.num_tokens, hit)
        if table is None:
            self._accounts.count_refused(traced, num_tokens, names, max_blocks)
            return
        held, hit_blocks = len(table.block_ids[0]), len(hit.block_ids[0])
        self._sum_held += held
        self._peak_held = max(self._peak_held, held)
        cache.commit(request, num_tokens)
        cache.free(request)
        self._accounts.count(traced, num_tokens, names, hit_blocks, max_blocks)
        self._accounts.remember(names[hit_blocks:])

    def report(self) -> ReplayReport:
        usable = self._cache.num_usable_blocks
        num_served = self._accounts.all.num_requests - self._accounts.num_refused
        mean_held = self._sum_held / usable / num_served if num_served else 0.0
        peak_held = self._peak_held / usable
        return report_of(self._source, self._settings, self._cache, self._accounts, peak_held, mean_held)
