"""Which full blocks are worth a name, in groups that keep only the end.

A hit of n tokens needs the blocks that are live at n, its tail. Groups that keep everything publish every block. In a
window or a state, most blocks serve a hit at very few lengths, and a published block that nobody asks for drives out
another. So these rank what they publish, or publish the tails of chosen lengths only.

Knows nothing of: blocks' ids and names.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from kvpool.core.block_table import BlockTable
from kvpool.core.groups import Group, Groups
from kvpool.core.hit import Hit
from kvpool.core.request import RequestLike
from kvpool.errors import ConfigError
from kvpool.plan.kinds import SlidingWindow, StateSpace, cdiv

Setting: TypeAlias = str | int

SETTINGS = ("ranked", "every", "dense")
DEFAULT_PUBLICATION: Setting = "ranked"


class Rank(Enum):
    """What becomes of a full block."""

    KEPT = "it gets a name"
    SPARE = "it gets a name, and is the first to be evicted"
    NAMELESS = "it cannot be found"


class Run(NamedTuple):
    """Blocks start .. stop - 1 of a request. Spare blocks are the first to be evicted."""

    start: int
    stop: int
    is_spare: bool = False


class Publication:
    """What windows and states publish.

    * "ranked": every full block. The tails of a request's boundaries and of the last common border that it reaches are
      kept like any other block; the rest are spare, the first to be evicted.
    * "every": every full block, and all are kept alike.
    * "dense": the tail of every common border of the groups.
    * an interval in tokens: the tails of its multiples, and of a request's boundaries; 0: of the boundaries alone.

    A request's boundaries are the longest hit that the same prompt could have (its replay boundary), and where it left
    a prefix that others had computed, and that could not be hit in full (its junction).
    """

    def __init__(self, setting: Setting, groups: Groups) -> None:
        if setting not in SETTINGS and not (isinstance(setting, int) and not isinstance(setting, bool)):
            raise ConfigError(f"publication is {setting!r}: {', '.join(SETTINGS)}, or an interval in tokens")
        if isinstance(setting, int):
            _validate_interval(setting, groups.alignment, "publication")
        for kind in groups.states:
            if isinstance(kind.checkpoints, int):
                _validate_interval(kind.checkpoints, groups.alignment, "checkpoints")
        self.is_ranked = setting == "ranked" and groups.are_windowed
        self._publishes_all = setting in ("ranked", "every")
        self._groups = groups
        self._interval = setting if isinstance(setting, int) else groups.alignment

    def boundaries(self, request: RequestLike, hit: Hit) -> tuple[int, ...]:
        """The lengths at which others may want to go on from a request that is admitted with such a hit."""
        replay = self._groups.align(request.num_prompt_tokens - 1)
        shared = hit.num_shared_tokens
        junction = shared if shared - self._groups.num_dropped_tokens > hit.num_tokens else 0
        return tuple(sorted({length for length in (replay, junction) if length}))

    def runs(self, group: Group, table: BlockTable, start: int, stop: int) -> Sequence[Run]:
        """Of blocks start .. stop - 1, which are full now, those to publish, in order."""
        if not group.is_windowed:
            return (Run(start, stop),)
        if isinstance(group.kind, StateSpace):
            return self._state_runs(group, group.kind, table, stop)
        if not self.is_ranked:
            return (Run(start, stop),) if self._publishes_all else self._tails(group, table, start, stop)
        if start >= group.num_sink_blocks and start * group.block_size >= max(table.boundaries, default=0):
            return (Run(start, stop, is_spare=True),)
        runs = []
        for kept in self._tails(group, table, start, stop):
            runs += [Run(start, kept.start, is_spare=True), kept]
            start = kept.stop
        return [run for run in [*runs, Run(start, stop, is_spare=True)] if run.start < run.stop]

    def steady_rank(self, group: Group) -> Rank | None:
        """What becomes of a block that fills behind all boundaries of a request; None where that depends."""
        if not group.is_windowed:
            return Rank.KEPT
        if isinstance(group.kind, StateSpace):
            if group.kind.checkpoints is not None or group.kind.max_checkpoints is not None:
                return None
        elif self._publishes_all or self._covers_all(group):
            return Rank.SPARE if self.is_ranked else Rank.KEPT
        if self._interval == 0:
            return Rank.NAMELESS
        is_whole = isinstance(group.kind, StateSpace) and self._interval == self._groups.alignment
        return (Rank.SPARE if self.is_ranked else Rank.KEPT) if is_whole else None

    def end(self, group: Group, table: BlockTable) -> Run:
        """The tail of the last common border that the request reached; empty where it has none."""
        border = self._groups.align(table.num_computed)
        if not isinstance(group.kind, StateSpace):
            return self._tail(group, border)
        last = border // group.block_size
        return Run(last - 1, last) if table.last_stop == border and group.kind.checkpoints != "none" else Run(0, 0)

    def next_checkpoint(self, request: RequestLike, boundaries: Sequence[int], start: int, stop: int) -> int:
        """Where a step that begins at token `start` should end, at most at `stop`, so that states are kept."""
        ends = [stop]
        for kind in self._groups.states:
            if kind.checkpoints == "none":
                continue
            ends += [length for length in self._checkpoints(boundaries) if start < length < stop]
            interval = self._state_interval(kind, request)
            if interval == self._groups.alignment:
                ends += [length for length in [self._groups.align(stop)] if length > start]
            elif interval:
                ends.append((start // interval + 1) * interval)
        return min(ends)

    def _state_runs(self, group: Group, kind: StateSpace, table: BlockTable, stop: int) -> Sequence[Run]:
        """A state is what it was at the last computed token, so only a border that was met exactly can be published."""
        length = stop * group.block_size
        if length != table.num_computed or kind.checkpoints == "none":
            return ()
        if length in self._checkpoints(table.boundaries):
            return (Run(stop - 1, stop),)
        interval = self._state_interval(kind, table.request)
        return (Run(stop - 1, stop, is_spare=self.is_ranked),) if interval and length % interval == 0 else ()

    def _checkpoints(self, boundaries: Sequence[int]) -> list[int]:
        """Where states must stand for these boundaries: what a search drops is not gone on from."""
        return [length - self._groups.num_dropped_tokens for length in boundaries]

    def _state_interval(self, kind: StateSpace, request: RequestLike) -> int:
        """Every how many tokens a state is kept; 0: at boundaries alone."""
        interval = self._interval if not isinstance(kind.checkpoints, int) else kind.checkpoints
        if kind.max_checkpoints is None or not interval:
            return interval
        if kind.max_checkpoints == 0:
            return 0
        length = request.num_prompt_tokens + (request.max_tokens or 0)
        return interval * max(cdiv(length // interval, kind.max_checkpoints), 1)

    def _tails(self, group: Group, table: BlockTable, start: int, stop: int) -> list[Run]:
        """What of blocks start .. stop - 1 lies in a tail that is kept, and the sinks."""
        tails = [Run(0, group.num_sink_blocks), *(self._tail(group, length) for length in table.boundaries)]
        if not self.is_ranked and self._interval:
            tails += self._tails_of_multiples(group, start, stop)
        return _united(Run(max(tail.start, start), min(tail.stop, stop)) for tail in tails)

    def _tails_of_multiples(self, group: Group, start: int, stop: int) -> Iterator[Run]:
        interval = self._interval
        if self._covers_all(group):
            yield Run(start, stop)
            return
        length = (start * group.block_size // interval + 1) * interval
        while (tail := self._tail(group, length)).start < stop:
            yield tail
            length += interval

    def _covers_all(self, group: Group) -> bool:
        """Whether the tails of all multiples of the interval leave no block out."""
        return isinstance(group.kind, SlidingWindow) and group.kind.window > self._interval > 0

    def _tail(self, group: Group, length: int) -> Run:
        """The blocks that a search which finds `length` tokens needs."""
        first = group.first_live_block(max(length - self._groups.num_dropped_tokens, 0))
        return Run(first, length // group.block_size)


def _united(runs: Iterable[Run]) -> list[Run]:
    """The union of runs, in order; empty ones left out."""
    united: list[Run] = []
    for run in sorted(runs):
        if run.start >= run.stop:
            continue
        if united and run.start <= united[-1].stop:
            united[-1] = Run(united[-1].start, max(united[-1].stop, run.stop))
        else:
            united.append(run)
    return united


def _validate_interval(interval: int, alignment: int, name: str) -> None:
    if interval < 0 or interval % alignment:
        below = max(interval // alignment, 0) * alignment
        raise ConfigError(
            f"{name} is every {interval} tokens, and hits end at multiples of {alignment} only: "
            f"{below} or {below + alignment} work"
        )
