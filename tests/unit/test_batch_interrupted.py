"""A decode batch that others come in between: threads that read, signals, finalizers, errors in the middle of verbs."""

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvpool import DecodeBatch, FullAttention, KVCacheManager, LayerKind, Request, SlidingWindow, UsageError
from kvpool._native import NativeBlockPool

LAYOUTS: list[tuple[LayerKind, ...]] = [(FullAttention(),), (FullAttention(), SlidingWindow(6))]


def decoding(num_requests: int, *kinds: LayerKind) -> tuple[KVCacheManager, DecodeBatch]:
    cache = KVCacheManager(40_000, 4, kinds or (FullAttention(),), events=False)
    batch = cache.decode_batch()
    for number in range(num_requests):
        request = Request(f"r{number}", [number, 1, 2, 3])
        cache.allocate(request, 4)
        cache.join(batch, request)
    assert cache.serve(batch)
    return cache, batch


class Handle:
    """When it is dropped, by the garbage collector, its requests are aborted."""

    def __init__(self, cache: KVCacheManager, batch: DecodeBatch, num_requests: int) -> None:
        self.cache, self.batch, self.requests = cache, batch, batch.requests[:num_requests]
        self.me = self

    def __del__(self) -> None:
        self.cache.leave(self.batch, self.requests)


@pytest.fixture
def collect_often() -> Iterator[Callable[[int], None]]:
    before = gc.get_threshold()

    def often(num_allocated: int) -> None:
        gc.set_threshold(num_allocated, 1000, 1000)
        gc.enable()

    gc.collect()
    gc.disable()
    yield often
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
@pytest.mark.parametrize("read", [True, False])
def test_what_the_garbage_collector_lets_go_of_leaves(
    kinds: tuple[LayerKind, ...], read: bool, collect_often: Callable[[int], None]
) -> None:
    if not read and NativeBlockPool is None:
        pytest.skip("a step in Python is many: what is let go of may come between")
    cache, batch = decoding(80, *kinds)
    for threshold in range(1, 18):
        for _ in range(5):
            cache.step(batch, [7] * len(batch))
        request = batch.requests[-1]
        gc.collect()
        Handle(cache, batch, 4)
        tokens = [7] * len(batch)
        collect_often(threshold)
        with suppress(UsageError):  # they may leave before the step
            length = len(request.token_ids) if read else len(cache.step(batch, tokens).grown)
        gc.disable()
        assert not read or length == request.num_tokens
        gc.collect()
        cache.check()
    assert len(batch) == 80 - 17 * 4


@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_any_thread_may_read_while_another_steps(kinds: tuple[LayerKind, ...]) -> None:
    """As a detokenizer does. It sees the tokens of some step, all of them."""
    cache, batch = decoding(100, *kinds)
    requests, seen, errors, is_over = batch.requests, [0], list[Exception](), threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                for request in requests[::9]:
                    tokens = request.token_ids
                    assert tokens[4:] == [*range(len(tokens) - 4)]
                    table = cache.table(request)
                    assert table is not None
                    assert 3 <= table.num_computed <= table.num_slots
                    seen[0] += 1
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    reader = threading.Thread(target=read)
    try:
        sys.setswitchinterval(1e-6)
        reader.start()
        for token in range(300):
            assert cache.serve(batch)
            cache.step(batch, [token] * len(batch))
    finally:
        is_over.set()
        reader.join()
        sys.setswitchinterval(before)
    assert not errors
    assert seen[0] > 0
    cache.check()


class Interrupted(BaseException):
    pass


def test_a_signal_leaves_a_native_batch_whole() -> None:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before, num_interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for number in range(60):
            cache, batch = decoding(50)
            if type(batch) is DecodeBatch:
                pytest.skip("a step in Python can be interrupted in its middle")
            cache.step(batch, [1] * len(batch))  # first blocks are named in Python
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + number * 3e-5)
                for _ in range(1000):
                    assert batch.requests[3].num_tokens >= 4
                    cache.step(batch, [1] * len(batch))
                    cache.serve(batch)
            except Interrupted:
                num_interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            cache.check()
            cache.leave(batch, batch.requests[:2])
            cache.step(batch, [1] * len(batch))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupted > 30


class Broken(Request):
    """Its blocks cannot be named once its tokenizer is gone."""

    is_broken = False

    def block_hashes(self, *arguments: Any) -> list[bytes]:
        if self.is_broken:
            raise RuntimeError("the tokenizer is gone")
        return super().block_hashes(*arguments)


def state(cache: KVCacheManager, batch: DecodeBatch, request: Request) -> object:
    table = cache.table(request)
    assert table is not None
    own = (table.num_computed, table.num_committed, table.num_slots, table.is_decoding, list(request.token_ids))
    return cache.free_block_ids(), cache.findable(), batch.requests[:], batch.num_tokens.tolist(), own


@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_a_join_that_fails_changes_nothing(kinds: tuple[LayerKind, ...]) -> None:
    cache, batch = decoding(2, *kinds)
    request = Broken("broken", range(6))
    cache.allocate(request, 6)
    request.is_broken = True
    before = state(cache, batch, request)
    with pytest.raises(RuntimeError, match="the tokenizer is gone"):
        cache.join(batch, request)
    request.is_broken = False
    request.token_ids[-1] = 1.5  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"request 'broken': token ids are whole numbers .*, not 1\.5"):
        cache.join(batch, request)
    request.token_ids[-1] = 5
    assert state(cache, batch, request) == before
    cache.join(batch, request)
    cache.check()


@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_a_commit_or_a_step_that_cannot_name_a_block_changes_nothing(kinds: tuple[LayerKind, ...]) -> None:
    cache, batch = decoding(2, *kinds)
    request = Broken("broken", range(7))
    cache.allocate(request, 7)
    request.is_broken = True
    before = state(cache, batch, request)
    with pytest.raises(RuntimeError):
        cache.commit(request, 7)
    assert state(cache, batch, request) == before
    request.is_broken = False
    cache.commit(request, 7)
    cache.join(batch, request)
    cache.step(batch, [1, 2, 3])
    assert cache.serve(batch)
    request.is_broken = True
    before = state(cache, batch, request)
    with pytest.raises(RuntimeError):
        cache.step(batch, [1, 2, 3])
    assert state(cache, batch, request) == before
    request.is_broken = False
    cache.step(batch, [1, 2, 3])
    cache.check()


class Number:
    """A token that does something when it is read."""

    num_reads = 0

    def __init__(self, act: Callable[[], int]) -> None:
        self.act = act

    def __index__(self) -> int:
        self.num_reads += 1
        return self.act()


@pytest.mark.parametrize("is_list", [False, True])
def test_a_token_is_read_once_and_before_anything_changes(is_list: bool) -> None:
    cache, batch = decoding(3)
    requests = batch.requests[:]
    if is_list:
        cache.leave(batch, requests)

    def step(*tokens: Any) -> None:
        cache.step(requests if is_list else batch, tokens)

    once = Number(lambda: 5)
    step(once, 6, np.int64(7))
    assert once.num_reads == 1
    assert [type(request.token_ids[-1]) for request in requests] == [int] * 3
    with pytest.raises(ZeroDivisionError):
        step(1, 2, Number(lambda: 1 // 0))
    with pytest.raises(UsageError, match="not -1"):
        step(1, 2, -1)
    assert [request.token_ids[4:] for request in requests] == [[5], [6], [7]]
    cache.check()


def test_a_token_that_lets_somebody_leave_is_refused_like_one_too_many() -> None:
    cache, batch = decoding(3)
    last = batch.requests[2]

    def act() -> int:
        cache.leave(batch, [last])
        return 5

    leaver = Number(act)
    with pytest.raises(UsageError, match="2 requests and 3 tokens"):
        cache.step(batch, [leaver, 1, 2])  # type: ignore[list-item]
    assert [request.num_tokens for request in batch.requests] == [4, 4]
    cache.step(batch, [1, 2])
    cache.check()


@pytest.mark.parametrize("tokens", [b"", b"\1" * 3, "", "123", bytearray(3), np.array(3), 5, None, [None] * 3])
def test_what_is_no_row_of_tokens_is_refused(tokens: Any) -> None:
    cache, batch = decoding(3)
    batches: list[Any] = [batch, cache.decode_batch(), []]
    for given in batches:
        with pytest.raises(UsageError, match="token"):
            cache.step(given, tokens)


def test_tokens_and_requests_may_come_from_iterators() -> None:
    cache, batch = decoding(3)
    requests = batch.requests[:]
    cache.step(batch, (token for token in (1, 2, 3)))
    cache.leave(batch, (request for request in requests))
    assert [request.token_ids[-1] for request in requests] == [1, 2, 3]
    for request in requests:
        cache.free(request)
    cache.check()


def test_a_result_is_its_readers_own() -> None:
    cache = KVCacheManager(4, 4)
    batch = cache.decode_batch()
    for number in range(3):
        request = Request(f"r{number}", [number, 1, 2, 3])
        cache.allocate(request, 4)
        cache.join(batch, request)
    result = cache.step(batch, [9, 9, 9])
    assert result.unserved == batch.requests
    while result.unserved:
        result.unserved.pop()
    batch.unserved.clear()
    assert batch.unserved == batch.requests
    assert not cache.serve(batch)
    with pytest.raises(UsageError, match="'r0' has no room"):
        cache.step(batch, [1, 1, 1])
