"""What does one decode step of many running requests cost, kept as a batch, as a list, and call by call?

Every request gets a random token a step; one in 16 fills a block, is hashed, committed and gets a new one. Prompts are
32 to 47 tokens, so borders are spread evenly over the steps. Then the same in more groups, of prompts that are longer
than their windows, for every publication setting; and with rows of the native core beside rows in Python over the same
pool, where the native core is in use: there also in a full pool, where every new block evicts another, and beside
vLLM's manager where that is installed. Median over 96 steps.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import peer_vllm
from medians import median_s, print_table

from kvpool import DecodeBatch, FullAttention, KVCacheManager, LayerKind, Request, SlidingWindow, StateSpace
from kvpool._native import NativeRows
from kvpool.core.publication import Setting

VOCABULARY = 128_000
STEPS = 96


LAYOUTS: dict[str, tuple[LayerKind, ...]] = {
    "1 full": (FullAttention(),),
    "1 full, 1 window of 128": (FullAttention(), SlidingWindow(128)),
    "1 full, 5 windows of 1,024": (FullAttention(), *[SlidingWindow(1024)] * 5),
    "1 full, 3 states": (FullAttention(), *[StateSpace()] * 3),
}


def prompts(num_requests: int, num_tokens: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(VOCABULARY) for _ in range(num_tokens + number % 16)] for number in range(num_requests)]


def pool_size(num_requests: int, num_prompt_tokens: int, num_groups: int) -> int:
    return num_requests * (num_prompt_tokens // 16 + 18) * num_groups


def running(
    num_requests: int,
    *,
    events: bool = False,
    groups: Sequence[LayerKind] = (FullAttention(),),
    publication: Setting = "ranked",
    num_prompt_tokens: int = 32,
    is_full: bool = False,
) -> tuple[KVCacheManager, list[Request]]:
    """Requests whose prompts are computed and that have room for their first output."""
    num_blocks = pool_size(num_requests, num_prompt_tokens, len(groups))
    cache = KVCacheManager(num_blocks, groups=groups, publication=publication, events=events)
    requests = []
    for number, prompt in enumerate(prompts(num_requests, num_prompt_tokens)):
        request = Request(f"r{number}", prompt)
        cache.allocate(request, request.num_tokens)
        cache.commit(request, request.num_tokens)
        request.append(0)
        cache.allocate(request, 1)
        cache.take_events()
        requests.append(request)
    if is_full:
        fill(cache)
    return cache, requests


def fill(cache: KVCacheManager) -> None:
    """Every free block carries the name of a request that has ended."""
    rng = random.Random(4)
    ended: list[Request] = []
    while cache.num_free_blocks >= len(cache.groups):
        request = Request(f"ended {len(ended)}", [rng.randrange(VOCABULARY) for _ in range(16)])
        cache.allocate(request, 16)
        cache.commit(request, 16)
        cache.take_events()
        ended.append(request)
    for request in ended:
        cache.free(request)
        cache.take_events()


def by_batch(cache: KVCacheManager, requests: Sequence[Request]) -> Callable[[list[int]], object]:
    batch = cache.decode_batch()
    for request in requests:
        cache.join(batch, request)
    return lambda token_ids: cache.step(batch, token_ids)


def by_python_batch(cache: KVCacheManager, requests: Sequence[Request]) -> Callable[[list[int]], object]:
    batch = DecodeBatch(cache._pool, cache._room, cache.groups, cache._publisher, cache.hasher)
    for request in requests:
        cache.join(batch, request)
    return lambda token_ids: cache.step(batch, token_ids)


def by_list(cache: KVCacheManager, requests: Sequence[Request]) -> Callable[[list[int]], object]:
    return lambda token_ids: cache.step(requests, token_ids)


def by_call(cache: KVCacheManager, requests: Sequence[Request]) -> Callable[[list[int]], object]:
    def step(token_ids: list[int]) -> None:
        for request, token_id in zip(requests, token_ids, strict=True):
            cache.commit(request, request.num_tokens)
            request.append(token_id)
            cache.allocate(request, 1)

    return step


def outputs(num_requests: int) -> Iterator[list[int]]:
    """A random token for each request, step after step."""
    rng = random.Random(2)
    return cycle([[rng.randrange(VOCABULARY) for _ in range(num_requests)] for _ in range(16)])


def measure(
    num_requests: int, way: Callable[..., Callable[[list[int]], object]], *, events: bool = False, **layout: Any
) -> float:
    cache, requests = running(num_requests, events=events, **layout)
    tokens = outputs(num_requests)
    step = way(cache, requests)

    def one_step() -> None:
        step(next(tokens))
        cache.take_events()

    seconds = median_s(one_step, STEPS)
    if events is False:
        cache.check()
    return seconds


def measure_changes(num_requests: int) -> tuple[float, float]:
    """One request leaves the batch between two steps, and joins it again: the seconds of each."""
    cache, requests = running(num_requests)
    batch = cache.decode_batch()
    for request in requests:
        cache.join(batch, request)
    rng = random.Random(3)
    left, joined = [], []
    for _ in range(STEPS):
        cache.step(batch, rng.choices(range(VOCABULARY), k=num_requests))
        request = rng.choice(requests)
        start = perf_counter()
        cache.leave(batch, [request])
        middle = perf_counter()
        cache.join(batch, request)
        left.append(middle - start)
        joined.append(perf_counter() - middle)
    return median(left), median(joined)


def measure_vllm(num_requests: int, groups: Sequence[LayerKind], num_prompt_tokens: int) -> float:
    num_blocks = pool_size(num_requests, num_prompt_tokens, len(groups))
    windows = [kind.window for kind in groups if isinstance(kind, SlidingWindow)]
    step = peer_vllm.decode_step(prompts(num_requests, num_prompt_tokens), num_blocks, windows)
    tokens = outputs(num_requests)
    return median_s(lambda: step(next(tokens)), STEPS)


def main() -> None:
    rows = []
    for num_requests in (1, 256, 1024, 4096):
        batch, listed, called = (measure(num_requests, way) for way in (by_batch, by_list, by_call))
        told = measure(num_requests, by_batch, events=True)
        figures = (f"{seconds * 1e6:,.0f}" for seconds in (batch, told, listed, called))
        rows.append((f"{num_requests:,}", *figures, f"{called / batch:.1f}"))
    columns: tuple[str, ...] = ("requests", "batch, us", "with events", "list, us", "calls, us", "calls / batch")
    print_table("One decode step, blocks of 16", columns, rows)
    counts = (1, 256, 1024, 4096)
    changes = [(f"{n:,}", *(f"{seconds * 1e6:,.0f}" for seconds in measure_changes(n))) for n in counts]
    print_table("One request between two steps", ("requests", "leaves, us", "joins, us"), changes)
    print_table("One decode step of 1,024 requests, by layout", ("groups", "publication", "us", "ratio"), _by_layout())
    if NativeRows is not None:
        columns = ("groups", "requests", "native", "+ events", "Python", "+ events", "vLLM", "vLLM, x")
        print(peer_vllm.WHY_NOT or f"beside vLLM {peer_vllm.RELEASE}")
        print_table("One decode step in us: native rows, rows in Python over the native pool", columns, _by_rows())
        print_table("The same where every new block evicts another", columns[:-2], _by_full_rows())


def _by_full_rows() -> list[tuple[str, ...]]:
    return [row[:-2] for row in _by_rows((1024,), is_full=True)]


def _by_rows(counts: Sequence[int] = (1, 256, 1024, 4096), *, is_full: bool = False) -> list[tuple[str, ...]]:
    """Native rows and Python's, over the native pool; and vLLM's manager."""
    rows: list[tuple[str, ...]] = []
    for name in ("1 full", "1 full, 1 window of 128", "1 full, 5 windows of 1,024"):
        num_prompt_tokens = 1200 if "window" in name else 32
        layout: dict[str, Any] = {
            "groups": LAYOUTS[name],
            "num_prompt_tokens": num_prompt_tokens,
            "is_full": is_full,
        }
        for num_requests in counts:
            ways = [(way, events) for way in (by_batch, by_python_batch) for events in (False, True)]
            seconds = [measure(num_requests, way, events=events, **layout) for way, events in ways]
            figures = [f"{each * 1e6:,.1f}" for each in seconds]
            figures += ["-", "-"]
            if not peer_vllm.WHY_NOT:
                peer = measure_vllm(num_requests, **layout)
                figures[-2:] = [f"{peer * 1e6:,.0f}", f"{peer / seconds[0]:,.0f}"]
            rows.append((name.replace("1 full, ", "1 + "), f"{num_requests:,}", *figures))
    return rows


def _by_layout() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    single = 0.0
    for name, groups in LAYOUTS.items():
        settings: tuple[Setting, ...] = ("ranked", "dense", 0) if len(groups) > 1 else ("ranked",)
        for publication in settings:
            seconds = measure(1024, by_batch, groups=groups, publication=publication, num_prompt_tokens=1200)
            single = single or seconds
            rows.append((name, str(publication), f"{seconds * 1e6:,.0f}", f"{seconds / single:.1f}"))
    return rows


if __name__ == "__main__":
    main()
