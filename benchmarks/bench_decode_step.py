"""What does one decode step of many running requests cost, kept as a batch, as a list, and call by call?

Every request gets a random token a step; one in 16 fills a block, is hashed, committed and gets a new one. Prompts are
32 to 47 tokens, so borders are spread evenly over the steps. Median over 96 steps.
"""

import random
from collections.abc import Callable, Sequence
from itertools import cycle

from medians import median_s, print_table

from kvpool import KVCacheManager, Request

VOCABULARY = 128_000
STEPS = 96


def running(num_requests: int, *, events: bool) -> tuple[KVCacheManager, list[Request]]:
    """Requests whose prompts are computed and that have room for their first output."""
    rng = random.Random(1)
    cache = KVCacheManager(num_requests * 20, events=events)
    requests = []
    for number in range(num_requests):
        request = Request(f"r{number}", [rng.randrange(VOCABULARY) for _ in range(32 + number % 16)])
        cache.allocate(request, request.num_tokens)
        cache.commit(request, request.num_tokens)
        request.append(0)
        cache.allocate(request, 1)
        requests.append(request)
    return cache, requests


def by_batch(cache: KVCacheManager, requests: Sequence[Request]) -> Callable[[list[int]], object]:
    batch = cache.decode_batch()
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


def measure(num_requests: int, way: Callable[..., Callable[[list[int]], object]], *, events: bool = False) -> float:
    cache, requests = running(num_requests, events=events)
    rng = random.Random(2)
    tokens = cycle([[rng.randrange(VOCABULARY) for _ in requests] for _ in range(16)])
    step = way(cache, requests)

    def one_step() -> None:
        step(next(tokens))
        cache.take_events()

    seconds = median_s(one_step, STEPS)
    if events is False:
        cache.check()
    return seconds


def main() -> None:
    rows = []
    for num_requests in (1, 256, 1024, 4096):
        batch, listed, called = (measure(num_requests, way) for way in (by_batch, by_list, by_call))
        told = measure(num_requests, by_batch, events=True)
        figures = (f"{seconds * 1e6:,.0f}" for seconds in (batch, told, listed, called))
        rows.append((f"{num_requests:,}", *figures, f"{called / batch:.1f}"))
    columns = ("requests", "batch, us", "with events", "list, us", "calls, us", "calls / batch")
    print_table("One decode step, blocks of 16", columns, rows)


if __name__ == "__main__":
    main()
