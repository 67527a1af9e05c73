"""Who runs in the next step, and with how many tokens: continuous batching, first come first served.

Owns: the queue of waiting requests and the list of running ones.
Knows nothing of: models, time, and where tokens come from.

Running requests go first, in the order of their admission; a prompt is prefilled in chunks under the step's token
budget. When the pool is short the newest running request is preempted: it lets go of its blocks, waits at the head of
the queue, and is computed again from whatever the cache still holds then. Nobody is admitted in a step that preempted.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from kvpool.core.block_table import BlockTable
from kvpool.core.hit import Hit
from kvpool.core.manager import KVCacheManager
from kvpool.core.request import RequestLike, plain_ids
from kvpool.engine.batch import Batch
from kvpool.errors import ConfigError, RefusedError, UsageError
from kvpool.types import BlockId, RequestId

NumLoadable: TypeAlias = Callable[[RequestLike, int], int]
"""How many tokens of a request can be loaded from outside, behind the first `n`, which are a hit."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_num_batched_tokens` tokens a step for at most `max_num_seqs` running requests.

    `watermark` is the share of the blocks that an admission must leave free for the running ones to grow into; it does
    not hold for the first request of an idle engine. 2 to 5 % is usual where preemptions are many. With
    `waits_for_prefix` a request is held back while another one computes the very block that it lacks first: it finds
    that block a step later, and what many ask for at once is computed once.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    watermark: float = 0.0
    waits_for_prefix: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1 is needed to ever finish")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}: a "
                "running request needs a token each step; raise the one or lower the other"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}: a share from 0 up to, not including, 1; 0.02 is usual")


class Scheduler:
    """Fills steps from a queue. Call `schedule`, run the batch, then `commit` it with the tokens that it gave.

    With `num_loadable` a request that is admitted may first wait for tokens from outside: `loaded` or `load_failed`
    ends that. Until it has its prompt computed, its share of the pool is not given to others.
    """

    def __init__(
        self, cache: KVCacheManager, config: SchedulerConfig | None = None, num_loadable: NumLoadable | None = None
    ) -> None:
        self.cache = cache
        self.config = config or SchedulerConfig()
        in_flight = cache.groups.max_in_flight_tokens
        if cache.groups.are_windowed and self.config.max_num_batched_tokens > in_flight:
            raise ConfigError(
                f"max_num_batched_tokens is {self.config.max_num_batched_tokens}, and the cache has windows that count "
                f"on {in_flight} tokens in flight: make it with max_in_flight_tokens="
                f"{self.config.max_num_batched_tokens}, or lower the first"
            )
        self.waiting: deque[RequestLike] = deque()
        self.decoding = cache.decode_batch()
        self.prefilling: list[RequestLike] = []
        """Admitted after all that decode: prompts that take several steps."""
        self.loading: list[RequestLike] = []
        """Admitted, and waiting for tokens from outside."""
        self._num_loadable = num_loadable
        self._reserving: list[RequestLike] = []
        self._not_loadable: set[RequestId] = set()
        self._scheduled: Batch | None = None
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        """Tokens that preempted requests had computed and that were not in the cache any more when they resumed."""
        self._num_given_up: dict[RequestId, int] = {}
        self._watermark_blocks = int(self.config.watermark * cache.num_blocks)
        self._ids: set[RequestId] = set()

    @property
    def running(self) -> list[RequestLike]:
        """All that hold blocks, in the order of their admission."""
        return [*self.decoding.requests, *self.prefilling, *self.loading]

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.loading)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.num_running)

    def add(self, request: RequestLike) -> None:
        """The request joins the queue. RefusedError, with the numbers, when it could never run to its end here.

        One without a limit on its outputs gets the pool's: it ends when it has filled the pool alone.
        """
        if request.request_id in self._ids:
            raise UsageError(f"a request with the id {request.request_id!r} is waiting or running already")
        # The last token that is sampled is never computed, so it needs no slot.
        most = self.cache.max_tokens(request.num_encoder_tokens) + 1 - request.num_prompt_tokens
        if most < (request.max_tokens or 1):
            outputs = request.max_tokens or 1
            needed = self.cache.max_blocks(request.num_prompt_tokens + outputs - 1, request.num_encoder_tokens)
            raise RefusedError(
                f"request {request.request_id!r} can never fit: its {request.num_prompt_tokens} prompt tokens and up "
                f"to {outputs} outputs need {needed} blocks{self._in_flight()}, the pool has "
                f"{self.cache.num_usable_blocks}"
            )
        if request.max_tokens is None:
            request.max_tokens = most
        if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
            raise UsageError(f"request {request.request_id!r} has all {request.max_tokens} outputs that it asks for")
        self._ids.add(request.request_id)
        self.waiting.append(request)

    def _in_flight(self) -> str:
        """What a promise about windows counts on, where there are any."""
        groups = self.cache.groups
        return f" with up to {groups.max_in_flight_tokens} tokens in flight" if groups.are_windowed else ""

    def abort(self, request: RequestLike) -> None:
        """The request leaves at once, wherever it is. Nothing that it had not computed can be found afterwards."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.request_id in self._ids and self.cache.table(request) is not None:
            self._release(request)
        else:
            raise UsageError(f"request {request.request_id!r} is neither waiting nor running")
        self._ids.discard(request.request_id)
        self._num_given_up.pop(request.request_id, None)
        self._not_loadable.discard(request.request_id)

    def loaded(self, request: RequestLike) -> None:
        """All tokens of the request that were to come from outside are there. UsageError when it waits for none."""
        table = self._loading_table(request)
        self.cache.commit(request, table.num_outside)
        self.loading.remove(request)
        self.prefilling.append(request)

    def load_failed(self, request: RequestLike) -> None:
        """Nothing comes from outside, the request is computed instead. UsageError when it waits for nothing.

        It waits at the head of the queue, without blocks.
        """
        self._loading_table(request)
        self._not_loadable.add(request.request_id)
        self._release(request)
        self.waiting.appendleft(request)

    def invalidate(self, block_ids: Iterable[BlockId]) -> list[RequestLike]:
        """The content of these blocks turned out bad: nothing that depended on it can be found any more.

        The running requests that hold one are preempted, and go on from what is still good. Answers who they are.
        """
        running = self.running
        bad = self.cache.invalidate(block_ids)
        victims = [request for request in running if request.request_id in bad]
        for request in reversed(victims):
            self._preempt(request)
        return victims

    def schedule(self) -> Batch:
        """The next step, with room for all its tokens. Empty when there is no work, or others hold the blocks."""
        preemptions = self.num_preemptions
        while not self.cache.serve(self.decoding):
            self._preempt_newest()
        batch = self._decoding_batch()
        budget = self.config.max_num_batched_tokens - len(batch)
        for request in list(self.prefilling):
            if not budget:
                break
            budget -= self._continue_prefill(batch, request, budget)
        if self.num_preemptions == preemptions:
            self._admit(batch, budget)
        self._scheduled = batch
        return batch

    def commit(self, batch: Batch, token_ids: Sequence[int | None]) -> list[RequestLike]:
        """The batch was computed and gave these tokens (None: the prompt is not done yet). Answers who ended.

        Full blocks become findable; requests that ended let go of their blocks; the others get room for their token, as
        far as there is any. Requests that were aborted or preempted meanwhile are passed over.
        UsageError, and nothing changes, when this is not the batch scheduled last or was committed before, or unless
        there is a token for each request whose tokens are all computed, and None for every other.
        """
        token_ids = self._validated(batch, token_ids)
        self._scheduled = None
        next_ids = self._tokens_of_decoding(batch, token_ids)
        ended = self._end_decoding(next_ids)
        first = batch.num_decoding
        prefilled = self._commit_prefill(batch, token_ids[first:], ended)
        self.cache.step(self.decoding, next_ids)
        for request in prefilled:
            self.cache.join(self.decoding, request)
        return ended

    def _validated(self, batch: Batch, token_ids: Sequence[int | None]) -> list[int | None]:
        """The tokens as plain numbers. UsageError unless they are an answer to the batch."""
        if batch is not self._scheduled:
            raise UsageError("the batch to commit is not the one scheduled last, or was committed already")
        if len(token_ids) != len(batch):
            raise UsageError(
                f"{len(batch)} requests were computed and {len(token_ids)} tokens given: one each, or None"
            )
        first = batch.num_decoding
        if None in token_ids[:first]:
            raise UsageError("a request that decodes has all its tokens computed: None is no answer to that")
        chunks = zip(batch.requests[first:], batch.starts[first:], batch.counts[first:], token_ids[first:], strict=True)
        for request, start, count, token_id in chunks:
            is_done = start + count == request.num_tokens
            if is_done != (token_id is not None):
                raise UsageError(
                    f"request {request.request_id!r} has {start + count} of {request.num_tokens} tokens computed: "
                    f"{token_id} is no answer to that"
                )
        sampled = plain_ids([token_id for token_id in token_ids[first:] if token_id is not None])
        rest = iter(sampled)
        of_chunks = [None if token_id is None else next(rest) for token_id in token_ids[first:]]
        return [*plain_ids(cast(Sequence[int], token_ids[:first])), *of_chunks]

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached content. False, and nothing changes, while requests run, unless these are preempted.

        Requests that wait for tokens from outside are not: somebody else writes to their blocks.
        """
        if preempt_running:
            for request in [*self.prefilling[::-1], *self.decoding.requests[::-1]]:
                self._preempt(request)
        return self.cache.clear()

    def _decoding_batch(self) -> Batch:
        requests = self.decoding.requests
        starts = (self.decoding.num_tokens - 1).tolist()
        return Batch(list(requests), starts, [1] * len(requests), num_decoding=len(requests))

    def _continue_prefill(self, batch: Batch, request: RequestLike, budget: int) -> int:
        """Room for the next chunk of a prompt; its tokens. The newest requests are preempted until there is any."""
        table = self.cache.table(request)
        if table is None:
            return 0  # preempted for one that was before it
        start = table.num_computed
        count = self.cache.step_end(request, start, min(request.num_tokens, start + budget)) - start
        while self.cache.allocate(request, count) is None:
            self._preempt_newest()
            if request not in self.prefilling:
                return 0
        batch.add(request, start, count)
        return count

    def _admit(self, batch: Batch, budget: int) -> None:
        held_back: list[RequestLike] = []
        while budget and self.waiting and self.num_running < self.config.max_num_seqs:
            request = self.waiting[0]
            hit = self.cache.match(request)
            if self._is_being_computed(request, hit):
                held_back.append(self.waiting.popleft())
                continue
            if not self._fits_whole(request, hit):
                break
            self.waiting.popleft()
            num_loadable = self._num_to_load(request, hit)
            if num_loadable:
                self._start_load(batch, request, hit, num_loadable)
            else:
                budget -= self._start_prefill(batch, request, hit, budget)
            given_up = self._num_given_up.pop(request.request_id, 0)
            self.num_recomputed_tokens += max(given_up - hit.num_tokens - num_loadable, 0)
        self.waiting.extendleft(reversed(held_back))

    def _is_being_computed(self, request: RequestLike, hit: Hit) -> bool:
        """Whether the first block that the request lacks, and could find, is part of a prompt that is computed now."""
        if not (self.config.waits_for_prefix and self.prefilling and request.reads_cache):
            return False
        hasher = self.cache.hasher
        first = hit.num_tokens // hasher.block_size
        if first >= (request.num_tokens - 1) // hasher.block_size:
            return False
        name = request.block_hashes(hasher)[first]
        others = (other.block_hashes(hasher) for other in self.prefilling)
        return any(first < len(names) and names[first] == name for names in others)

    def _start_prefill(self, batch: Batch, request: RequestLike, hit: Hit, budget: int) -> int:
        """The first chunk of a prompt that was admitted; its tokens."""
        start = hit.num_tokens
        count = self.cache.step_end(request, start, min(request.num_tokens, start + budget), hit) - start
        table = self.cache.allocate(request, count, hit)
        assert table is not None, "invariant 12: what was admitted has room"
        self.prefilling.append(request)
        if start + count < request.num_tokens:
            self._reserving.append(request)
        batch.add(request, start, count)
        batch.num_admitted += 1
        return count

    def _num_to_load(self, request: RequestLike, hit: Hit) -> int:
        """Tokens that come from outside. The last token is never one of them: it is computed to give logits."""
        if self._num_loadable is None or request.request_id in self._not_loadable:
            return 0
        most = self.cache.groups.align(request.num_tokens - 1 - hit.num_tokens)
        return min(self.cache.groups.align(self._num_loadable(request, hit.num_tokens)), most)

    def _start_load(self, batch: Batch, request: RequestLike, hit: Hit, num_tokens: int) -> None:
        table = self.cache.allocate(request, 0, hit, num_external_tokens=num_tokens)
        assert table is not None, "invariant 12: what was admitted has room"
        self.loading.append(request)
        self._reserving.append(request)
        batch.loads.append((request, hit.num_tokens, hit.num_tokens + num_tokens))

    def _preempt_newest(self) -> None:
        self._preempt(self.prefilling[-1] if self.prefilling else self.decoding.requests[-1])

    def _preempt(self, victim: RequestLike) -> None:
        self._num_given_up[victim.request_id] = self._release(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _release(self, request: RequestLike) -> int:
        """A running request lets go of its blocks; how many tokens it had computed."""
        table = self.cache.table(request)
        assert table is not None, f"request {request.request_id!r} runs without blocks"
        if table.is_decoding:
            self.cache.leave(self.decoding, [request])
        for own in (self.prefilling, self.loading, self._reserving):
            if request in own:
                own.remove(request)
        self.cache.free(request)
        return table.num_computed

    def _tokens_of_decoding(self, batch: Batch, token_ids: Sequence[int | None]) -> list[int]:
        """The tokens of the requests that still decode, in order of their rows."""
        next_ids = cast(list[int], list(token_ids[: batch.num_decoding]))
        if len(next_ids) == len(self.decoding):
            return next_ids
        still = set(self.decoding.requests)
        return [token_id for request, token_id in zip(batch.requests, next_ids, strict=False) if request in still]

    def _end_decoding(self, next_ids: list[int]) -> list[RequestLike]:
        """Those that got their last token leave, and their tokens are taken out of `next_ids`."""
        rows = self.decoding.ending_rows()
        if not rows:
            return []
        ended = [(self.decoding.requests[row], next_ids[row]) for row in rows]
        for row in reversed(rows):
            del next_ids[row]
        self.cache.leave(self.decoding, [request for request, _ in ended])
        for request, token_id in ended:
            self._end(request, token_id)
        return [request for request, _ in ended]

    def _commit_prefill(
        self, batch: Batch, token_ids: Sequence[int | None], ended: list[RequestLike]
    ) -> list[RequestLike]:
        """Commit the chunks; the requests whose prompt is done and that go on. Those that are through join `ended`."""
        prefilled = []
        first = batch.num_decoding
        chunks = zip(batch.requests[first:], batch.starts[first:], batch.counts[first:], token_ids, strict=True)
        for request, start, count, token_id in chunks:
            if request not in self.prefilling:
                continue
            self.cache.commit(request, start + count)
            if token_id is None:
                continue
            self.prefilling.remove(request)
            if request in self._reserving:
                self._reserving.remove(request)
            if request.num_tokens - request.num_prompt_tokens + 1 == request.max_tokens:
                self._end(request, token_id)
                ended.append(request)
            else:
                request.token_ids.append(token_id)
                prefilled.append(request)
        return prefilled

    def _end(self, request: RequestLike, token_id: int) -> None:
        self.cache.commit(request, request.num_tokens)
        request.token_ids.append(token_id)
        self.cache.free(request)
        self._ids.discard(request.request_id)
        self._not_loadable.discard(request.request_id)

    def _fits_whole(self, request: RequestLike, hit: Hit) -> bool:
        """Whether all tokens that the request has now fit beside the running ones, the watermark kept."""
        needed = self.cache.num_blocks_to_finish(request, request.num_tokens - hit.num_tokens, hit)
        spare = self._watermark_blocks if self.num_running else 0
        return needed + spare + self._num_reserved() <= self.cache.num_free_blocks

    def _num_reserved(self) -> int:
        """Blocks that requests still lack for their prompts, which end in a later step: others may not have them."""
        return sum(
            self.cache.max_blocks(request.num_tokens, request.num_encoder_tokens) - self.cache.num_held_blocks(request)
            for request in self._reserving
        )

    def _loading_table(self, request: RequestLike) -> BlockTable:
        table = self.cache.table(request)
        if request not in self.loading or table is None:
            raise UsageError(f"request {request.request_id!r} does not wait for tokens from outside")
        return table
