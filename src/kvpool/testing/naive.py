"""What a cache should do, said as simply as possible.

Shares no code with the core: content is named by all its tokens, nothing is kept that can be worked out again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from kvpool.core.hashing import BlockHasher, ExtraKey
from kvpool.core.hit import Hit, HitEnd
from kvpool.core.request import Request
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
        num_tokens = len(found) * self.block_size
        return Hit(num_tokens, (found,), self._end(request, names, len(found), limit), num_tokens)

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
        return Usage(self.num_blocks - 1, len(held), len(cached), num_empty, len(slots), len(held) * self.block_size)

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
def digest_of(hasher: BlockHasher, name: Name) -> BlockHash:
    tokens, keys = name
    return hasher.names(tokens, None, keys)[-1]
