"""What a replay is made of: a source of requests, and the settings of one run.

Knows nothing of: how a run goes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from kvpool.core.manager import KVCacheManager
from kvpool.core.publication import DEFAULT_PUBLICATION, Setting
from kvpool.engine.roofline import ACCELERATORS, MODELS, StepTime, roofline
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.errors import ConfigError
from kvpool.limits import MAX_BLOCKS
from kvpool.plan.kinds import FullAttention, LayerKind
from kvpool.replay.trace import TraceRequest

DEFAULT_BLOCK_SIZE = 16
DEFAULT_STEP_TIME = roofline(ACCELERATORS["H100-SXM"], MODELS["Llama-3.1-8B"])


class Source(Protocol):
    """Where requests come from: a `Trace` or a `Workload`. Iterating again starts again."""

    @property
    def name(self) -> str: ...
    @property
    def block_size(self) -> int | None: ...
    @property
    def seed(self) -> int | None:
        """What a generator was seeded with; None for a file."""

    @property
    def num_skipped(self) -> int:
        """Bad lines passed over by the last iteration."""

    def __iter__(self) -> Iterator[TraceRequest]: ...


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a run is made. `block_size` None: the trace's own, 16 where it has none.

    `raw` (cache mode) counts every id of the trace as a full block and lets the last token hit, as cache studies do.
    `groups` are the kinds of layers that share the pool, `publication` is what windows and states make findable, and
    `drop_last_block` leaves out the last block found, for a draft model: see `KVCacheManager`.
    `separate_tenants` keeps the tenants of the trace apart, as salts do. `check` also runs the checking runner. Engine
    mode stops when its clock passes `stop_at_s`; requests that have not ended by then are in no percentile.
    """

    num_blocks: int
    block_size: int | None = None
    mode: str = "cache"
    raw: bool = False
    separate_tenants: bool = False
    groups: tuple[LayerKind, ...] = (FullAttention(),)
    publication: Setting = DEFAULT_PUBLICATION
    drop_last_block: bool = False
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    step_time: StepTime = DEFAULT_STEP_TIME
    sample_every_s: float = inf
    stop_at_s: float = inf
    check: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("cache", "engine"):
            raise ConfigError(f"mode is {self.mode!r}: 'cache' or 'engine'")
        if self.raw and self.mode == "engine":
            raise ConfigError(
                "raw counting looks ids up one by one: it goes with mode 'cache', an engine computes tokens"
            )
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}: a block holds at least 1 token, 16 is usual")
        if not 2 <= self.num_blocks <= MAX_BLOCKS:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}: from 2, the null block and one to use, to {MAX_BLOCKS}"
            )
        if not self.stop_at_s > 0:
            raise ConfigError(f"stop_at_s is {self.stop_at_s}: more than 0 seconds")
        if not self.sample_every_s > 0:
            raise ConfigError(f"sample_every_s is {self.sample_every_s}: more than 0 seconds")

    def cache_for(self, source: Source) -> KVCacheManager:
        """A new cache for a run over `source`."""
        return KVCacheManager(
            self.num_blocks,
            self.block_size_for(source),
            self.groups,
            publication=self.publication,
            drop_last_block=self.drop_last_block,
            max_in_flight_tokens=self.scheduler.max_num_batched_tokens,
            events=False,
        )

    def block_size_for(self, source: Source) -> int:
        """The block size of a run over `source`, where a group has none of its own."""
        return self.block_size or source.block_size or DEFAULT_BLOCK_SIZE
