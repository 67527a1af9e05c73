"""A cache and its naive model under the same calls, compared after each of them."""

from collections.abc import Callable, Iterable, Sequence

from kvpool.core.block_table import BlockTable
from kvpool.core.decode_batch import DecodeBatch
from kvpool.core.hit import Hit
from kvpool.core.manager import KVCacheManager
from kvpool.core.request import Request
from kvpool.errors import UsageError
from kvpool.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvpool.testing.naive import NaiveCache, NaiveTable, digest_of
from kvpool.types import BlockHash


def check_same(cache: KVCacheManager, naive: NaiveCache) -> None:
    """AssertionError at the first difference between the whole states of a cache and its naive model."""
    assert cache.free_block_ids() == naive.free_list, f"free queue: {cache.free_block_ids()}, {naive.free_list}"
    holders = [cache.holders(block) for block in range(cache.num_blocks)]
    assert holders == [naive.holders(block) for block in range(naive.num_blocks)], f"holders: {holders}"
    assert cache.num_live_requests == len(naive.tables), f"{cache.num_live_requests} requests are live"
    for naive_table in naive.tables:
        _check_same_table(cache.table(naive_table.request), naive_table, naive.block_size)
    findable = {digest_of(cache.hasher, name) for name, _ in naive.stored}
    assert cache.findable() == findable, f"{len(cache.findable())} names can be found, not {len(findable)}"
    assert cache.num_free_blocks == len(naive.free_list), f"{cache.num_free_blocks} blocks are free"
    assert cache.num_evictions == naive.num_evictions, f"{cache.num_evictions} evictions, not {naive.num_evictions}"
    assert cache.usage() == naive.usage(), f"{cache.usage()}, not {naive.usage()}"
    assert cache.stats == naive.stats(), f"{cache.stats}, not {naive.stats()}"


def _check_same_table(table: BlockTable | None, naive: NaiveTable, block_size: int) -> None:
    assert table is not None, f"request {naive.request.request_id!r} is live"
    assert table.block_ids == [naive.block_ids], f"{table}, not {naive.block_ids}"
    assert table.num_slots == len(naive.block_ids) * block_size, f"{table}: slots"
    computed = naive.num_computed
    assert table.num_computed == computed or (table.is_decoding and table.num_computed < computed), (
        f"{table}, {computed}"
    )
    assert table.num_committed == computed // block_size * block_size, f"{table}: committed"


def apply_events(names: set[BlockHash], events: Iterable[Event]) -> None:
    """What a listener does: bring the set of names that it knows up to date."""
    for event in events:
        match event:
            case BlockStored():
                names.update(event.block_hashes)
            case BlockRemoved():
                names.difference_update(event.block_hashes)
            case AllBlocksCleared():
                names.clear()


class MirroredCache:
    """A cache and its naive model under the same calls.

    Every call compares the two answers, then both whole states, and replays the events (invariant 10); every
    `check_interval` calls the cache checks its own invariants, which hashes blocks that nobody asked for yet. An
    AssertionError tells the first difference.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, check_interval: int = 1) -> None:
        self.cache = KVCacheManager(num_blocks, block_size)
        self.naive = NaiveCache(num_blocks, block_size)
        self.batch = self.cache.decode_batch()
        self.decoding: list[Request] = []
        self._heard: set[BlockHash] = set()
        self._check_interval = check_interval
        self._num_calls = 0

    def match(self, request: Request, max_tokens: int | None = None) -> Hit:
        hit = self.cache.match(request, max_tokens)
        expected = self.naive.match(request, max_tokens)
        assert hit == expected, f"{hit}, not {expected}"
        self.check()
        return hit

    def is_stale(self, request: Request, hit: Hit) -> bool:
        """Whether `allocate` must refuse this hit: its blocks hold something else by now, or were another request's."""
        return not self.naive.carries(request, hit.block_ids[0])

    def allocate(self, request: Request, num_tokens: int, hit: Hit | None = None) -> bool:
        """Whether there was room."""
        needed = self.cache.num_blocks_needed(request, num_tokens, hit)
        fits = needed <= len(self.naive.free_list)
        served = self.naive.allocate(request, num_tokens, hit.block_ids[0] if hit else ())
        assert served == fits, f"{needed} blocks needed, {self.cache.num_free_blocks} free: {served}"
        table = self.cache.allocate(request, num_tokens, hit)
        assert (table is not None) == served, f"{table}, the model says {served}"
        assert table is self.cache.table(request) or not served, f"{table} is not the request's table"
        self.check()
        return served

    def commit(self, request: Request, num_computed: int) -> None:
        count = self.cache.commit(request, num_computed)
        expected = self.naive.commit(request, num_computed)
        assert count == expected, f"{count} blocks became findable, not {expected}"
        self.check()

    def step(self, requests: Sequence[Request], token_ids: Sequence[int]) -> list[Request]:
        """One step of a list of requests; answers who was not served."""
        return self._step(requests, requests, token_ids)

    def join(self, request: Request) -> None:
        """The request joins the one batch that there is."""
        self.cache.join(self.batch, request)
        self.naive.join(request)
        self.decoding.append(request)
        self.check()

    def step_batch(self, token_ids: Sequence[int]) -> list[Request]:
        """One step of the batch; answers who was not served."""
        return self._step(self.batch, self.decoding, token_ids)

    def _step(
        self, given: DecodeBatch | Sequence[Request], requests: Sequence[Request], token_ids: Sequence[int]
    ) -> list[Request]:
        before = self.naive.held(requests)
        unserved = self.naive.step(requests)
        result = self.cache.step(given, token_ids)
        assert result.unserved == unserved, f"{result}, the model says {unserved}"
        new = {r.request_id: row for r, row in zip(result.grown, result.block_ids.tolist(), strict=True)}
        grown = [held + new.get(r.request_id, []) for r, held in zip(requests, before, strict=True)]
        assert grown == self.naive.held(requests), f"{result} is not what the tables grew by"
        assert [request.token_ids[-1] for request in requests] == list(token_ids)
        self.check()
        return unserved

    def serve(self) -> bool:
        """Room for those in the batch that have none, first come first served. Whether all have some now."""
        in_need = [request for request in self.decoding if self.naive.lacks_room(request)]
        is_served = len([request for request in in_need if self.naive.allocate(request, 1)]) == len(in_need)
        assert self.cache.serve(self.batch) == is_served, f"serve did not answer {is_served}"
        self.check()
        return is_served

    def leave(self, requests: Sequence[Request]) -> None:
        """These requests go on alone."""
        self.cache.leave(self.batch, requests)
        self.decoding = [request for request in self.decoding if request not in requests]
        self.check()

    def free(self, request: Request) -> None:
        self.cache.free(request)
        self.naive.free(request)
        self.check()

    def clear(self) -> bool:
        cleared = self.cache.clear()
        assert cleared == self.naive.clear(), f"clear answered {cleared}"
        self.check()
        return cleared

    def refuse(self, call: Callable[[KVCacheManager], object]) -> None:
        """This call breaks the protocol: it must raise UsageError and change nothing (invariant 8)."""
        try:
            call(self.cache)
        except UsageError:
            self.check()
        else:
            raise AssertionError("a call that breaks the protocol was served")

    def check(self) -> None:
        """AssertionError unless cache, naive model, batch and events agree now."""
        check_same(self.cache, self.naive)
        self._num_calls += 1
        if self._num_calls % self._check_interval == 0:
            self.cache.check()
        assert self.batch.requests == self.decoding, f"{len(self.batch)} requests are in the batch"
        assert self.batch.num_tokens.tolist() == [request.num_tokens for request in self.decoding]
        assert self.batch.unserved == [request for request in self.decoding if self.naive.lacks_room(request)]
        apply_events(self._heard, self.cache.take_events())
        assert self._heard == self.cache.findable(), "invariant 10: the events tell another story"
