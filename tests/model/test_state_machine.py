"""The same rules as the random histories, driven by Hypothesis: what it finds, it shrinks to the shortest history."""

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule

from kvpool import Adapter, Hit, KVCacheManager, Request
from kvpool.testing import MirroredCache

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
KEYS = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": st.sampled_from("sa"),
        "tenant": st.sampled_from("ts"),
        "adapter": st.builds(Adapter, st.just("a"), st.sampled_from("12")),
        "reads_cache": st.just(False),
    },
)


class CacheMachine(RuleBasedStateMachine):
    """A cache and its naive model; every rule compares all of both."""

    waiting: Bundle[Request] = Bundle("waiting")
    hits: Bundle[Hit] = Bundle("hits")

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Request] = []
        self.num_requests = 0

    @initialize(num_blocks=st.integers(2, 9), block_size=st.integers(1, 3), check_interval=st.sampled_from([1, 20]))
    def make(self, num_blocks: int, block_size: int, check_interval: int) -> None:
        self.mirror = MirroredCache(num_blocks, block_size, check_interval)

    @rule(target=waiting, tokens=TOKENS, keys=KEYS)
    def new_request(self, tokens: list[int], keys: dict[str, object]) -> Request:
        self.num_requests += 1
        return Request(f"r{self.num_requests}", tokens, **keys)  # type: ignore[arg-type]

    @rule(target=hits, request=waiting, limit=st.none() | st.integers(0, 13))
    def match(self, request: Request, limit: int | None) -> Hit:
        return self.mirror.match(request, limit)

    @rule(request=waiting, count=st.integers(1, 14))
    def admit(self, request: Request, count: int) -> None:
        if request not in self.live and self.mirror.allocate(request, count, self.mirror.match(request)):
            self.live.append(request)

    @rule(request=waiting, hit=hits, count=st.integers(0, 14))
    def admit_with_old_hit(self, request: Request, hit: Hit, count: int) -> None:
        if request in self.live or not hit.num_tokens:
            return
        if self.mirror.is_stale(request, hit):
            self.mirror.refuse(lambda cache: cache.allocate(request, count, hit))
        elif self.mirror.allocate(request, count, hit):
            self.live.append(request)

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        self.mirror.allocate(self._any(data, self.alone), count)

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        request = self._any(data, self.alone)
        table = self.mirror.cache.table(request)
        assert table is not None
        most = min(table.num_slots, request.num_tokens)
        self.mirror.commit(request, data.draw(st.integers(table.num_computed, most)))

    @precondition(lambda self: self.alone)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        self._any(data, self.alone).append(token)

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        fit = [request for request in self.alone if not self.mirror.naive.lacks_room(request)]
        chosen = data.draw(st.permutations(fit))[: data.draw(st.integers(0, len(fit)))]
        self.mirror.step(chosen, self._tokens(data, len(chosen)))

    @precondition(lambda self: self.alone)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        request = self._any(data, self.alone)
        table = self.mirror.cache.table(request)
        assert table is not None
        if table.num_slots < request.num_tokens - 1:
            self.mirror.refuse(lambda cache: cache.join(self.mirror.batch, request))
        else:
            self.mirror.join(request)

    @precondition(lambda self: self.mirror.decoding)
    @rule(data=st.data())
    def step_batch(self, data: st.DataObject) -> None:
        tokens = self._tokens(data, len(self.mirror.decoding))
        if self.mirror.batch.unserved and not self.mirror.serve():
            self.mirror.refuse(lambda cache: cache.step(self.mirror.batch, tokens))
        else:
            self.mirror.step_batch(tokens)

    @precondition(lambda self: self.mirror.decoding)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.mirror.leave(data.draw(st.lists(st.sampled_from(self.mirror.decoding), unique=True)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), preempted=st.booleans())
    def free(self, data: st.DataObject, preempted: bool) -> None:
        request = self._any(data, self.live)
        if request in self.mirror.decoding:
            self.mirror.refuse(lambda cache: cache.free(request))
            self.mirror.leave([request])
        self.live.remove(request)
        self.mirror.free(request)
        request.num_preemptions += preempted

    @rule()
    def clear(self) -> None:
        assert self.mirror.clear() == (not self.live)

    @rule(request=waiting, call=st.sampled_from(["free", "commit", "step"]))
    def misuse(self, request: Request, call: str) -> None:
        calls: dict[str, Callable[[KVCacheManager], object]] = {
            "free": lambda cache: cache.free(request),
            "commit": lambda cache: cache.commit(request, request.num_tokens + 1),
            "step": lambda cache: cache.step([request, request], [0, 0]),
        }
        if call != "free" or request not in self.live:
            self.mirror.refuse(calls[call])

    @property
    def alone(self) -> list[Request]:
        return [request for request in self.live if request not in self.mirror.decoding]

    def _any(self, data: st.DataObject, requests: list[Request]) -> Request:
        return data.draw(st.sampled_from(requests))

    def _tokens(self, data: st.DataObject, count: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=600,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
