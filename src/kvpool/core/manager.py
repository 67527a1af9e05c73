"""match . allocate . commit . free for whole requests, all or nothing; and the decode step of many at once.

Owns: the block tables of live requests.
Knows nothing of: scheduling, models, devices, time.
"""

import operator
from collections.abc import Collection, Sequence
from weakref import WeakSet

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.decode_batch import DecodeBatch, StepResult
from kvpool.core.groups import FullAttention
from kvpool.core.hashing import DEFAULT_SEED, BlockHasher
from kvpool.core.hit import Hit, HitEnd
from kvpool.core.publisher import Publisher
from kvpool.core.request import RequestLike
from kvpool.errors import ConfigError, UsageError
from kvpool.events import Event, EventLog
from kvpool.stats import CacheStats, Usage
from kvpool.types import BlockHash, BlockId, RequestId


class KVCacheManager:
    """The KV cache of one replica: `num_blocks` blocks of `block_size` tokens, block 0 being the null block.

    Every call is all or nothing: what cannot be served in full changes nothing (invariant 8). Live requests are known
    by their id. Not thread-safe: one scheduler calls it (hashing ahead on other threads is fine, see `Request`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        groups: Sequence[FullAttention] = (FullAttention(),),
        *,
        seed: str = DEFAULT_SEED,
        events: bool = True,
    ) -> None:
        if len(groups) != 1:
            raise ConfigError(f"{len(groups)} groups of layers are given: this version serves exactly 1")
        self.block_size = block_size
        self.hasher = BlockHasher(block_size, seed)
        self.groups = tuple(groups)
        self.stats = CacheStats()
        self._group = groups[0]
        self._events = EventLog() if events else None
        self._pool = BlockPool(num_blocks, self._events)
        self._tables: dict[RequestId, BlockTable] = {}
        self._batches: WeakSet[DecodeBatch] = WeakSet()
        self._publisher = Publisher(self._pool, self.hasher, self._events)

    # -- verbs

    def match(self, request: RequestLike, max_tokens: int | None = None) -> Hit:
        """The longest cached prefix of the request, and why it ended. Changes nothing.

        At most `max_tokens` tokens are matched; unless told, all but the last, which must be computed to give logits.
        UsageError when that is negative.
        """
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(
                f"request {request.request_id!r}: at most {max_tokens} tokens cannot be matched: 0 or more"
            )
        if not request.reads_cache:
            return Hit(0, ([],), HitEnd.NOT_READ)
        names = request.block_hashes(self.hasher)
        limit = request.num_tokens
        limit = limit - 1 if max_tokens is None else min(max_tokens, limit)
        found = self._group.longest_hit(self._pool, names[: limit // self.block_size])
        return Hit(len(found) * self.block_size, (found,), self._reason(request, names, len(found), limit))

    def num_blocks_needed(self, request: RequestLike, num_tokens: int, hit: Hit | None = None) -> int:
        """The blocks that `allocate` with these arguments would take out of the free queue, idle hits included."""
        table = self._tables.get(request.request_id)
        if table is not None:
            return max(
                self._group.num_blocks(table.num_computed + num_tokens, self.block_size) - len(table.block_ids[0]), 0
            )
        if hit is None:
            return self._group.num_blocks(num_tokens, self.block_size)
        total = self._group.num_blocks(hit.num_tokens + num_tokens, self.block_size)
        return total - len(hit.block_ids[0]) + self._pool.num_idle(hit.block_ids[0])

    def allocate(self, request: RequestLike, num_tokens: int, hit: Hit | None = None) -> BlockTable | None:
        """Make room for `num_tokens` tokens after the computed ones, and answer the request's block table.

        A request's first allocation admits it: the blocks of `hit` become its first blocks, and their tokens count as
        computed. Later ones append blocks, or nothing while there is room. None when the free queue cannot supply all
        blocks. UsageError for a second request of the same id, a stale hit, a hit for a live request, no tokens at all.
        """
        table = self._tables.get(request.request_id)
        if table is None:
            return self._admit(request, num_tokens, hit)
        self._require_alone(request)
        if hit is not None and hit.num_tokens:
            raise UsageError(
                f"request {request.request_id!r} holds blocks already: a hit comes with its first allocation"
            )
        if num_tokens < 1:
            raise UsageError(f"request {request.request_id!r} asks for room for {num_tokens} tokens: at least 1")
        return self._grow(table, table.num_computed + num_tokens)

    def commit(self, request: RequestLike, num_computed: int) -> int:
        """The first `num_computed` tokens have keys and values: blocks that are full now become findable.

        Answers how many blocks those are. UsageError when that is less than before, or more than was allocated or
        than the request has.
        """
        table = self._require_alone(request)
        num_computed = operator.index(num_computed)
        if not table.num_computed <= num_computed <= min(table.num_slots, request.num_tokens):
            raise UsageError(
                f"request {request.request_id!r}: {num_computed} tokens committed; {table.num_computed} were computed "
                f"before, {table.num_slots} are allocated, it has {request.num_tokens}"
            )
        table.num_computed = num_computed
        return self._publisher.publish((request,), (table,))

    def free(self, request: RequestLike) -> None:
        """The request lets go of its blocks, tail first, and is not live any more. What it committed can be found."""
        table = self._require_alone(request)
        del self._tables[request.request_id]
        self._pool.free(reversed(table.block_ids[0]))

    # -- verbs for many requests at once

    def decode_batch(self) -> DecodeBatch:
        """An empty batch, for `join`."""
        batch = DecodeBatch(self._pool, self._publisher, self.hasher)
        self._batches.add(batch)
        return batch

    def join(self, batch: DecodeBatch, request: RequestLike) -> None:
        """The request decodes with the batch from now on: all its tokens but the last are computed.

        It needs no room for the last one yet: without, it is unserved (see `serve`). UsageError when tokens before the
        last have no room, or when it is in a batch already.
        """
        self._require_own(batch)
        table = self._require_alone(request)
        self._validate_decoding(request, table)
        self._publish_all_but(1, [request])
        table.is_decoding = True
        batch.add([request], [table])

    def step(self, requests: DecodeBatch | Sequence[RequestLike], token_ids: Sequence[int]) -> StepResult:
        """One decode step: all tokens of the requests are computed, and `token_ids[i]` comes next for the i-th.

        The same as committing and appending for each, then `allocate(r, 1)` for each in order, at a fraction of the
        cost. Every request is committed and grows; those left without room are named in the result, to be preempted
        or served later (`serve` for a batch, `allocate(r, 1)` for a list of requests).
        UsageError, and nothing changes, when a request is not live, has a token without room, or comes twice.

        A list of requests is made a batch for this one step; keep a batch where many steps follow one another.
        """
        if isinstance(requests, DecodeBatch):
            self._require_own(requests)
            return requests.step(token_ids)
        batch = self._batch_of(requests)
        batch.validate(token_ids)
        self._publish_all_but(0, requests)
        result = batch.step(token_ids)
        batch.settle()
        return result

    def serve(self, batch: DecodeBatch) -> bool:
        """Give room to unserved requests of the batch, in order, as far as there is any. Whether all have room now."""
        self._require_own(batch)
        return batch.serve()

    def leave(self, batch: DecodeBatch, requests: Collection[RequestLike]) -> None:
        """These requests leave the batch and go on alone: all their tokens but the last are computed."""
        self._require_own(batch)
        batch.remove(requests)
        for request in requests:
            self._tables[request.request_id].is_decoding = False

    # -- verbs for the whole cache

    def clear(self) -> bool:
        """Forget all cached content (new weights, say). False, and nothing changes, while any request holds blocks."""
        if not self._pool.clear():
            return False
        self._publisher.forget()
        return True

    def take_events(self) -> list[Event]:
        """What became findable or ceased to be since the last call, in order. Always empty with `events=False`."""
        return self._events.take() if self._events is not None else []

    # -- questions

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return self._pool.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self._pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds: what an allocation can take."""
        return self._pool.num_free

    @property
    def num_evictions(self) -> int:
        """Blocks whose content was given up for another request, since the cache was made."""
        return self._pool.num_evictions

    @property
    def policy(self) -> str:
        """The name of the eviction policy."""
        return self._pool.policy

    @property
    def num_live_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._tables)

    def free_block_ids(self) -> list[BlockId]:
        """The free queue, first to be reused first. O(blocks)."""
        return self._pool.free_block_ids()

    def holders(self, block_id: BlockId) -> int:
        """How many block tables the block stands in."""
        return self._pool.holders(block_id)

    def findable(self) -> set[BlockHash]:
        """The names of all blocks that a match can find. O(blocks)."""
        return self._pool.names()

    def table(self, request: RequestLike) -> BlockTable | None:
        """The block table of a live request; None when it holds nothing."""
        table = self._tables.get(request.request_id)
        return table if table is not None and table.request is request else None

    def max_blocks(self, num_tokens: int) -> int:
        """The most blocks that one request of `num_tokens` tokens holds."""
        return self._group.num_blocks(num_tokens, self.block_size)

    @property
    def max_request_tokens(self) -> int:
        """The longest request that fits when it is alone."""
        return self._group.max_tokens(self.num_usable_blocks, self.block_size)

    def max_concurrency(self, num_tokens: int) -> float:
        """How many requests of `num_tokens` tokens fit at once when they share nothing."""
        return self.num_usable_blocks / self.max_blocks(num_tokens)

    def usage(self) -> Usage:
        """What every block is doing now. O(live requests)."""
        held = self._pool.num_usable - self._pool.num_free
        unfilled = sum(table.num_slots - self._num_computed(table) for table in self._tables.values())
        return Usage(
            num_usable=self._pool.num_usable,
            num_held=held,
            num_cached=self._pool.num_cached,
            num_empty=self._pool.num_free - self._pool.num_cached,
            num_filled_slots=held * self.block_size - unfilled,
            block_size=self.block_size,
        )

    def check(self) -> None:
        """Raise AssertionError with the number of the first broken invariant. O(blocks): for tests and replay."""
        self._pool.check()
        for batch in self._batches:
            batch.check()
        holders = [0] * self.num_blocks
        for table in self._tables.values():
            for block in table.block_ids[0]:
                holders[block] += 1
            committed, computed, slots = table.num_committed, table.num_computed, table.num_slots
            assert committed <= computed <= slots, f"invariant 6: {table}"
            assert slots == len(table.block_ids[0]) * self.block_size, f"invariant 7: {table}"
            names = table.request.block_hashes(self.hasher)[: committed // self.block_size]
            assert self._pool.carry(table.block_ids[0][: len(names)], names), (
                f"invariant 9: {table} holds foreign content"
            )
        assert holders == [self._pool.holders(block) for block in range(self.num_blocks)], "invariant 1: holders"

    # -- parts

    def _reason(self, request: RequestLike, names: Sequence[BlockHash], num_found: int, limit: int) -> HitEnd:
        if num_found == limit // self.block_size:
            return HitEnd.LAST_TOKEN if num_found < len(names) else HitEnd.PARTIAL_BLOCK
        return self._publisher.why_missing(request, names[num_found], is_first=num_found == 0)

    def _admit(self, request: RequestLike, num_tokens: int, hit: Hit | None) -> BlockTable | None:
        found = hit.block_ids[0] if hit is not None else []
        self._validate_admission(request, num_tokens, found)
        num_hit_tokens = len(found) * self.block_size
        num_new = self._group.num_blocks(num_hit_tokens + num_tokens, self.block_size) - len(found)
        if num_new + (self._pool.num_idle(found) if found else 0) > self._pool.num_free:
            return None
        if found:
            self._pool.touch(found)
        new = self._pool.allocate(num_new)
        assert new is not None, "invariant 8: the blocks were counted"
        table = BlockTable(request, [found + new], self.block_size, num_hit_tokens)
        self._tables[request.request_id] = table
        self._count_query(request, num_hit_tokens)
        return table

    def _validate_admission(self, request: RequestLike, num_tokens: int, found: list[BlockId]) -> None:
        if num_tokens < 0 or (num_tokens == 0 and not found):
            raise UsageError(
                f"request {request.request_id!r} asks for room for {num_tokens} tokens: at least 1, or 0 beside a hit"
            )
        if found and not self._pool.carry(found, request.block_hashes(self.hasher)[: len(found)]):
            raise UsageError(
                f"request {request.request_id!r}: the hit is stale or of another request; match again before allocate"
            )

    def _count_query(self, request: RequestLike, num_hit_tokens: int) -> None:
        stats = self.stats
        if not request.reads_cache:
            return
        if request.num_preemptions:
            stats.num_resumed_requests += 1
            stats.num_resumed_queried_tokens += request.num_tokens
            stats.num_resumed_hit_tokens += num_hit_tokens
        else:
            stats.num_requests += 1
            stats.num_queried_tokens += request.num_tokens
            stats.num_hit_tokens += num_hit_tokens

    def _grow(self, table: BlockTable, num_tokens: int) -> BlockTable | None:
        if num_tokens > table.num_slots:
            new = self._pool.allocate(self.max_blocks(num_tokens) - len(table.block_ids[0]))
            if new is None:
                return None
            table.block_ids[0] += new
            table.num_slots += len(new) * self.block_size
        return table

    def _batch_of(self, requests: Sequence[RequestLike]) -> DecodeBatch:
        """A batch for one step, whose requests stay alone."""
        if len(set(requests)) != len(requests):
            raise UsageError(f"{len(requests) - len(set(requests))} of {len(requests)} requests come twice in one step")
        tables = list(map(self._require_alone, requests))
        for request, table in zip(requests, tables, strict=True):
            self._validate_decoding(request, table)
        batch = DecodeBatch(self._pool, self._publisher, self.hasher)
        batch.add(requests, tables)
        return batch

    def _validate_decoding(self, request: RequestLike, table: BlockTable) -> None:
        if table.num_slots < request.num_tokens - 1:
            raise UsageError(
                f"request {request.request_id!r} has {request.num_tokens} tokens and room for {table.num_slots}: "
                "allocate for it before it decodes"
            )

    def _publish_all_but(self, num_left: int, requests: Sequence[RequestLike]) -> None:
        """All tokens of these requests but the last `num_left` are computed."""
        tables = [self._tables[request.request_id] for request in requests]
        for request, table in zip(requests, tables, strict=True):
            table.num_computed = max(table.num_computed, len(request.token_ids) - num_left)
        self._publisher.publish(requests, tables)

    def _num_computed(self, table: BlockTable) -> int:
        if not table.is_decoding:
            return table.num_computed
        return max(table.num_computed, table.request.num_tokens - 1)

    def _require_own(self, batch: DecodeBatch) -> None:
        if not batch.belongs_to(self._pool):
            raise UsageError("the batch is of another cache: make one with this cache's decode_batch()")

    def _require_alone(self, request: RequestLike) -> BlockTable:
        table = self._tables.get(request.request_id)
        if table is None or table.is_decoding or table.request is not request:
            table = self._require_live(request)
            raise UsageError(f"request {request.request_id!r} decodes in a batch: only step moves it until it leaves")
        return table

    def _require_live(self, request: RequestLike) -> BlockTable:
        table = self._tables.get(request.request_id)
        if table is None:
            raise UsageError(f"request {request.request_id!r} holds no blocks: it was freed, or never allocated")
        if table.request is not request:
            raise UsageError(
                f"another live request has the id {request.request_id!r}: ids are unique while a request lives"
            )
        return table
