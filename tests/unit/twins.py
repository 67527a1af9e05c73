"""Two caches that must do the same: every call goes to both, and all that can be seen of them is compared after it."""

import random
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from kvpool import BlockStored, DecodeBatch, Hit, KVCacheManager, Request, UsageError
from kvpool.core.decode_batch import StepResult

Call = Callable[[int], object]
"""Something to be done with the cache, the batch and the requests of one side: 0 or 1."""


class Twins:
    """Random histories of two caches. Where `are_events_ordered` is False, events may come in another order."""

    def __init__(
        self, caches: tuple[KVCacheManager, KVCacheManager], rng: random.Random, *, are_events_ordered: bool = True
    ) -> None:
        self.caches = caches
        self.rng = rng
        self.live: list[tuple[Request, Request]] = []
        """Requests that hold blocks and are in no batch."""
        self.in_batch: list[tuple[Request, Request]] = []
        self.batches: tuple[DecodeBatch, DecodeBatch] = (caches[0].decode_batch(), caches[1].decode_batch())
        self.counts: Counter[str] = Counter()
        self._are_events_ordered = are_events_ordered
        self._num_requests = 0
        sizes = {group.block_size for group in caches[0].groups.all}
        self._longest = 12 * max(sizes)
        self._families = [[rng.randrange(3) for _ in range(self._longest)] for _ in range(2)]

    def run(self, num_calls: int) -> None:
        verbs = [self.admit, self.admit, self.go_on, self.go_on, self.go_on, self.decode, self.decode, self.decode]
        verbs += [self.trim, self.free, self.join, self.join, self.step, self.step, self.step, self.step, self.leave]
        verbs += [self.step_list, self.step_list, self.rare]
        for _ in range(num_calls):
            self.rng.choice(verbs)()
        while self.in_batch:
            self.leave()
        while self.live:
            self.free()
        for cache in self.caches:
            cache.check()
            assert cache.num_free_blocks == cache.num_usable_blocks

    def both(self, what: str, call: Call) -> Any:
        """The answer that both give, a refusal too. Afterwards both look the same."""
        answers = [_answer(call, side) for side in (0, 1)]
        seen = [_plain(answer) for answer in answers]
        assert seen[0] == seen[1], what
        self.counts[what if not isinstance(answers[0], UsageError) else f"{what} refused"] += 1
        if answers[0] is None:
            self.counts[f"{what} short"] += 1
        states = [self._state(side) for side in (0, 1)]
        for one, other in zip(*states, strict=True):
            assert one == other, what
        return answers

    def _state(self, side: int) -> list[object]:
        cache = self.caches[side]
        self.batches[side].settle()
        tables = [cache.table(pair[side]) for pair in [*self.live, *self.in_batch]]
        each = [
            (t.block_ids, list(t.scratch_ids), t.num_slots, t.num_computed, t.num_committed, t.is_decoding)
            for table in tables
            for t in ([table] if table else [])
        ]
        holders = [cache.holders(block) for block in range(cache.num_blocks)]
        names = [cache.findable(group.group_id) for group in cache.groups.all]
        found = [[sorted((n, cache._pool.finder(g)(n)) for n in own)] for g, own in enumerate(names)]
        tokens = [pair[side].token_ids for pair in [*self.live, *self.in_batch]]
        counts = (cache.usage(), cache.num_evictions, cache.num_live_requests, repr(cache.stats))
        return [cache.free_block_ids(), each, holders, names, found, tokens, counts, self._events(cache)]

    def _events(self, cache: KVCacheManager) -> object:
        blocks = [block for event in cache.take_events() for block in _blocks_of(event)]
        return blocks if self._are_events_ordered else Counter(blocks)

    # -- verbs

    def admit(self) -> None:
        """A new request: all of its prompt or a part, some with what comes from outside, or with drafts."""
        rng = self.rng
        prompt = [*rng.choice(self._families)[: rng.randrange(self._longest)], rng.randrange(3)]
        salt, reads = rng.choice([None, None, None, "s"]), rng.random() < 0.9
        self._num_requests += 1
        name = str(self._num_requests)
        pair = (
            Request(name, prompt, cache_salt=salt, reads_cache=reads),
            Request(name, prompt, cache_salt=salt, reads_cache=reads),
        )
        limit = rng.choice([None, None, len(prompt), rng.randrange(len(prompt) + 1)])
        hits: list[Hit] = self.both("match", lambda side: self.caches[side].match(pair[side], limit))
        if rng.random() < 0.2:
            hits = [Hit(0, tuple([] for _ in hit.block_ids), hit.reason) for hit in hits]
        left = len(prompt) - hits[0].num_tokens
        alignment = self.caches[0].alignment
        external = rng.choice([0, 0, 0, rng.randrange(left + 1) // alignment * alignment])
        ahead = rng.choice([0, 0, rng.randrange(10)])
        count = rng.choice([left - external, rng.randint(0, left - external)])
        if count and rng.random() < 0.7:
            start = hits[0].num_tokens + external
            ends = self.both(
                "end", lambda side: self.caches[side].step_end(pair[side], start, start + count, hits[side])
            )
            count = ends[0] - start
        options = {"num_external_tokens": external, "num_lookahead_tokens": ahead}

        def needed(side: int) -> object:
            cache = self.caches[side]
            blocks = cache.num_blocks_needed(pair[side], count, hits[side], **options)
            return blocks, cache.num_blocks_to_finish(pair[side], left, hits[side])

        self.both("count", needed)
        tables = self.both(
            "allocate", lambda side: self.caches[side].allocate(pair[side], count, hits[side], **options)
        )
        if tables[0] is not None and not isinstance(tables[0], UsageError):
            self.counts["hit"] += hits[0].num_tokens > 0
            self.live.append(pair)
            stop = hits[0].num_tokens + external + count
            self._commit(pair, stop)

    def _commit(self, pair: tuple[Request, Request], stop: int) -> None:
        """All that was allocated, or less of it, or nothing yet."""
        if self.rng.random() < 0.9:
            stop = stop if self.rng.random() < 0.8 else self.rng.randrange(stop + 1)
            self.both("commit", lambda side: self.caches[side].commit(pair[side], stop))

    def _some(self, pairs: list[tuple[Request, Request]]) -> tuple[Request, Request] | None:
        return self.rng.choice(pairs) if pairs else None

    def _num_computed(self, request: Request) -> int:
        table = self.caches[0].table(request)
        assert table is not None
        return table.num_computed

    def go_on(self) -> None:
        """The next chunk of a prompt that is not done."""
        if pair := self._some([pair for pair in self.live if self._num_computed(pair[0]) < pair[0].num_tokens]):
            start = self._num_computed(pair[0])
            count = self.rng.choice([1, self.rng.randint(1, pair[0].num_tokens - start), pair[0].num_tokens - start])
            ends = self.both("end", lambda side: self.caches[side].step_end(pair[side], start, start + count))
            count = ends[0] - start
            if self._grow("go on", pair, count, 0):
                self._commit(pair, start + count)

    def decode(self) -> None:
        """Tokens one after another, some with drafts after them."""
        done = [pair for pair in self.live if self._num_computed(pair[0]) == pair[0].num_tokens]
        if pair := self._some(done):
            for _ in range(self.rng.randint(1, 6)):
                token = self.rng.randrange(3)
                for request in pair:
                    request.append(token)
                if not self._grow("decode", pair, 1, self.rng.choice([0, 0, 0, self.rng.randrange(9)])):
                    return
                self.both("commit", lambda side: self.caches[side].commit(pair[side], pair[side].num_tokens))

    def _grow(self, what: str, pair: tuple[Request, Request], count: int, ahead: int) -> bool:
        def needed(side: int) -> int:
            return self.caches[side].num_blocks_needed(pair[side], count, num_lookahead_tokens=ahead)

        def grow(side: int) -> object:
            return self.caches[side].allocate(pair[side], count, num_lookahead_tokens=ahead)

        self.both("count", needed)
        return self.both(what, grow)[0] is not None

    def trim(self) -> None:
        if pair := self._some(self.live):
            self.both("trim", lambda side: self.caches[side].trim(pair[side]))

    def free(self) -> None:
        if pair := self._some(self.live):
            self.live.remove(pair)
            self.both("free", lambda side: self.caches[side].free(pair[side]))

    def _may_decode(self) -> list[tuple[Request, Request]]:
        """Requests alone that have computed all their tokens, or all but the last."""
        return [pair for pair in self.live if self._num_computed(pair[0]) >= pair[0].num_tokens - 1]

    def join(self) -> None:
        if pair := self._some(self._may_decode()):
            token = self.rng.randrange(3)
            if self._num_computed(pair[0]) == pair[0].num_tokens:
                for request in pair:
                    request.append(token)
            self.live.remove(pair)
            self.in_batch.append(pair)
            self.both("join", lambda side: self.caches[side].join(self.batches[side], pair[side]))

    def step(self) -> None:
        """Some steps of the batch, as long as all have room."""
        for _ in range(self.rng.randint(1, 6)):
            served = self.both("serve", lambda side: self.caches[side].serve(self.batches[side]))
            if not served[0] or not self.in_batch:
                return
            self._step([self.rng.randrange(3) for _ in self.in_batch])

    def _step(self, tokens: list[int]) -> None:
        results = self.both("step", lambda side: self.caches[side].step(self.batches[side], tokens))
        self.counts["grown"] += len(results[0].grown)
        self.counts["unserved"] += len(results[0].unserved)

    def leave(self) -> None:
        if pair := self._some(self.in_batch):
            self.in_batch.remove(pair)
            self.live.append(pair)
            self.both("leave", lambda side: self.caches[side].leave(self.batches[side], [pair[side]]))

    def step_list(self) -> None:
        """A step of some requests that are in no batch."""
        pairs = [pair for pair in self._may_decode() if self.rng.random() < 0.7]
        tokens = [self.rng.randrange(3) for _ in pairs]
        self.both("step of a list", lambda side: self.caches[side].step([pair[side] for pair in pairs], tokens))

    def rare(self) -> None:
        """What seldom happens: blocks turn out bad, or everything is forgotten."""
        if self.rng.random() < 0.2:
            while self.live:
                self.free()
            self.both("clear", lambda side: self.caches[side].clear())
            return
        bad = self.rng.sample(range(self.caches[0].num_blocks), self.rng.randint(1, 2))
        self.both("invalidate", lambda side: self.caches[side].invalidate(bad))
        left = [pair for pair in self.in_batch if pair[0] not in self.batches[0].requests]
        self.in_batch = [pair for pair in self.in_batch if pair not in left]
        self.live += left


def _answer(call: Call, side: int) -> object:
    try:
        return call(side)
    except UsageError as error:
        return error


def _plain(answer: object) -> object:
    """What of an answer can be compared between two caches."""
    match answer:
        case StepResult():
            names = [[request.request_id for request in own] for own in (answer.grown, answer.unserved)]
            return names, answer.block_ids.shape, answer.block_ids.tolist()
        case UsageError():
            return str(answer)
        case None | int() | dict() | tuple():
            return answer
    return type(answer)


def _blocks_of(event: object) -> list[Hashable]:
    """An event, block by block."""
    if not isinstance(event, BlockStored):
        names = getattr(event, "block_hashes", (b"",))
        return [(type(event), getattr(event, "group_id", 0), name) for name in names]
    parents = [event.parent_block_hash, *event.block_hashes[:-1]]
    size = event.block_size
    tokens = [event.token_ids[at : at + size] for at in range(0, len(event.token_ids), size)]
    return [(event.group_id, *block) for block in zip(event.block_hashes, parents, tokens, strict=True)]
