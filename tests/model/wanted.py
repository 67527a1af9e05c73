"""Which computed blocks the oracle expects to be found, by the publication setting."""

from tests.model.layers import Expected, Layers, Record

from kvpool import Request, SlidingWindow, StateSpace


class Wanted:
    """One setting, in a cache whose hits end at multiples of `alignment` and leave out `num_dropped` tokens."""

    def __init__(self, publication: str | int, alignment: int, num_dropped: int) -> None:
        self.publication = publication
        self.is_ranked = publication == "ranked"
        self.alignment = alignment
        self.interval = publication if isinstance(publication, int) else alignment
        self.num_dropped = num_dropped
        self._in_tails: dict[tuple[int, int], bool] = {}

    def boundaries(self, request: Request, hit: Expected) -> set[int]:
        """Lengths at which others may go on: where the same prompt would hit, and where groups began to disagree."""
        replay = (request.num_prompt_tokens - 1) // self.alignment * self.alignment
        junction = hit.num_shared if hit.num_shared - self.num_dropped > hit.num_tokens else 0
        return {replay, junction} - {0}

    def end(self, record: Record, g: Layers) -> list[int]:
        """Blocks of the tail of the last common border of a request that lets go; a state must have stopped there."""
        border = record.computed // self.alignment * self.alignment
        if g.is_full or not border:
            return []
        if isinstance(g.kind, StateSpace):
            is_there = border in record.stops and g.kind.checkpoints != "none"
            return g.blocks_looked_at(border) if is_there else []
        tail = g.blocks_of_hit(border, self.num_dropped)
        if not isinstance(g.kind, SlidingWindow):
            return tail
        # Sinks before the window were published long ago.
        first = max(border - self.num_dropped - g.kind.window + 1, 0)
        return [index for index in tail if (index + 1) * g.size > first]

    def is_kept(self, record: Record, g: Layers, index: int) -> bool:
        """Whether a computed block lies in a tail that somebody may well ask for."""
        end = (index + 1) * g.size
        if isinstance(g.kind, StateSpace):
            is_chosen = end + self.num_dropped in record.boundaries
            return is_chosen and end == record.computed and g.kind.checkpoints != "none"
        num_sinks = g.kind.num_sinks if isinstance(g.kind, SlidingWindow) else 0
        if g.is_full or index * g.size < num_sinks:
            return True
        return any(index in g.blocks_of_hit(length, self.num_dropped) for length in record.boundaries)

    def is_published(self, record: Record, g: Layers, index: int) -> bool:
        """Whether the setting wants a computed block found that lies in no such tail."""
        end = (index + 1) * g.size
        if isinstance(g.kind, StateSpace):
            interval = self._state_interval(g.kind, record.request)
            is_chosen = interval > 0 and end % interval == 0
            return is_chosen and end == record.computed and g.kind.checkpoints != "none"
        if self.is_ranked or self.publication == "every":
            return True
        if (g.group_id, index) not in self._in_tails:
            lengths = range(self.interval, end + self.num_dropped + 100, self.interval) if self.interval else ()
            tails = [g.blocks_of_hit(length, self.num_dropped) for length in lengths]
            self._in_tails[g.group_id, index] = any(index in tail for tail in tails)
        return self._in_tails[g.group_id, index]

    def _state_interval(self, kind: StateSpace, request: Request) -> int:
        interval = kind.checkpoints if isinstance(kind.checkpoints, int) else self.interval
        if kind.max_checkpoints is None or not interval:
            return interval
        num_borders = (request.num_prompt_tokens + (request.max_tokens or 0)) // interval
        return interval * max(-(-num_borders // kind.max_checkpoints), 1) if kind.max_checkpoints else 0
