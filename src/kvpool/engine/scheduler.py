"""Who runs in the next step, and with how many tokens: continuous batching, first come first served.

Owns: the queue of waiting requests and the list of running ones.
Knows nothing of: models, time, and where tokens come from.

Running requests go first, in the order of their admission; a prompt is prefilled in chunks under the step's token
budget. When the pool is short the newest running request is preempted: it lets go of its blocks, waits at the head of
the queue, and is computed again from whatever the cache still holds then. Nobody is admitted in a step that preempted.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvpool.core.hit import Hit
from kvpool.core.manager import KVCacheManager
from kvpool.core.request import RequestLike
from kvpool.errors import ConfigError, RefusedError, UsageError
from kvpool.types import RequestId


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_num_batched_tokens` tokens a step for at most `max_num_seqs` running requests.

    `watermark` is the share of the blocks that an admission must leave free for the running ones to grow into; it does
    not hold for the first request of an idle engine. 2 to 5 % is usual where preemptions are many.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    watermark: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed to ever finish")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}: a share from 0 up to, not including, 1; 0.02 is usual")


@dataclass(slots=True)
class Batch:
    """What one step computes: tokens starts[i] .. starts[i] + counts[i] - 1 of requests[i], which have room.

    The last `num_admitted` requests were admitted in this step; the tokens before their start are their hit.
    """

    requests: list[RequestLike] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_admitted: int = 0

    def add(self, request: RequestLike, start: int, count: int) -> None:
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[tuple[RequestLike, int, int]]:
        return zip(self.requests, self.starts, self.counts, strict=True)


class Scheduler:
    """Fills steps from a queue. Call `schedule`, run the batch, then `commit` it with the tokens that it gave."""

    def __init__(self, cache: KVCacheManager, config: SchedulerConfig | None = None) -> None:
        self.cache = cache
        self.config = config or SchedulerConfig()
        self.waiting: deque[RequestLike] = deque()
        self.running: list[RequestLike] = []
        self.num_preemptions = 0
        self._watermark_blocks = int(self.config.watermark * cache.num_blocks)
        self._ids: set[RequestId] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: RequestLike) -> None:
        """The request joins the queue. RefusedError, with the numbers, when it could never run to its end here."""
        if request.request_id in self._ids:
            raise UsageError(f"a request with the id {request.request_id!r} is waiting or running already")
        # The last token that is sampled is never computed, so it needs no slot.
        longest = request.num_tokens + (request.max_tokens or 1) - 1
        needed, usable = self.cache.max_blocks(longest), self.cache.num_usable_blocks
        if needed > usable:
            raise RefusedError(
                f"request {request.request_id!r} can never fit: its {request.num_prompt_tokens} prompt tokens and up "
                f"to {request.max_tokens or 1} outputs need {needed} blocks, the pool has {usable}"
            )
        self._ids.add(request.request_id)
        self.waiting.append(request)

    def abort(self, request: RequestLike) -> None:
        """The request leaves at once, wherever it is. Nothing that it had not computed can be found afterwards."""
        if request in self.running:
            self.running.remove(request)
            self.cache.free(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            raise UsageError(f"request {request.request_id!r} is neither waiting nor running")
        self._ids.discard(request.request_id)

    def schedule(self) -> Batch:
        """The next step, with room for all its tokens. Empty only when there is no work."""
        batch = Batch()
        preemptions = self.num_preemptions
        budget = self._schedule_running(batch)
        if self.num_preemptions == preemptions:
            self._schedule_waiting(batch, budget)
        return batch

    def commit(self, batch: Batch, token_ids: Sequence[int | None]) -> list[RequestLike]:
        """The batch was computed and gave these tokens (None: the prompt is not done yet). Answers who ended.

        Full blocks become findable; requests that ended let go of their blocks; the others get room for their token, as
        far as there is any.
        """
        decoding, next_ids, ended = [], [], []
        for (request, start, count), token_id in zip(batch, token_ids, strict=True):
            if token_id is None:
                self.cache.commit(request, start + count)
            elif request.num_tokens - request.num_prompt_tokens + 1 == request.max_tokens:
                self._end(request, token_id)
                ended.append(request)
            else:
                decoding.append(request)
                next_ids.append(token_id)
        if ended:
            self.running = [request for request in self.running if request.request_id in self._ids]
        self.cache.step(decoding, next_ids)
        return ended

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached content. False, and nothing changes, while requests run, unless these are preempted."""
        if preempt_running:
            while self.running:
                self._preempt(self.running.pop())
        return self.cache.clear()

    def _end(self, request: RequestLike, token_id: int) -> None:
        self.cache.commit(request, request.num_tokens)
        request.token_ids.append(token_id)
        self.cache.free(request)
        self._ids.discard(request.request_id)

    def _schedule_running(self, batch: Batch) -> int:
        """Room for every running request's next tokens, oldest first; the token budget that is left."""
        budget = self.config.max_num_batched_tokens
        row = 0
        while budget and row < len(self.running):
            request = self.running[row]
            table = self.cache.table(request)
            assert table is not None, f"request {request.request_id!r} runs without blocks"
            count = min(request.num_tokens - table.num_computed, budget)
            if table.num_computed + count > table.num_slots and not self._make_room(request, count):
                break
            batch.add(request, table.num_computed, count)
            budget -= count
            row += 1
        return budget

    def _make_room(self, request: RequestLike, count: int) -> bool:
        """Preempt the newest until the request has room; False when it was itself the newest."""
        while self.cache.allocate(request, count) is None:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: RequestLike) -> None:
        self.cache.free(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _schedule_waiting(self, batch: Batch, budget: int) -> None:
        while budget and self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            hit = self.cache.match(request)
            if not self._fits_whole(request, hit):
                break
            count = min(request.num_tokens - hit.num_tokens, budget)
            table = self.cache.allocate(request, count, hit)
            assert table is not None, "invariant 12: what was admitted has room"
            self.running.append(self.waiting.popleft())
            batch.add(request, hit.num_tokens, count)
            batch.num_admitted += 1
            budget -= count

    def _fits_whole(self, request: RequestLike, hit: Hit) -> bool:
        """Whether all tokens that the request has now fit beside the running ones, the watermark kept."""
        needed = self.cache.num_blocks_needed(request, request.num_tokens - hit.num_tokens, hit)
        spare = self._watermark_blocks if self.running else 0
        return needed + spare <= self.cache.num_free_blocks
