"""Long random histories on the cache and its naive model, compared after every operation.

Pools are tiny and tokens few, so that shortage, sharing, copies of one name and eviction happen all the time. A failure
shows the seed and the operations of its history.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvpool import Adapter, Hit, KVCacheManager, MediaItem, Request
from kvpool.testing import MirroredCache

HISTORY_LENGTH = 1_000
Value = TypeVar("Value")


class Driver:
    """One history: performs random operations, each of them legal or a misuse that must be refused."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.mirror = MirroredCache(rng.randint(5, 40), rng.randint(1, 5), rng.choice([1, 1, 20]))
        self.size = self.mirror.cache.block_size
        self.families = [self._tokens(rng.randint(1, 6 * self.size)) for _ in range(rng.randint(1, 3))]
        self.keyed = rng.choice([0.0, 0.1, 0.4])
        self.waiting: list[Request] = []
        self.live: list[Request] = []
        self.old_hits: deque[Hit] = deque(maxlen=5)
        self.num_requests = 0
        self.log: list[str] = []

    def run(self, num_operations: int) -> None:
        operations: dict[Callable[[], object], int] = {
            self.new_request: 12, self.admit: 20, self.grow: 6, self.commit: 16, self.append: 6, self.step: 12,
            self.end: 6, self.preempt: 3, self.forget: 3, self.clear: 1, self.match: 4, self.misuse: 7,
            self.join: 6, self.step_batch: 20, self.leave: 3,
        }  # fmt: skip
        for operation in self.rng.choices(list(operations), list(operations.values()), k=num_operations):
            operation()

    def _note(self, text: str) -> None:
        self.log.append(text)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3) for _ in range(count)]

    @property
    def alone(self) -> list[Request]:
        """Live requests that are in no batch."""
        return [request for request in self.live if request not in self.mirror.decoding]

    def _num_slots(self, request: Request) -> int:
        table = self.mirror.cache.table(request)
        assert table is not None
        return table.num_slots

    # -- operations

    def new_request(self) -> None:
        rng = self.rng
        prefix = rng.choice(self.families)
        tokens = prefix[: rng.choice([len(prefix), rng.randint(0, len(prefix))])]
        tokens += self._tokens(rng.randint(1, 2 * self.size))
        self.num_requests += 1
        request = Request(
            f"r{self.num_requests}",
            tokens,
            cache_salt=self._sometimes("s", "a"),
            tenant=self._sometimes("t", "s"),
            adapter=self._sometimes(Adapter("a", "1"), Adapter("a", "2")),
            media=self._sometimes(*self._media(len(tokens))) or (),
            reads_cache=rng.random() < 0.9,
        )
        keys = (request.cache_salt, request.tenant, request.adapter, request.media, request.reads_cache)
        self._note(f"new {request.request_id} {tokens} {keys}")
        self.waiting.append(request)

    def _sometimes(self, *values: Value) -> Value | None:
        return self.rng.choice(values) if self.rng.random() < self.keyed else None

    def _media(self, num_tokens: int) -> list[tuple[MediaItem, ...]]:
        offset = self.rng.randrange(num_tokens)
        item = MediaItem(self.rng.choice("pq"), offset, self.rng.randint(1, num_tokens - offset))
        return [(item,), (item, MediaItem("p", 0, 1))]

    def _match(self, request: Request) -> Hit:
        limit = self.rng.choice([None, None, None, self.rng.randint(0, request.num_tokens + 2)])
        hit = self.mirror.match(request, limit)
        self._note(f"match {request.request_id} up to {limit}: {hit}")
        self.old_hits.append(hit)
        return hit

    def match(self) -> None:
        if self.waiting or self.live:
            self._match(self.rng.choice(self.waiting + self.live))

    def admit(self) -> None:
        if not self.waiting:
            return
        request = self.rng.choice(self.waiting)
        old = self.rng.choice(self.old_hits) if self.old_hits and self.rng.random() < 0.2 else None
        hit = old or self._match(request)
        left = max(request.num_tokens - hit.num_tokens, 0)
        count = self.rng.choice([max(left, 1), self.rng.randint(0 if hit.num_tokens else 1, left + 2 * self.size)])
        self._note(f"admit {request.request_id} with {count} more, {hit}")
        if self.mirror.is_stale(request, hit):
            self.mirror.refuse(lambda cache: cache.allocate(request, count, hit))
        elif self.mirror.allocate(request, count, hit):
            self.waiting.remove(request)
            self.live.append(request)

    def grow(self) -> None:
        if self.alone:
            request, count = self.rng.choice(self.alone), self.rng.randint(1, 3 * self.size)
            self._note(f"grow {request.request_id} by {count}")
            self.mirror.allocate(request, count)

    def commit(self) -> None:
        if self.alone:
            request = self.rng.choice(self.alone)
            table = self.mirror.cache.table(request)
            assert table is not None
            most = min(table.num_slots, request.num_tokens)
            count = self.rng.choice([most, most, self.rng.randint(table.num_computed, most)])
            self._note(f"commit {request.request_id} {count}")
            self.mirror.commit(request, count)

    def append(self) -> None:
        if self.alone:
            request = self.rng.choice(self.alone)
            self._note(f"append {request.request_id}")
            request.append(self.rng.randrange(3))

    def step(self) -> None:
        fit = [request for request in self.alone if self._num_slots(request) >= request.num_tokens]
        chosen = self.rng.sample(fit, self.rng.randint(0, len(fit)))
        self._note(f"step {[request.request_id for request in chosen]}")
        self.mirror.step(chosen, self._tokens(len(chosen)))

    def join(self) -> None:
        fit = [request for request in self.alone if self._num_slots(request) >= request.num_tokens - 1]
        if fit:
            request = self.rng.choice(fit)
            self._note(f"join {request.request_id}")
            self.mirror.join(request)

    def step_batch(self) -> None:
        tokens = self._tokens(len(self.mirror.decoding))
        self._note(f"step batch {[request.request_id for request in self.mirror.decoding]}")
        if self.mirror.batch.unserved and not self.mirror.serve():
            self.mirror.refuse(lambda cache: cache.step(self.mirror.batch, tokens))
        else:
            self.mirror.step_batch(tokens)

    def leave(self) -> None:
        decoding = self.mirror.decoding
        leaving = self.rng.sample(decoding, self.rng.randint(0, len(decoding)))
        self._note(f"leave {[request.request_id for request in leaving]}")
        self.mirror.leave(leaving)

    def end(self) -> Request | None:
        if not self.live:
            return None
        request = self.live.pop(self.rng.randrange(len(self.live)))
        if request in self.mirror.decoding:
            self.mirror.leave([request])
        self._note(f"free {request.request_id}")
        self.mirror.free(request)
        return request

    def preempt(self) -> None:
        request = self.end()
        if request is not None:
            request.num_preemptions += 1
            self.waiting.append(request)

    def forget(self) -> None:
        if self.waiting:
            self.waiting.pop(self.rng.randrange(len(self.waiting)))

    def clear(self) -> None:
        if self.rng.random() < 0.5:
            while self.live:
                self.end()
        self._note("clear")
        self.mirror.clear()

    def misuse(self) -> None:
        self.rng.choice([self.misuse_waiting, self.misuse_alone, self.misuse_decoding])()

    def misuse_waiting(self) -> None:
        if self.waiting:
            request = self.rng.choice(self.waiting)
            self._note(f"misuse waiting {request.request_id}")
            self._refuse_one_of(
                lambda cache: cache.free(request),
                lambda cache: cache.commit(request, 1),
                lambda cache: cache.step([*self.alone[:1], request], [0] * (1 + len(self.alone[:1]))),
                lambda cache: cache.allocate(request, 0),
                lambda cache: cache.allocate(request, -1),
                lambda cache: cache.join(self.mirror.batch, request),
                lambda cache: cache.leave(self.mirror.batch, [request]),
            )

    def misuse_alone(self) -> None:
        if not self.alone:
            return
        request = self.rng.choice(self.alone)
        twin = Request(request.request_id, request.token_ids)
        table = self.mirror.cache.table(request)
        assert table is not None
        self._note(f"misuse {request.request_id}")
        self._refuse_one_of(
            lambda cache: cache.allocate(request, 0),
            lambda cache: cache.allocate(twin, 1),
            lambda cache: cache.free(twin),
            lambda cache: cache.commit(twin, table.num_computed),
            lambda cache: cache.step([twin], [0]),
            lambda cache: cache.join(self.mirror.batch, twin),
            lambda cache: cache.commit(request, table.num_computed - 1),
            lambda cache: cache.commit(request, min(table.num_slots, request.num_tokens) + 1),
            lambda cache: cache.step([request, request], [0, 0]),
            lambda cache: cache.step([request], []),
            lambda cache: cache.step([request], [-1]),
            lambda cache: cache.leave(self.mirror.batch, [request]),
        )
        if table.num_slots < request.num_tokens:
            self.mirror.refuse(lambda cache: cache.step([request], [0]))

    def misuse_decoding(self) -> None:
        if self.mirror.decoding:
            request = self.rng.choice(self.mirror.decoding)
            self._note(f"misuse decoding {request.request_id}")
            self._refuse_one_of(
                lambda cache: cache.free(request),
                lambda cache: cache.commit(request, request.num_tokens),
                lambda cache: cache.allocate(request, 1),
                lambda cache: cache.step([request], [0]),
                lambda cache: cache.join(self.mirror.batch, request),
                lambda cache: cache.step(self.mirror.batch, []),
                lambda cache: cache.step(self.mirror.batch, [-1] * len(self.mirror.decoding)),
            )

    def _refuse_one_of(self, *calls: Callable[[KVCacheManager], object]) -> None:
        self.mirror.refuse(self.rng.choice(calls))


def run_history(seed: int, index: int, num_operations: int) -> Driver:
    """A history that the seed and its index decide."""
    driver = Driver(random.Random(f"{seed}/{index}"))
    try:
        driver.run(num_operations)
    except Exception as error:
        error.add_note(f"--seed {seed}, history {index}:\n" + "\n".join(driver.log[-40:]))
        raise
    return driver


def test_cache_and_naive_model_agree_after_every_operation(seed: int, num_operations: int) -> None:
    for index in range(-(-num_operations // HISTORY_LENGTH)):
        run_history(seed, index, HISTORY_LENGTH)


def test_histories_reach_what_they_are_for(seed: int) -> None:
    caches = [run_history(seed, index, HISTORY_LENGTH).mirror.cache for index in range(10)]
    assert sum(cache.num_evictions for cache in caches) > 100
    assert sum(cache.stats.num_hit_tokens for cache in caches) > 10
    assert sum(cache.stats.num_resumed_requests for cache in caches) > 10
