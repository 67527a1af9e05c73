"""A cache of several groups and its oracle under the same calls, compared after each of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.model.layers import Expected, Record
from tests.model.layouts import Layout
from tests.model.oracle import Oracle
from tests.model.spoil import Cut, Doubt, cut_back, cuts, may_be_withdrawn, named, spoil

from kvpool import BlockHash, BlockRemoved, BlockStored, Event, Hit, HitEnd, Request, SlidingWindow


@dataclass(eq=False)
class Live:
    """A live request: room was made for its tokens before `stop`.

    `is_bounded`: no more are in flight than the cache was told of, and no drafts, so what it holds is bounded.
    """

    request: Request
    stop: int
    is_bounded: bool = True
    has_drafts: bool = False
    is_decoding: bool = False


class Pair:
    """The cache and the oracle: every verb asks both."""

    def __init__(self, layout: Layout, check_interval: int = 20) -> None:
        self.layout = layout
        self.cache = layout.cache()
        self.oracle = Oracle(
            layout.num_blocks, layout.kinds, layout.publication, layout.drops_last_block, self.cache.hasher
        )
        self.batch = self.cache.decode_batch()
        self.live: dict[str, Live] = {}
        self.decoding: list[Live] = []
        self.counts: Counter[str] = Counter()
        self._heard: list[set[BlockHash]] = [set() for _ in layout.kinds]
        self._check_interval = check_interval

    def record(self, live: Live) -> Record:
        return self.oracle.records[live.request.request_id]

    def num_slots(self, live: Live) -> int:
        """How many of its tokens have room in all groups."""
        ids = self.record(live).ids
        return min(len(ids[g.group_id]) * g.size for g in self.oracle.decoder)

    def match(self, request: Request, limit: int | None) -> tuple[Hit, Expected]:
        hit = self.cache.match(request, limit)
        if not request.reads_cache:
            assert hit.num_tokens == 0
            return hit, Expected(0, 0, 0, [[] for _ in self.layout.kinds])
        expected = self.oracle.match(request, request.num_tokens - 1 if limit is None else limit)
        same = (expected.num_tokens, expected.ids, expected.num_shared)
        assert (hit.num_tokens, list(hit.block_ids), hit.num_shared_tokens) == same, f"{hit}, not {expected}"
        is_lagging = hit.reason is HitEnd.LAGGING_GROUP
        lags = self.oracle.asked_first[0].is_full and expected.num_found < expected.num_shared
        assert is_lagging == lags, f"{hit}, not {expected}"
        self.counts["hits"] += hit.num_tokens > 0
        self.counts["lagging"] += is_lagging
        return hit, expected

    def admit(self, request: Request, found: tuple[Hit, Expected], external: int, num_tokens: int) -> Live | None:
        hit, expected = found
        free, start = len(self.oracle.free_list), expected.num_tokens + external
        needed = self.cache.num_blocks_needed(request, num_tokens, hit, num_external_tokens=external)
        first = self.oracle.first_blocks(expected.ids, start)
        assert needed == self.oracle.num_needed(request, first, start, start + num_tokens), f"{needed} needed"
        served = self.oracle.admit(request, expected, external, num_tokens)
        table = self.cache.allocate(request, num_tokens, hit, num_external_tokens=external)
        assert (table is not None) == served == (needed <= free), f"{table}, {needed} blocks needed, {free} were free"
        if not served:
            return None
        assert free - len(self.oracle.free_list) == needed
        live = self.live[request.request_id] = Live(request, start + num_tokens)
        live.is_bounded = external + num_tokens <= self.layout.max_in_flight_tokens
        return live

    def grow(self, live: Live, num_tokens: int, ahead: int = 0) -> bool:
        request, record = live.request, self.record(live)
        needed = self.cache.num_blocks_needed(request, num_tokens, num_lookahead_tokens=ahead)
        start, stop = record.computed, record.computed + num_tokens
        assert needed == self.oracle.num_needed(request, record.ids, start, stop, ahead), f"{needed} needed"
        served = self.oracle.allocate(request, num_tokens, ahead)
        table = self.cache.allocate(request, num_tokens, num_lookahead_tokens=ahead)
        assert (table is not None) == served, f"{table}, {needed} blocks needed"
        live.has_drafts |= ahead > 0 and served
        live.stop = max(live.stop, stop) if served else live.stop
        in_flight = live.stop - record.computed
        live.is_bounded = not live.has_drafts and in_flight <= self.layout.max_in_flight_tokens
        return served

    def commit(self, live: Live, n: int) -> None:
        count, expected = self.cache.commit(live.request, n), self.oracle.commit(live.request, n)
        assert count == expected, f"{count} blocks became findable, not {expected}"
        self.counts["published"] += count

    def trim(self, live: Live) -> None:
        self.cache.trim(live.request)
        self.oracle.trim(live.request)
        live.stop, live.has_drafts = min(live.request.num_tokens, self.num_slots(live)), False

    def free(self, live: Live) -> None:
        self.counts["null blocks"] += sum(own.count(0) for own in self.record(live).ids)
        scratch = self.record(live).scratch
        self.oracle.free(live.request)
        self.cache.free(live.request)
        # These come first in the free queue, in an order that nothing depends on.
        self.oracle.front[: len(scratch)] = sorted(scratch, key=self.cache.free_block_ids().index)
        del self.live[live.request.request_id]

    def step(self, lives: Sequence[Live], token_ids: Sequence[int], in_batch: bool) -> None:
        """The same as commit, append and allocate for each in order."""
        before = [[list(own) for own in self.record(live).ids] for live in lives]
        result = self.cache.step(self.batch if in_batch else [live.request for live in lives], token_ids)
        unserved = []
        for live, token in zip(lives, token_ids, strict=True):
            request = live.request
            assert request.token_ids[-1] == token
            self.oracle.commit(request, request.num_tokens - 1)
            if not self._next_token(live):
                unserved.append(request)
        assert result.unserved == unserved, f"unserved {result.unserved}, not {unserved}"
        grown = dict(zip([request.request_id for request in result.grown], result.block_ids.tolist(), strict=True))
        for live, old in zip(lives, before, strict=True):
            new = [own[len(was) :] for own, was in zip(self.record(live).ids, old, strict=True)]
            row = grown.get(live.request.request_id, [0] * len(new))
            assert row == [own[-1] if own else 0 for own in new], f"{row}, {new}"
        self.counts["unserved"] += len(unserved)

    def _next_token(self, live: Live) -> bool:
        """Room for the last token of a request that decodes, in the oracle. Whether there was any."""
        served = self.oracle.allocate(live.request, 1)
        live.stop = live.request.num_tokens if served else live.request.num_tokens - 1
        return served

    def join(self, live: Live) -> None:
        self.cache.join(self.batch, live.request)
        record = self.record(live)
        self.oracle.commit(live.request, max(record.computed, live.request.num_tokens - 1))
        live.is_decoding = True
        self.decoding.append(live)

    def leave(self, lives: Sequence[Live]) -> None:
        self.cache.leave(self.batch, [live.request for live in lives])
        self._left(lives)

    def _left(self, lives: Sequence[Live]) -> None:
        for live in lives:
            live.is_decoding = False
            self.decoding.remove(live)

    def serve(self) -> bool:
        short = [live for live in self.decoding if self.num_slots(live) < live.request.num_tokens]
        served = [self._next_token(live) for live in short]
        assert self.cache.serve(self.batch) == all(served)
        return all(served)

    def clear(self) -> None:
        assert self.cache.clear() == self.oracle.clear()

    def invalidate(self, bad: set[int]) -> None:
        """All that depends on bad blocks is gone afterwards, and nothing but what is named after them."""
        doubts = spoil(self.oracle, bad)
        expected = cuts(self.oracle, bad, doubts)
        cut = self.cache.invalidate(bad)
        self._withdraw(doubts)
        for request_id in [*cut, *expected]:
            n, computed = cut.get(request_id), self.oracle.records[request_id].computed
            right = expected.get(request_id, Cut(computed, computed))
            assert right.least <= (computed if n is None else n) <= right.most, f"{request_id} cut to {n}, not {right}"
        for request_id, n in cut.items():
            live = self.live[request_id]
            if live.is_decoding:
                self._left([live])
            cut_back(self.oracle, self.record(live), n)
            live.stop = n
        self.counts["cut back"] += len(cut)

    def _withdraw(self, doubts: list[Doubt]) -> None:
        """What the cache gave up: all names that depend on bad content, none but those that are named after it.

        And those that no lookup reaches now: what they depend on is not known any more.
        """
        findable = [self.cache.findable(g.group_id) for g in self.oracle.groups]
        blocks = list(named(self.oracle))
        gone = {block: content for block, content in blocks if content.digest not in findable[content.layers.group_id]}
        still_bad = [block for block, content in blocks if content.is_bad and block not in gone]
        assert not still_bad, f"blocks {still_bad} depend on a bad block, and are findable"
        fine = [block for block in gone if not may_be_withdrawn(self.oracle, gone[block], doubts)]
        assert not fine, f"blocks {fine} are fine, and were withdrawn"
        self.oracle.forget(list(gone))
        self.counts["withdrawn"] += len(gone)

    # -- comparing

    def check(self, num_calls: int) -> None:
        """AssertionError unless both agree now."""
        free = self.cache.free_block_ids()
        assert free == self.oracle.free_list, f"free queue {free}, not {self.oracle.free_list}"
        assert self.cache.num_evictions == self.oracle.num_evictions
        assert self.cache.num_live_requests == len(self.oracle.records)
        for live in self.live.values():
            self._check_table(live)
        if num_calls % self._check_interval == 0:
            self._check_names()

    def _check_table(self, live: Live) -> None:
        record, table = self.record(live), self.cache.table(live.request)
        assert table is not None
        assert table.block_ids == record.ids, f"{table}, not {record.ids}"
        assert list(table.scratch_ids) == record.scratch
        assert live.is_decoding or table.num_computed == record.computed, f"{table}, {record.computed} computed"
        if live.is_bounded:
            most = self.cache.max_blocks(live.stop, live.request.num_encoder_tokens)
            assert record.num_held <= most, f"{table} holds {record.num_held}, at most {most}"
            self._check_windows(live, record)

    def _check_windows(self, live: Live, record: Record) -> None:
        for g, own in zip(self.oracle.groups, record.ids, strict=True):
            if isinstance(g.kind, SlidingWindow):
                tokens = min(g.kind.window - 1 + self.layout.max_in_flight_tokens, live.stop)
                held = sum(block > 0 for block in own)
                assert held <= g.num_blocks(tokens) + 1 + g.num_blocks(g.kind.num_sinks), f"{held} in a window"

    def _check_names(self) -> None:
        self.cache.check()
        self._hear(self.cache.take_events())
        published: list[set[BlockHash]] = [set() for _ in self.layout.kinds]
        for _, content in named(self.oracle):
            published[content.layers.group_id].add(content.digest)
        for group_id, names in enumerate(published):
            assert self.cache.findable(group_id) == names, f"group {group_id}: other names can be found"
            assert self._heard[group_id] == names, f"invariant 10: group {group_id}: the events tell another story"
        num_cached = sum(not self.oracle.holders[block] for block, _ in named(self.oracle))
        assert self.cache.usage().num_cached == num_cached

    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._heard[event.group_id].update(event.block_hashes)
                case BlockRemoved():
                    self._heard[event.group_id].difference_update(event.block_hashes)
                case _:
                    self._heard = [set() for _ in self._heard]
