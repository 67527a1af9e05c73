"""From a run that is over to its report: what both modes report alike."""

from kvpool.core.groups import Group
from kvpool.core.manager import KVCacheManager
from kvpool.plan.kinds import kind_in_words
from kvpool.replay.accounts import Accounts
from kvpool.replay.report import ReplayReport
from kvpool.replay.settings import ReplaySettings, Source


def report_of(
    source: Source,
    settings: ReplaySettings,
    cache: KVCacheManager,
    accounts: Accounts,
    peak_held: float,
    mean_held: float,
) -> ReplayReport:
    """The report of a run over `source`; a mode adds what it alone knows."""
    block_size = cache.groups.all[0].block_size if len(cache.groups) == 1 else cache.block_size
    return ReplayReport(
        trace=source.name,
        mode=settings.mode,
        raw=settings.raw,
        policy=cache.policy,
        block_size=block_size,
        num_blocks=cache.num_blocks,
        groups=tuple(_in_words(group, block_size) for group in cache.groups.all),
        publication=settings.publication,
        alignment=cache.alignment,
        smallest_hit=cache.smallest_hit,
        seed=source.seed,
        all=accounts.all,
        by_tenant=accounts.by_tenant,
        by_turn=accounts.by_turn,
        num_refused=accounts.num_refused,
        num_skipped_lines=source.num_skipped,
        evictions=cache.num_evictions,
        peak_held=peak_held,
        mean_held=mean_held,
    )


def _in_words(group: Group, block_size: int) -> str:
    kind = kind_in_words(group.kind)
    return kind if group.block_size == block_size else f"{kind} in blocks of {group.block_size:,}"
