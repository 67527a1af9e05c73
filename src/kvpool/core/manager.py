"""match . allocate . commit . free for whole requests, all or nothing; and the decode step of many at once.

Owns: the block tables of live requests.
Knows nothing of: scheduling, models, devices, time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.groups import FullAttention
from kvpool.core.hashing import DEFAULT_SEED, BlockHasher
from kvpool.core.hit import FirstBlocks, Hit, HitEnd
from kvpool.core.request import RequestLike
from kvpool.errors import ConfigError, UsageError
from kvpool.events import BlockStored, Event, EventLog
from kvpool.stats import CacheStats, Usage
from kvpool.types import BlockHash, BlockId, RequestId


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `step` did: request `grown[i]` got block `block_ids[i]` (int32) at the end of its table.

    The new tokens of the requests `unserved`, in the order given, have no room.
    """

    grown: list[RequestLike]
    block_ids: npt.NDArray[np.int32]
    unserved: list[RequestLike]


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
        self._requests: dict[RequestId, RequestLike] = {}
        self._first_blocks = FirstBlocks()

    # -- verbs

    def match(self, request: RequestLike, max_tokens: int | None = None) -> Hit:
        """The longest cached prefix of the request, and why it ended. Changes nothing.

        At most `max_tokens` tokens are matched; unless told, all but the last, which must be computed to give logits.
        """
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
        self._require_live(request)
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
        table = self._require_live(request)
        if not table.num_computed <= num_computed <= min(table.num_slots, request.num_tokens):
            raise UsageError(
                f"request {request.request_id!r}: {num_computed} tokens committed; {table.num_computed} were computed "
                f"before, {table.num_slots} are allocated, it has {request.num_tokens}"
            )
        table.num_computed = num_computed
        return self._publish(request, table)

    def step(self, requests: Sequence[RequestLike], token_ids: Sequence[int]) -> StepResult:
        """One decode step of many live requests: all tokens are computed, `token_ids[i]` comes next for request i.

        The same as `commit(r, r.num_tokens); r.append(token); allocate(r, 1)` for each in turn, at a fraction of the
        cost. Every request is committed and grows; those left without room are named in the result, to be
        preempted or asked for again by `allocate(r, 1)`.
        UsageError, and nothing changes, when a request is not live, has fewer slots than tokens, or comes twice.
        """
        tables = self._step_tables(requests, token_ids)
        full: list[tuple[RequestLike, BlockTable]] = []
        for request, table, token_id in zip(requests, tables, token_ids, strict=True):
            tokens = request.token_ids
            table.num_computed = computed = len(tokens)
            tokens.append(token_id)
            if computed == table.num_slots:
                full.append((request, table))
        return self._next_blocks(full)

    def free(self, request: RequestLike) -> None:
        """The request lets go of its blocks, tail first, and is not live any more. What it committed can be found."""
        self._require_live(request)
        table = self._tables.pop(request.request_id)
        del self._requests[request.request_id]
        self._pool.free(reversed(table.block_ids[0]))

    def clear(self) -> bool:
        """Forget all cached content (new weights, say). False, and nothing changes, while any request holds blocks."""
        if not self._pool.clear():
            return False
        self._first_blocks = FirstBlocks()
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
        return self._tables.get(request.request_id)

    def max_blocks(self, num_tokens: int) -> int:
        """The most blocks that one request of `num_tokens` tokens holds."""
        return self._group.num_blocks(num_tokens, self.block_size)

    def max_concurrency(self, num_tokens: int) -> float:
        """How many requests of `num_tokens` tokens fit at once when they share nothing."""
        return self.num_usable_blocks / self.max_blocks(num_tokens)

    def usage(self) -> Usage:
        """What every block is doing now. O(live requests)."""
        held = self._pool.num_usable - self._pool.num_free
        unfilled = sum(table.num_slots - table.num_computed for table in self._tables.values())
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
        holders = [0] * self.num_blocks
        for request_id, table in self._tables.items():
            for block in table.block_ids[0]:
                holders[block] += 1
            committed, computed, slots = table.num_committed, table.num_computed, table.num_slots
            assert committed <= computed <= slots, f"invariant 6: {table}"
            assert slots == len(table.block_ids[0]) * self.block_size, f"invariant 7: {table}"
            names = self._requests[request_id].block_hashes(self.hasher)[: committed // self.block_size]
            assert self._pool.carry(table.block_ids[0][: len(names)], names), (
                f"invariant 9: {table} holds foreign content"
            )
        assert holders == [self._pool.holders(block) for block in range(self.num_blocks)], "invariant 1: holders"

    # -- parts

    def _reason(self, request: RequestLike, names: Sequence[BlockHash], num_found: int, limit: int) -> HitEnd:
        if num_found == limit // self.block_size:
            return HitEnd.LAST_TOKEN if num_found < len(names) else HitEnd.PARTIAL_BLOCK
        if self._pool.was_evicted(names[num_found]):
            return HitEnd.EVICTED
        if num_found:
            return HitEnd.NEVER_SEEN
        return self._first_blocks.miss(names[0], request.plain_name(self.hasher))

    def _admit(self, request: RequestLike, num_tokens: int, hit: Hit | None) -> BlockTable | None:
        found = hit.block_ids[0] if hit is not None else []
        self._validate_admission(request, num_tokens, found)
        num_hit_tokens = len(found) * self.block_size
        num_new = self._group.num_blocks(num_hit_tokens + num_tokens, self.block_size) - len(found)
        if num_new + self._pool.num_idle(found) > self._pool.num_free:
            return None
        self._pool.touch(found)
        new = self._pool.allocate(num_new)
        assert new is not None, "invariant 8: the blocks were counted"
        table = BlockTable(request.request_id, [found + new], self.block_size, num_hit_tokens)
        self._tables[request.request_id] = table
        self._requests[request.request_id] = request
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

    def _publish(self, request: RequestLike, table: BlockTable) -> int:
        """Commit the blocks that are full and not committed yet; how many."""
        size = self.block_size
        start, stop = table.num_committed // size, table.num_computed // size
        if start == stop:
            return 0
        names = request.block_hashes(self.hasher)
        if not start:
            self._first_blocks.add(names[0], request.plain_name(self.hasher))
        new = self._pool.commit(table.block_ids[0][start:stop], names[start:stop])
        table.num_committed = stop * size
        if new and self._events is not None:
            tokens = tuple(request.token_ids[start * size : stop * size])
            parent = names[start - 1] if start else None
            self._events.add(BlockStored(tuple(names[start:stop]), parent, tokens, size, group_id=0))
        return stop - start

    def _step_tables(self, requests: Sequence[RequestLike], token_ids: Sequence[int]) -> list[BlockTable]:
        """The table of each request, all of them fit for a decode step."""
        if len(token_ids) != len(requests):
            raise UsageError(f"{len(requests)} requests and {len(token_ids)} tokens: a step takes one token a request")
        if len(set(requests)) != len(requests):
            raise UsageError(f"{len(requests) - len(set(requests))} of {len(requests)} requests come twice in one step")
        if token_ids and min(token_ids) < 0:
            raise UsageError(f"token ids are 0 or more, not {min(token_ids)}")
        get = self._tables.get
        tables = [
            table
            for request in requests
            if (table := get(request.request_id)) is not None and table.num_slots >= len(request.token_ids)
        ]
        if len(tables) < len(requests):
            self._explain_unfit(requests)
        return tables

    def _explain_unfit(self, requests: Sequence[RequestLike]) -> None:
        for request in requests:
            table = self._require_live(request)
            if table.num_slots < request.num_tokens:
                raise UsageError(
                    f"request {request.request_id!r} has {request.num_tokens} tokens and room for {table.num_slots}: "
                    "allocate for it before the step"
                )

    def _next_blocks(self, full: list[tuple[RequestLike, BlockTable]]) -> StepResult:
        """Commit the tables whose last block is full, and give each a block while there are any, in order."""
        for request, table in full:
            self._publish(request, table)
        served = min(len(full), self._pool.num_free)
        new = self._pool.allocate(served)
        assert new is not None, "invariant 8: the blocks were counted"
        for (_, table), block in zip(full, new, strict=False):
            table.block_ids[0].append(block)
            table.num_slots += self.block_size
        grown = [request for request, _ in full]
        return StepResult(grown[:served], np.array(new, dtype=np.int32), grown[served:])

    def _require_live(self, request: RequestLike) -> BlockTable:
        table = self._tables.get(request.request_id)
        if table is None:
            raise UsageError(f"request {request.request_id!r} holds no blocks: it was freed, or never allocated")
        if self._requests[request.request_id] is not request:
            raise UsageError(
                f"another live request has the id {request.request_id!r}: ids are unique while a request lives"
            )
        return table
