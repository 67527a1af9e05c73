"""match . allocate . commit . free for whole requests, all or nothing; and the decode step of many at once.

Owns: the block tables of live requests.
Knows nothing of: scheduling, models, devices, time.
"""

import operator
from collections.abc import Iterable, Sequence
from itertools import chain
from weakref import WeakSet

from kvpool.core.admission import Admission
from kvpool.core.block_table import BlockTable
from kvpool.core.chosen import ChosenPool
from kvpool.core.damage import Damage, bad_blocks, num_good_tokens
from kvpool.core.decode_batch import DecodeBatch, StepResult
from kvpool.core.gauges import Gauges
from kvpool.core.groups import Groups
from kvpool.core.hashing import DEFAULT_SEED, BlockHasher
from kvpool.core.hit import Hit, HitEnd
from kvpool.core.lookup import Found, longest_hit
from kvpool.core.native_batch import NativeDecodeBatch, can_be_native
from kvpool.core.publication import DEFAULT_PUBLICATION, Publication, Setting
from kvpool.core.publisher import Publisher
from kvpool.core.request import RequestLike
from kvpool.core.room import Room
from kvpool.errors import ConfigError, UsageError
from kvpool.events import Event, EventLog
from kvpool.limits import whole_number
from kvpool.plan import demand
from kvpool.plan.kinds import FullAttention, LayerKind
from kvpool.plan.memory import Plan
from kvpool.stats import CacheStats
from kvpool.types import NULL_BLOCK, BlockId, RequestId


class KVCacheManager(Gauges):
    """The KV cache of one replica: `num_blocks` blocks of `block_size` tokens, block 0 being the null block.

    `groups` are the kinds of layers that share the pool, a block table each. `publication` is what windows and states
    make findable, see `Publication`. With `drop_last_block` a hit leaves out the last aligned block that was found, for
    draft models that must see it again. `max_in_flight_tokens` is the most tokens of one request that will be allocated
    and not committed yet; the promises of `max_blocks` hold up to there. ConfigError for what cannot work.

    Every call is all or nothing: what cannot be served in full changes nothing (invariant 8). Live requests are known
    by their id. Not thread-safe: one scheduler calls it (hashing ahead on other threads is fine, see `Request`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        groups: Sequence[LayerKind] = (FullAttention(),),
        *,
        publication: Setting = DEFAULT_PUBLICATION,
        drop_last_block: bool = False,
        max_in_flight_tokens: int = 8192,
        seed: str = DEFAULT_SEED,
        events: bool = True,
    ) -> None:
        num_blocks, block_size = whole_number("num_blocks", num_blocks), whole_number("block_size", block_size)
        max_in_flight_tokens = whole_number("max_in_flight_tokens", max_in_flight_tokens)
        laid_out = Groups(
            groups, block_size, drops_last_block=drop_last_block, max_in_flight_tokens=max_in_flight_tokens
        )
        self._events = EventLog() if events else None
        self._publication = Publication(publication, laid_out)
        pool = ChosenPool(num_blocks, self._events, len(groups), is_ranked=self._publication.is_ranked)
        super().__init__(laid_out, pool)
        self.block_size = block_size
        self.hasher = BlockHasher(self.groups.unit, seed)
        self._room = Room(self._pool, self.groups, keeps_last_border=self._publication.is_ranked)
        self._publisher = Publisher(self._pool, self.groups, self._publication, self.hasher, self._events)
        self._admission = Admission(self._pool, self._room, self.groups, self._publication, self.hasher)
        self._batches: WeakSet[DecodeBatch] = WeakSet()

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        *,
        publication: Setting = DEFAULT_PUBLICATION,
        drop_last_block: bool = False,
        seed: str = DEFAULT_SEED,
        events: bool = True,
    ) -> "KVCacheManager":
        """The cache of a plan: its blocks, its groups, its chunk. It admits by the formula that the plan promised by.

        ConfigError when the plan has no block to give.
        """
        if plan.num_usable_blocks < 1:
            raise ConfigError(f"the plan has {plan.num_blocks} blocks: the null block and at least 1 more are needed")
        return cls(
            plan.num_blocks,
            demand.size_of(plan.kinds[0]),
            plan.kinds,
            publication=publication,
            drop_last_block=drop_last_block,
            max_in_flight_tokens=plan.deployment.max_num_batched_tokens,
            seed=seed,
            events=events,
        )

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
            return self._admission.no_hit
        limit = request.num_tokens
        limit = limit - 1 if max_tokens is None else min(max_tokens, limit)
        found = longest_hit(self._pool, self.groups, request.block_hashes(self.hasher), limit)
        shared = found.num_shared
        if not self.groups.keep_all:
            shared = max(found.num_found, self._publisher.num_seen(request, limit))
        return Hit(found.num_tokens, found.block_ids, self._reason(request, found, limit), shared)

    def num_blocks_needed(
        self,
        request: RequestLike,
        num_tokens: int,
        hit: Hit | None = None,
        *,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> int:
        """The blocks that `allocate` with these arguments would take out of the free queue, idle hits included.

        For a live request, after it let go of what slid out of its windows.
        """
        table = self._tables.get(request.request_id)
        if table is not None:
            start = table.num_computed
            missing = self._room.missing(request, table.block_ids, start, start + num_tokens, num_lookahead_tokens)
            return sum(map(len, missing))
        return self._admission.num_blocks(
            request, num_tokens, hit or self._admission.no_hit, num_external_tokens, num_lookahead_tokens
        )

    def num_blocks_to_finish(self, request: RequestLike, num_tokens: int, hit: Hit | None = None) -> int:
        """The most blocks that computing `num_tokens` tokens after the hit takes out of the free queue, idle hits too.

        For a request that is not live yet, whose steps compute at most `max_in_flight_tokens` each. A scheduler that
        admits a request when so many are free has room for all of its prompt.
        """
        return self._admission.most_blocks(request, num_tokens, hit or self._admission.no_hit)

    def allocate(
        self,
        request: RequestLike,
        num_tokens: int,
        hit: Hit | None = None,
        *,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> BlockTable | None:
        """Make room for `num_tokens` tokens after the computed ones, and answer the request's block table.

        A request's first allocation admits it: the blocks of `hit` become its first blocks, and their tokens count as
        computed. Then come the `num_external_tokens` that a connector will bring; `commit` them once they are there.
        Later allocations append blocks, or nothing while there is room; first of all they let go of what has slid out
        of the request's windows. `num_lookahead_tokens` drafted tokens get room after all others; `trim` returns what
        is rejected of it.

        None when the free queue cannot supply all blocks: nothing has changed then, but for what slid out. UsageError
        for a second request of the same id, a stale hit, a hit or external tokens for a live request, no tokens at all.
        """
        if num_lookahead_tokens < 0 or num_external_tokens < 0:
            raise UsageError(
                f"request {request.request_id!r}: {num_external_tokens} external and {num_lookahead_tokens} lookahead "
                "tokens: 0 or more of each"
            )
        table = self._tables.get(request.request_id)
        if table is None:
            table = self._admission.admit(
                request, num_tokens, hit or self._admission.no_hit, num_external_tokens, num_lookahead_tokens
            )
            if table is not None:
                self._tables[request.request_id] = table
            return table
        self._require_alone(request)
        if (hit is not None and hit.num_tokens) or num_external_tokens:
            raise UsageError(
                f"request {request.request_id!r} holds blocks already: hits and external tokens come with its first "
                "allocation"
            )
        if num_tokens < 1:
            raise UsageError(f"request {request.request_id!r} asks for room for {num_tokens} tokens: at least 1")
        self._room.slide(table, num_tokens + num_lookahead_tokens)
        start, stop = table.num_computed, table.num_computed + num_tokens
        return table if self._room.grow(table, start, stop, num_lookahead_tokens) else None

    def commit(self, request: RequestLike, num_computed: int) -> int:
        """The first `num_computed` tokens have keys and values: blocks that are full now become findable.

        Which of them, in windows and states, is the publication setting's matter. Answers how many blocks those are.
        UsageError when that is less than before, or more than was allocated or than the request has.
        """
        table = self._require_alone(request)
        num_computed = operator.index(num_computed)
        if not table.num_computed <= num_computed <= min(table.num_slots, request.num_tokens):
            raise UsageError(
                f"request {request.request_id!r}: {num_computed} tokens committed; {table.num_computed} were computed "
                f"before, {table.num_slots} are allocated, it has {request.num_tokens}"
            )
        if self.groups.states and not self._room.keeps_state(table, num_computed):
            raise UsageError(
                f"request {request.request_id!r}: {num_computed} tokens committed, and no state was kept there: states "
                "are kept at the end of a step, so commit what was allocated"
            )
        if num_computed < table.num_outside and self.groups.are_windowed:
            raise UsageError(
                f"request {request.request_id!r}: {num_computed} tokens committed, {table.num_outside} with those from "
                "outside: where windows skip blocks, these come all together; `invalidate` what failed"
            )
        return self._publisher.publish((request,), (table,), (num_computed,))

    def trim(self, request: RequestLike) -> None:
        """The request lets go of blocks that lie wholly behind its last token: room for drafts that were rejected."""
        table = self._require_alone(request)
        self._room.cut(table, max(request.num_tokens, table.num_computed))

    def free(self, request: RequestLike) -> None:
        """The request lets go of its blocks, tail first, and is not live any more. What it committed can be found."""
        table = self._require_alone(request)
        self._publisher.publish_end(table)
        del self._tables[request.request_id]
        self._room.release(table)

    def step_end(self, request: RequestLike, start: int, stop: int, hit: Hit | None = None) -> int:
        """Where a step that computes the request from token `start` should end, at most at `stop`.

        Layouts with states want steps to end where a checkpoint is kept; all others answer `stop`. `hit` is what the
        request is about to be admitted with, None when it is live.
        """
        if not self.groups.states:
            return stop
        table = self._tables.get(request.request_id)
        if table is not None:
            boundaries = table.boundaries
        else:
            boundaries = self._publication.boundaries(request, hit or self._admission.no_hit)
        return self._publication.next_checkpoint(request, boundaries, start, stop)

    def invalidate(self, block_ids: Iterable[BlockId]) -> dict[RequestId, int]:
        """The content of these blocks is bad (a load that failed): nobody may go on from it or find it.

        Every live request that holds one of them, or may have gone on from its content, is cut back to the longest
        prefix that does without; its computed tokens now are in the answer, and it leaves its decode batch. Every name
        that depended on bad content is withdrawn, of requests that ended long ago too. The null block is passed over.
        UsageError, and nothing changes, when a block is not of this pool. O(blocks).
        """
        bad = bad_blocks(block_ids, self.num_blocks)
        if not bad:
            return {}
        damage = Damage(bad, self._tables.values(), self.groups, self._pool, self.hasher)
        cut = {
            table: num_good_tokens(table, self.groups, self._pool, first) for table, first in damage.first_bad.items()
        }
        self._pool.withdraw(damage.spoiled)
        for table, num_good in cut.items():
            self._cut_back(table, num_good)
        return {table.request.request_id: num_good for table, num_good in cut.items()}

    # -- verbs for many requests at once

    def decode_batch(self) -> DecodeBatch:
        """An empty batch, for `join`."""
        batch = self._new_batch()
        self._batches.add(batch)
        return batch

    def join(self, batch: DecodeBatch, request: RequestLike) -> None:
        """The request decodes with the batch from now on: all its tokens but the last are computed.

        It needs no room for the last one yet: without, it is unserved (see `serve`). UsageError when tokens before the
        last have no room, or when it is in a batch already.
        """
        self._require_own(batch)
        batch.join(request, self._require_alone(request))

    def step(self, requests: DecodeBatch | Iterable[RequestLike], token_ids: Iterable[int]) -> StepResult:
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
        requests = list(requests)
        if len(set(requests)) != len(requests):
            raise UsageError(f"{len(requests) - len(set(requests))} of {len(requests)} requests come twice in one step")
        batch = DecodeBatch(self._pool, self._room, self.groups, self._publisher, self.hasher)
        batch.add(requests, list(map(self._require_alone, requests)))
        return batch.only_step(token_ids)

    def serve(self, batch: DecodeBatch) -> bool:
        """Give room to unserved requests of the batch, in order, as far as there is any. Whether all have room now."""
        self._require_own(batch)
        return batch.serve()

    def leave(self, batch: DecodeBatch, requests: Iterable[RequestLike]) -> None:
        """These requests leave the batch and go on alone: all their tokens but the last are computed."""
        self._require_own(batch)
        batch.remove(requests)

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

    @property
    def stats(self) -> CacheStats:
        """Queries and hits since the cache was made."""
        return self._admission.stats

    def check(self) -> None:
        """Raise AssertionError with the number of the first broken invariant. O(blocks): for tests and replay."""
        self._pool.check()
        for batch in self._batches:
            batch.check()
        holders = [0] * self.num_blocks
        for table in self._tables.values():
            for block in chain(*table.block_ids, table.scratch_ids):
                holders[block] += 1
            committed, computed, slots = table.num_committed, table.num_computed, table.num_slots
            assert committed <= computed <= slots, f"invariant 6: {table}"
            assert slots == self._room.num_slots(table), f"invariant 7: {table}"
            self._publisher.check(table)
        holders[NULL_BLOCK] = 0
        assert holders == [self._pool.holders(block) for block in range(self.num_blocks)], "invariant 1: holders"

    # -- parts

    def _reason(self, request: RequestLike, found: Found, limit: int) -> HitEnd:
        num_found = found.num_found
        if num_found == self.groups.align(limit):
            if num_found and self.groups.drops_last_block:
                return HitEnd.DROPPED
            return HitEnd.LAST_TOKEN if num_found < self.groups.align(request.num_tokens) else HitEnd.PARTIAL_BLOCK
        if num_found < found.num_shared and self.groups.keep_all:
            return HitEnd.LAGGING_GROUP
        return self._publisher.why_missing(request, num_found)

    def _new_batch(self) -> DecodeBatch:
        """In the native core where that is in use and has such a layout; the two cannot be told apart."""
        is_native = can_be_native(self._pool, self._room, self.groups, self._publisher)
        kind = NativeDecodeBatch if is_native else DecodeBatch
        return kind(self._pool, self._room, self.groups, self._publisher, self.hasher)

    def _cut_back(self, table: BlockTable, num_tokens: int) -> None:
        """Only the first `num_tokens` tokens of the request are computed, and only they have room."""
        for batch in self._batches if table.is_decoding else ():
            if table.request in batch.requests:
                self.leave(batch, [table.request])
        table.num_computed = table.num_outside = num_tokens
        table.num_once_committed = max(table.num_once_committed, table.num_committed)
        table.num_committed = min(table.num_committed, num_tokens)
        table.last_stop = num_tokens
        self._room.cut(table, num_tokens)

    def _require_own(self, batch: DecodeBatch) -> None:
        if not batch.belongs_to(self._pool):
            raise UsageError("the batch is of another cache: make one with this cache's decode_batch()")

    def _require_alone(self, request: RequestLike) -> BlockTable:
        table = self._tables.get(request.request_id)
        if table is None or table.is_decoding or table.request is not request:
            table = self._require_live(request)
            raise UsageError(f"request {request.request_id!r} decodes in a batch: only step moves it until it leaves")
        return table
