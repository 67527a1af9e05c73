"""Bad content, as the oracle sees it: what depends on it, how far requests can be trusted, what must not be found."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tests.model.layers import Content, Layers, Record, Run
from tests.model.oracle import Oracle


@dataclass(frozen=True)
class Doubt:
    """A bad block: it begins at token `start` of a request whose prefixes are `pids`, behind the border at `border`."""

    pids: list[int]
    start: int
    border: int

    def is_of(self, pids: list[int], end: int) -> bool:
        """Whether `end` tokens of another request are named after it, or share a hit's last stretch with it."""
        if end > self.start:
            return pids[self.start + 1] == self.pids[self.start + 1]
        return end > self.border and pids[end] == self.pids[end]


@dataclass(frozen=True)
class Cut:
    """How far a request may be trusted: `most` tokens; `least` if all is doubted that is named after bad content."""

    least: int
    most: int


def cuts(oracle: Oracle, bad: Collection[int], doubts: Collection[Doubt]) -> dict[str, Cut]:
    """After `spoil`: of each live request that holds one of these blocks, or depends on one or on its name."""
    found = {}
    for request_id, record in oracle.records.items():
        first = _first_bad(oracle, record, bad)
        doubted = [doubt.start for doubt in doubts if doubt.is_of(record.pids, record.computed)]
        most = record.computed if first is None else _good_length(oracle, record, first)
        if first is not None or doubted:
            found[request_id] = Cut(_good_length(oracle, record, min([most, *doubted])), most)
    return found


def _first_bad(oracle: Oracle, record: Record, bad: Collection[int]) -> int | None:
    """The first token that the request must not rely on."""
    starts = [
        0 if g.is_encoder else index * g.size
        for g, own in zip(oracle.groups, record.ids, strict=True)
        for index, block in enumerate(own)
        if block in bad
    ]
    if record.run.bad_from < record.computed:
        starts.append(int(record.run.bad_from))
    starts += [int(base.bad_from) for base, end in record.run.bases if base.bad_from < end]
    return min(starts, default=None)


def _good_length(oracle: Oracle, record: Record, end: int) -> int:
    """The longest prefix before token `end` of which all is held that the next token looks at."""
    lengths = range(oracle.align(min(record.computed, end)), 0, -oracle.alignment)
    return next((n for n in lengths if all(_holds(oracle, record, g, n) for g in oracle.decoder)), 0)


def _holds(oracle: Oracle, record: Record, g: Layers, n: int) -> bool:
    """All that token n looks at; a state only if it is published, since it may be written on otherwise."""
    contents = [oracle.content[record.ids[g.group_id][index]] for index in g.blocks_looked_at(n)]
    return all(content is not None and (bool(content.name) or not g.is_state) for content in contents)


def spoil(oracle: Oracle, bad: Collection[int]) -> list[Doubt]:
    """These blocks turn out wrong, and so does what was computed on top of them.

    Answers where they stand: what is named after them may be withdrawn too.
    """
    doubts = []
    for block in bad:
        content = oracle.content[block]
        if content is None or not (content.name or oracle.holders[block]):
            continue
        first = max(content.start, content.end - 1) if content.layers.is_state else content.start
        content.run.bad_from = min(content.run.bad_from, first)
        if content.start + 1 < len(content.run.pids):
            doubts.append(Doubt(content.run.pids, content.start, oracle.align(content.start)))
    runs = _all_runs(oracle)
    while any(_spread(run) for run in runs):
        pass
    return doubts


def _spread(run: Run) -> bool:
    """Whether the run turned bad because of what it stands on."""
    if run.bad_from > run.start and any(base.bad_from < end for base, end in run.bases):
        run.bad_from = run.start
        return True
    return False


def _all_runs(oracle: Oracle) -> set[Run]:
    waiting = [content.run for content in oracle.content if content] + [r.run for r in oracle.records.values()]
    runs: set[Run] = set()
    while waiting:
        run = waiting.pop()
        if run not in runs:
            runs.add(run)
            waiting += [base for base, _ in run.bases]
    return runs


def named(oracle: Oracle) -> Iterator[tuple[int, Content]]:
    """Every block that can be found."""
    for block, content in enumerate(oracle.content):
        if content is not None and content.name:
            yield block, content


def may_be_withdrawn(oracle: Oracle, content: Content, doubts: Collection[Doubt]) -> bool:
    """Whether it is named after one of these, or nobody can tell: no group keeps all, or one that does has gaps."""
    pids, full = content.run.pids, [g for g in oracle.decoder if g.is_full]
    if not full or any(doubt.is_of(pids, content.end) for doubt in doubts):
        return True
    ends = ((g.group_id, end) for g in full for end in range(g.size, content.end + 1, g.size))
    return not all((group_id, pids[end]) in oracle.published for group_id, end in ends)


def cut_back(oracle: Oracle, record: Record, n: int) -> None:
    """The request goes on from its first n tokens, in a run of its own on top of what it keeps."""
    oracle.cut(record, n)
    old = record.run
    kept = [(run, end) for run, end in old.bases if end <= n]
    record.run = Run(old.pids, n, [(old, n), *kept])
    record.computed = record.outside = n
    record.committed = min(record.committed, n)
    # What it is cut back to is a state that stands just there.
    record.stops = {stop for stop in record.stops if stop < n} | {n}
