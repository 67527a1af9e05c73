"""For integrators and for us: ways to drive a cache and to prove it right.

`NaiveCache` says what a cache should do, `check_same` compares whole states, `MirroredCache` does so after every call.
`serve` runs a whole prompt. `golden_adapter` gives the face of a serving history whose figures vLLM's own manager gave.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from kvpool.core.block_table import BlockTable
from kvpool.core.decode_batch import DecodeBatch
from kvpool.core.groups import FullAttention
from kvpool.core.hashing import BlockHasher, ExtraKey
from kvpool.core.hit import Hit, HitEnd
from kvpool.core.manager import KVCacheManager
from kvpool.core.request import Request
from kvpool.errors import UsageError
from kvpool.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvpool.stats import CacheStats, Usage
from kvpool.types import BlockHash, BlockId

Keys: TypeAlias = "tuple[ExtraKey, ...]"
Name: TypeAlias = tuple[tuple[int, ...], tuple[Keys, ...]]
"""What the naive model calls a block's content: all tokens from the start, and the extra keys of every block."""


@dataclass
class NaiveTable:
    """The blocks of one live request, and how many of its tokens are computed."""

    request: Request
    block_ids: list[BlockId]
    num_computed: int


class NaiveCache:
    """What `KVCacheManager` should do, written a second time in the plainest way: lists, searched from end to end.

    Nothing is counted ahead and nothing is hashed, so there is little to get wrong. It expects calls that keep the
    protocol, reads requests and never changes them, and shares no code with the core.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_list = list(range(1, num_blocks))
        self.tables: list[NaiveTable] = []
        self.stored: list[tuple[Name, BlockId]] = []
        """Every block with findable content, in the order of their commits."""
        self.seen: set[Name] = set()
        """Every name that was stored since the last clear."""
        self.num_evictions = 0
        self.admissions: list[tuple[bool, int, int]] = []
        """Of each admission that reads the cache: came back after a preemption, tokens queried, tokens hit."""

    def names(self, request: Request) -> list[Name]:
        """The name of each full block of the request."""
        size, names, keys = self.block_size, list[Name](), list[Keys]()
        for stop in range(size, request.num_tokens + 1, size):
            keys.append(_extra_keys(request, stop - size, stop))
            names.append((tuple(request.token_ids[:stop]), tuple(keys)))
        return names

    def find(self, name: Name) -> BlockId | None:
        """The block that was committed first under this name, of those that still hold it."""
        return next((block for stored, block in self.stored if stored == name), None)

    def carries(self, request: Request, block_ids: Sequence[BlockId]) -> bool:
        """Whether these blocks hold the first blocks of the request."""
        names = self.names(request)
        return len(block_ids) <= len(names) and all(pair in self.stored for pair in zip(names, block_ids, strict=False))

    def table(self, request: Request) -> NaiveTable | None:
        return next((table for table in self.tables if table.request is request), None)

    def held(self, requests: Sequence[Request]) -> list[list[BlockId]]:
        """The blocks of each of these live requests."""
        return [list(table.block_ids) for request in requests if (table := self.table(request)) is not None]

    def holders(self, block_id: BlockId) -> int:
        return sum(table.block_ids.count(block_id) for table in self.tables)

    def match(self, request: Request, max_tokens: int | None = None) -> Hit:
        """The longest hit, and why it is not longer."""
        limit = request.num_tokens - 1 if max_tokens is None else min(max_tokens, request.num_tokens)
        names = self.names(request)
        found: list[BlockId] = []
        for name in names[: limit // self.block_size] if request.reads_cache else []:
            block = self.find(name)
            if block is None:
                break
            found.append(block)
        return Hit(len(found) * self.block_size, (found,), self._end(request, names, len(found), limit))

    def _end(self, request: Request, names: list[Name], num_found: int, limit: int) -> HitEnd:
        if not request.reads_cache:
            return HitEnd.NOT_READ
        if num_found == limit // self.block_size:
            return HitEnd.LAST_TOKEN if num_found < len(names) else HitEnd.PARTIAL_BLOCK
        if names[num_found] in self.seen:
            return HitEnd.EVICTED
        tokens, _ = names[num_found]
        same_tokens = num_found == 0 and any(tokens == seen for seen, _ in self.seen)
        return HitEnd.OTHER_KEYS if same_tokens else HitEnd.NEVER_SEEN

    def allocate(self, request: Request, num_tokens: int, hit_blocks: Sequence[BlockId] = ()) -> bool:
        """Whether there is room for all; if not, nothing changed."""
        table = self.table(request) or NaiveTable(request, list(hit_blocks), len(hit_blocks) * self.block_size)
        free = [block for block in self.free_list if block not in hit_blocks]
        wanted = -(-(table.num_computed + num_tokens) // self.block_size)
        missing = max(wanted - len(table.block_ids), 0)
        if missing > len(free):
            return False
        if table not in self.tables:
            self._admit(table)
        self._evict(free[:missing])
        table.block_ids += free[:missing]
        self.free_list = free[missing:]
        return True

    def _admit(self, table: NaiveTable) -> None:
        self.tables.append(table)
        if table.request.reads_cache:
            resumed = table.request.num_preemptions > 0
            self.admissions.append((resumed, table.request.num_tokens, table.num_computed))

    def _evict(self, block_ids: Sequence[BlockId]) -> None:
        left = [(name, block) for name, block in self.stored if block not in block_ids]
        self.num_evictions += len(self.stored) - len(left)
        self.stored = left

    def commit(self, request: Request, num_computed: int) -> int:
        """How many blocks became findable."""
        table = self.table(request)
        assert table is not None
        table.num_computed = num_computed
        full = zip(self.names(request), table.block_ids[: num_computed // self.block_size], strict=False)
        new = [(name, block) for name, block in full if all(block != other for _, other in self.stored)]
        self.stored += new
        self.seen.update(name for name, _ in new)
        return len(new)

    def join(self, request: Request) -> None:
        """All tokens but the last are computed."""
        table = self.table(request)
        assert table is not None
        self.commit(request, max(table.num_computed, request.num_tokens - 1))

    def lacks_room(self, request: Request) -> bool:
        table = self.table(request)
        assert table is not None
        return len(table.block_ids) * self.block_size < request.num_tokens

    def step(self, requests: Sequence[Request]) -> list[Request]:
        """Everything is computed and each gets room for one more token; answers those without. Appends no token."""
        unserved = []
        for request in requests:
            self.commit(request, request.num_tokens)
            if not self.allocate(request, 1):
                unserved.append(request)
        return unserved

    def free(self, request: Request) -> None:
        table = self.table(request)
        assert table is not None
        self.tables.remove(table)
        idle = [block for block in reversed(table.block_ids) if not self.holders(block)]
        cached = [block for _, block in self.stored]
        front = [block for block in idle if block not in cached]
        self.free_list = front + self.free_list + [block for block in idle if block in cached]

    def clear(self) -> bool:
        """False, and nothing changed, while any request is live."""
        if self.tables:
            return False
        self.stored, self.seen = [], set()
        return True

    def usage(self) -> Usage:
        held = {block for table in self.tables for block in table.block_ids}
        cached = {block for _, block in self.stored} - held
        slots = {
            (table.block_ids[position // self.block_size], position % self.block_size)
            for table in self.tables
            for position in range(table.num_computed)
        }
        num_empty = self.num_blocks - 1 - len(held) - len(cached)
        return Usage(self.num_blocks - 1, len(held), len(cached), num_empty, len(slots), self.block_size)

    def stats(self) -> CacheStats:
        first = [(queried, hit) for resumed, queried, hit in self.admissions if not resumed]
        again = [(queried, hit) for resumed, queried, hit in self.admissions if resumed]
        return CacheStats(*_summed(first), *_summed(again))


def _extra_keys(request: Request, start: int, stop: int) -> Keys:
    """The extra keys of the block of tokens start .. stop - 1: adapter, media in order, then the owners."""
    keys: list[ExtraKey] = []
    if request.adapter is not None:
        keys.append(("lora", request.adapter.name, request.adapter.unique_id))
    for item in sorted(request.media, key=lambda item: item.offset):
        if start < item.offset + item.length and item.offset < stop:
            keys.append(("mm", item.identifier, item.offset - start))
    if start == 0 and request.tenant is not None:
        keys.append(("tenant", request.tenant))
    if start == 0 and request.cache_salt is not None:
        keys.append(("cache_salt", request.cache_salt))
    return tuple(keys)


def _summed(pairs: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    return len(pairs), sum(queried for queried, _ in pairs), sum(hit for _, hit in pairs)


@lru_cache(maxsize=4096)
def _digest(hasher: BlockHasher, name: Name) -> BlockHash:
    tokens, keys = name
    return hasher.names(tokens, None, keys)[-1]


def check_same(cache: KVCacheManager, naive: NaiveCache) -> None:
    """AssertionError at the first difference between the whole states of a cache and its naive model."""
    assert cache.free_block_ids() == naive.free_list, f"free queue: {cache.free_block_ids()}, {naive.free_list}"
    holders = [cache.holders(block) for block in range(cache.num_blocks)]
    assert holders == [naive.holders(block) for block in range(naive.num_blocks)], f"holders: {holders}"
    assert cache.num_live_requests == len(naive.tables), f"{cache.num_live_requests} requests are live"
    for naive_table in naive.tables:
        _check_same_table(cache.table(naive_table.request), naive_table, naive.block_size)
    findable = {_digest(cache.hasher, name) for name, _ in naive.stored}
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
        new = {r.request_id: [block] for r, block in zip(result.grown, result.block_ids.tolist(), strict=True)}
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


def serve(cache: KVCacheManager, request: Request) -> Hit:
    """Admit a request, compute all its tokens, and publish them. The pool must have room."""
    hit = cache.match(request)
    table = cache.allocate(request, request.num_tokens - hit.num_tokens, hit)
    assert table is not None, f"{request.request_id!r} does not fit: {cache.num_free_blocks} blocks are free"
    cache.commit(request, request.num_tokens)
    return hit


class GoldenAdapter:
    """A cache under the calls of a first-come-first-served scheduler that publishes blocks as it allocates them."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache

    def request(self, name: str, tokens: list[int]) -> Request:
        return Request(name, tokens)

    def lookup(self, request: Request) -> tuple[Hit, int]:
        """The cached prefix and its number of tokens; changes nothing."""
        hit = self.cache.match(request)
        return hit, hit.num_tokens

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Hit | None = None,
        num_hit_tokens: int = 0,
        *,
        first: bool = False,
    ) -> bool:
        """Room for `num_new_tokens` after the computed ones, which become findable at once. False: nothing changed."""
        assert hit is None or hit.num_tokens == num_hit_tokens
        assert first or self.cache.table(request) is not None
        table = self.cache.allocate(request, num_new_tokens, hit)
        if table is None:
            return False
        self.cache.commit(request, table.num_computed + num_new_tokens)
        return True

    def computed(self, request: Request, num_tokens: int) -> None:
        """The request now has this many computed tokens; 0 once it was freed for a preemption."""
        table = self.cache.table(request)
        assert num_tokens == (table.num_computed if table is not None else 0)

    def append(self, request: Request, token: int) -> None:
        request.append(token)

    def block_ids(self, request: Request) -> list[list[int]]:
        table = self.cache.table(request)
        assert table is not None
        return table.block_ids

    def free(self, request: Request) -> None:
        self.cache.free(request)

    def step(self) -> None:
        """A new scheduler step begins: nothing to do."""


def golden_adapter(
    *, num_blocks: int, groups: Sequence[FullAttention] = (FullAttention(),), **options: Any
) -> GoldenAdapter:
    """An adapter over a new cache of `num_blocks` blocks of 16 tokens; other options are those of KVCacheManager."""
    return GoldenAdapter(KVCacheManager(num_blocks, groups=groups, **{"events": False, **options}))
