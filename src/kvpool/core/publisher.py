"""Making full blocks findable, and telling who wants to know.

Owns: the memory of first blocks that explains misses.
Knows nothing of: who decides that a block is computed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, repeat, takewhile

from kvpool.core.block_pool import BlockPool, Lineage, Parent
from kvpool.core.block_table import BlockTable
from kvpool.core.eviction import RecentNames
from kvpool.core.groups import Group, Groups
from kvpool.core.hashing import BlockHasher
from kvpool.core.hit import FirstBlocks, HitEnd
from kvpool.core.publication import Publication, Rank, Run
from kvpool.core.request import RequestLike
from kvpool.events import BlockStored, EventLog
from kvpool.types import NULL_BLOCK, BlockHash, BlockId, GroupId


class Publisher:
    """Commits to the pool what tables say is computed, as far as the publication setting wants it found.

    Hits end where blocks of all groups end, so what lies behind the last such border waits for the next one.
    """

    def __init__(
        self, pool: BlockPool, groups: Groups, publication: Publication, hasher: BlockHasher, events: EventLog | None
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._publication = publication
        self._hasher = hasher
        self._events = events
        self._num_sink_tokens = max(group.kind.num_sinks for group in groups.decoder)
        self._first_blocks = FirstBlocks()
        # Where no group keeps everything, only this tells how much of a prompt others have computed before.
        self._seen = RecentNames()
        self.steady = self._steady_ranks()

    def _steady_ranks(self) -> list[tuple[GroupId, bool]] | None:
        """Which groups publish a block that fills behind all boundaries, and whether it is spare; None: it depends."""
        ranks = [(group, self._publication.steady_rank(group)) for group in self._groups.decoder]
        if self._groups.block_sizes != (self._groups.unit,) or any(rank is None for _, rank in ranks):
            return None
        return [(group.group_id, rank is Rank.SPARE) for group, rank in ranks if rank is not Rank.NAMELESS]

    def publish(
        self,
        requests: Sequence[RequestLike],
        tables: Sequence[BlockTable],
        lengths: Sequence[int],
        encoded: Iterable[bytes | None] = repeat(None),
    ) -> int:
        """So many tokens of each request are computed: commit the blocks that are full now; how many.

        Nothing changes when that raises. `encoded` has each request's last hashing unit as `BlockHasher.encode` gives
        it, where that was done for all.
        """
        before = [table.num_computed for table in tables]
        for table, length in zip(tables, lengths, strict=True):
            table.num_computed = length
        try:
            return self._publish(requests, tables, encoded)
        except BaseException:
            for table, length in zip(tables, before, strict=True):
                table.num_computed = length
            raise

    def _publish(
        self, requests: Sequence[RequestLike], tables: Sequence[BlockTable], encoded: Iterable[bytes | None]
    ) -> int:
        if self._groups.is_plain:
            return self._publish_plain(requests, tables, encoded)
        alignment = self._groups.alignment
        stops = [table.num_computed - table.num_computed % alignment for table in tables]
        if tables and all(map(self._is_steady, tables, stops)):
            return self._publish_steady(requests, tables, encoded)
        new = _New()
        for request, table, stop, unit in zip(requests, tables, stops, encoded, strict=False):
            start = table.num_committed
            if start == stop:
                continue
            chain = request.block_hashes(self._hasher, unit)
            if start == 0:
                first = alignment // self._groups.unit
                self._first_blocks.add(chain[first - 1], request.plain_name(self._hasher, first))
            if not self._groups.keep_all:
                self._seen.update(self._borders(chain, start, stop))
            for bundle in self._groups.bundles:
                size = bundle[0].block_size
                for run in self._publication.runs(bundle[0], table, start // size, stop // size):
                    self._collect(new, bundle, table, chain, run)
        count = new.commit(self._pool, self._groups.bundles, self._events)
        for table, stop in zip(tables, stops, strict=True):
            if table.num_committed != stop:
                table.num_committed = stop
                if table.num_computed == stop:
                    table.last_stop = stop
        return count

    def _is_steady(self, table: BlockTable, stop: int) -> bool:
        """Whether the request has just filled one block more, behind all its boundaries."""
        start = table.num_committed
        is_one_block = start + self._groups.alignment == stop == table.num_computed
        return is_one_block and start >= self.first_steady(table) and self.steady is not None

    def first_steady(self, table: BlockTable) -> int:
        """Blocks of the request that begin here or later are behind all its boundaries. Never its first block."""
        if self._groups.is_plain:
            return 1
        return max(self._num_sink_tokens, table.num_outside, table.boundaries[-1] if table.boundaries else 1)

    @property
    def on_stored(self) -> Callable[[list[BlockStored]], None] | None:
        """Whom others that publish in its place tell what they stored; None: nobody listens."""
        return self._events.stored_all if self._events is not None else None

    @property
    def on_named(self) -> Callable[[list[BlockHash]], None] | None:
        """Whom they tell the names of the common borders that were computed; None: nobody wants them."""
        return self._note_seen if not self._groups.keep_all else None

    def _note_seen(self, names: list[BlockHash]) -> None:
        self._seen.update(names)

    def _publish_steady(
        self, requests: Sequence[RequestLike], tables: Sequence[BlockTable], encoded: Iterable[bytes | None]
    ) -> int:
        """One block of each of these requests: what most steps publish."""
        assert self.steady is not None
        size = self._groups.alignment
        chains = [request.block_hashes(self._hasher, unit) for request, unit in zip(requests, encoded, strict=False)]
        places = [table.num_committed // size for table in tables]
        names = [chain[at] for chain, at in zip(chains, places, strict=True)]
        parents = [chain[at - 1] for chain, at in zip(chains, places, strict=True)]
        for group_id, is_spare in self.steady:
            block_ids = [table.block_ids[group_id][at] for table, at in zip(tables, places, strict=True)]
            self._pool.commit(block_ids, names, group_id, parents, spare=block_ids if is_spare else ())
        if not self._groups.keep_all:
            self._seen.update(names)
        for table in tables:
            table.num_committed = table.last_stop = table.num_computed
        if self._events is not None:
            tokens = [
                tuple(request.token_ids[at * size : (at + 1) * size])
                for request, at in zip(requests, places, strict=True)
            ]
            self._events.stored_all(
                [
                    BlockStored((name,), parent, own, size, group_id)
                    for name, parent, own in zip(names, parents, tokens, strict=True)
                    for group_id, _ in self.steady
                ]
            )
        return len(names) * len(self.steady)

    def _publish_plain(
        self, requests: Sequence[RequestLike], tables: Sequence[BlockTable], encoded: Iterable[bytes | None]
    ) -> int:
        """The same where one group keeps everything, and so publishes everything."""
        size = self._groups.alignment
        block_ids: list[BlockId] = []
        names: list[BlockHash] = []
        parents: list[Parent] = []
        done: list[tuple[BlockTable, int]] = []
        stored: list[tuple[Sequence[BlockHash], BlockHash | None, Sequence[int], int]] = []
        for request, table, unit in zip(requests, tables, encoded, strict=False):
            start, stop = table.num_committed // size, table.num_computed // size
            if start == stop:
                continue
            chain = request.block_hashes(self._hasher, unit)
            if not start:
                self._first_blocks.add(chain[0], request.plain_name(self._hasher))
            done.append((table, stop * size))
            block_ids += table.block_ids[0][start:stop]
            names += chain[start:stop]
            parents += chain[start - 1 : stop - 1] if start else [None, *chain[: stop - 1]]
            if self._events is not None:
                before = chain[start - 1] if start else None
                stored.append((chain[start:stop], before, request.token_ids[start * size : stop * size], size))
        self._pool.commit(block_ids, names, 0, parents)
        for table, stop in done:
            table.num_committed = stop
        if self._events is not None:
            for event in stored:
                self._events.stored(*event)
        return len(names)

    def publish_end(self, table: BlockTable) -> None:
        """The request lets go: what others need to go on from its last common border is found, and spare no longer."""
        if not self._publication.is_ranked or table.num_computed < self._groups.alignment:
            return
        chain = table.request.block_hashes(self._hasher)
        new = _New()
        for bundle in self._groups.bundles:
            if bundle[0].is_windowed:
                run = self._publication.end(bundle[0], table)
                for group in bundle:
                    self._pool.keep(table.block_ids[group.group_id][run.start : run.stop])
                for part in self._nameless(bundle, table, run):
                    self._collect(new, bundle, table, chain, part)
        new.commit(self._pool, self._groups.bundles, self._events)

    def num_seen(self, request: RequestLike, limit: int) -> int:
        """How many tokens of the request, at most `limit`, were computed lately, by common borders; found or not."""
        chain = request.block_hashes(self._hasher)
        borders = self._borders(chain, 0, self._groups.align(min(limit, len(chain) * self._groups.unit)))
        return sum(1 for _ in takewhile(self._seen.__contains__, borders)) * self._groups.alignment

    def _borders(self, chain: Sequence[BlockHash], start: int, stop: int) -> Sequence[BlockHash]:
        """The names of the common borders behind `start`, up to `stop`."""
        unit, every = self._groups.unit, self._groups.alignment // self._groups.unit
        return chain[start // unit + every - 1 : stop // unit : every]

    def why_missing(self, request: RequestLike, num_found: int) -> HitEnd:
        """Why the blocks behind the first `num_found` tokens, up to the next common border, cannot be found."""
        chain, groups = request.block_hashes(self._hasher), self._groups
        group = groups.bundles[0][0]
        # Blocks are evicted tail first, so the last of them is the first to be gone.
        if self._pool.was_evicted(chain[(num_found + groups.alignment) // groups.unit - 1], group.group_id):
            return HitEnd.EVICTED
        if num_found:
            return HitEnd.NEVER_SEEN
        first = groups.alignment // groups.unit
        end = self._first_blocks.miss(chain[first - 1], request.plain_name(self._hasher, first))
        return HitEnd.NOT_KEPT if end == HitEnd.EVICTED and group.is_windowed else end

    def check(self, table: BlockTable) -> None:
        """AssertionError unless every named block of the table carries the request's own content (invariant 9).

        Nameless are blocks that the publication setting left out, and those that were withdrawn.
        """
        chain = table.request.block_hashes(self._hasher)
        for group in self._groups.decoder:
            ids = table.block_ids[group.group_id]
            stop = table.num_committed // group.block_size
            names = group.names(chain, 0, stop)
            for block, name in zip(ids, names, strict=False):
                own = self._pool.name(block)
                assert own is None or own == name, f"invariant 9: {table} holds foreign content"
            late = [block for block in ids[stop:] if self._pool.name(block) is not None]
            assert not late, f"invariant 3: blocks {late} have a name before they are committed: {table}"

    def forget(self) -> None:
        """The cache was cleared: old content is no longer a reason."""
        self._first_blocks = FirstBlocks()
        self._seen = RecentNames()

    def _collect(
        self, new: "_New", bundle: Sequence[Group], table: BlockTable, chain: Sequence[BlockHash], run: Run
    ) -> None:
        """The blocks of this run are to be published, but for those that were let go of already."""
        first, stop = run.start, run.stop
        if NULL_BLOCK in table.block_ids[bundle[0].group_id][first:stop]:
            for part in self._nameless(bundle, table, run):
                self._collect(new, bundle, table, chain, part)
            return
        names = bundle[0].names(chain, first, stop)
        new.add(bundle, run, table, names, self._parents(bundle[0], chain, run))
        if self._events is not None:
            size = bundle[0].block_size
            before = chain[first * bundle[0].scale - 1] if first else None
            tokens = tuple(table.request.token_ids[first * size : stop * size])
            new.stored += [(names, before, tokens, size, group.group_id) for group in bundle]

    def _nameless(self, bundle: Sequence[Group], table: BlockTable, run: Run) -> Iterator[Run]:
        """The parts of this run whose blocks are held and have no name."""
        ids = table.block_ids[bundle[0].group_id]
        is_new = [bool(ids[at]) and self._pool.name(ids[at]) is None for at in range(run.start, run.stop)]
        at = run.start
        for new, blocks in groupby(is_new):
            count = len(list(blocks))
            if new:
                yield Run(at, at + count, run.is_spare)
            at += count

    def _parents(self, group: Group, chain: Sequence[BlockHash], run: Run) -> Sequence[Parent]:
        """Of each block of a run: names that leave the index whenever what it depends on turns out bad."""
        if self._groups.unit == self._groups.alignment:
            before = self._name_at(chain, run.start * group.block_size)
            return [before, *group.names(chain, run.start, run.stop - 1)]
        return [self._lineage(group, chain, at) for at in range(run.start, run.stop)]

    def _lineage(self, group: Group, chain: Sequence[BlockHash], at: int) -> Lineage:
        end = (at + 1) * group.block_size
        before, border = self._groups.align(end - 1), end + -end % self._groups.alignment
        ends = (before + offset for offset in self._groups.inner_ends if before + offset < end)
        inside = tuple((chain[other // self._groups.unit - 1], end - other) for other in ends)
        whole = self._name_at(chain, border) if border > end else None
        return Lineage(self._name_at(chain, before), inside, whole, border - end)

    def _name_at(self, chain: Sequence[BlockHash], num_tokens: int) -> BlockHash | None:
        """What names the first tokens of the request; None for none of them."""
        return chain[num_tokens // self._groups.unit - 1] if num_tokens else None


class _New:
    """Blocks to be committed, by bundle: their names and parents, and the blocks that each group has for them."""

    def __init__(self) -> None:
        self._names: dict[GroupId, tuple[list[BlockHash], list[Parent]]] = {}
        self._block_ids: dict[GroupId, list[BlockId]] = {}
        self._spare: dict[GroupId, list[BlockId]] = {}
        self.stored: list[tuple[Sequence[BlockHash], BlockHash | None, Sequence[int], int, GroupId]] = []
        """What is to be told of them."""

    def add(
        self,
        bundle: Sequence[Group],
        run: Run,
        table: BlockTable,
        names: Sequence[BlockHash],
        parents: Sequence[Parent],
    ) -> None:
        """The blocks of a run."""
        own_names, own_parents = self._names.setdefault(bundle[0].group_id, ([], []))
        own_names += names
        own_parents += parents
        for group in bundle:
            block_ids = table.block_ids[group.group_id][run.start : run.stop]
            self._block_ids.setdefault(group.group_id, []).extend(block_ids)
            self._spare.setdefault(group.group_id, []).extend(block_ids if run.is_spare else ())

    def commit(self, pool: BlockPool, bundles: Iterable[Sequence[Group]], events: EventLog | None) -> int:
        """How many there were."""
        count = 0
        for bundle in bundles:
            names, parents = self._names.get(bundle[0].group_id, ([], []))
            for group in bundle if names else ():
                spare = self._spare[group.group_id]
                pool.commit(self._block_ids[group.group_id], names, group.group_id, parents, spare=spare)
                count += len(names)
        if events is not None:
            for event in self.stored:
                events.stored(*event)
        return count
