"""What is counted, when, and what the gauges mean."""

import pytest

from kvpool import CacheStats, KVCacheManager, Request, Usage
from kvpool.testing import serve


def test_nothing_queried_is_a_hit_rate_of_zero() -> None:
    assert CacheStats().hit_rate == 0.0


def test_an_admission_counts_all_its_tokens_once() -> None:
    cache = KVCacheManager(30, 4)
    first = Request("a", range(10))
    assert serve(cache, first).num_tokens == 0
    assert serve(cache, Request("b", range(10))).num_tokens == 8
    cache.allocate(first, 5)
    assert cache.stats == CacheStats(num_requests=2, num_queried_tokens=20, num_hit_tokens=8)
    assert cache.stats.hit_rate == 0.4


def test_a_lookup_or_a_failed_admission_counts_nothing() -> None:
    cache = KVCacheManager(3, 4)
    request = Request("a", range(10))
    for _ in range(3):
        assert cache.allocate(request, 10, cache.match(request)) is None
    assert cache.stats == CacheStats()


def test_resumed_requests_are_counted_apart() -> None:
    """1,024 prompt tokens, admitted at once, preempted after 500 more, and admitted again with nothing evicted."""
    cache = KVCacheManager(200, 16)
    request = Request("r", range(1_024))
    serve(cache, request)
    for _ in range(500):
        request.append(7)
        cache.allocate(request, 1)
        cache.commit(request, request.num_tokens)
    cache.free(request)
    request.num_preemptions += 1
    assert serve(cache, request).num_tokens == 1_520
    assert cache.stats == CacheStats(1, 1_024, 0, 1, 1_524, 1_520)
    assert cache.stats.hit_rate == 0.0


def test_requests_that_do_not_read_are_no_queries() -> None:
    cache = KVCacheManager(30, 4)
    serve(cache, Request("a", range(10), reads_cache=False))
    assert cache.stats == CacheStats()


def test_gauges_of_an_empty_a_busy_and_an_idle_cache() -> None:
    cache = KVCacheManager(11, 4)
    assert cache.usage() == Usage(10, 0, 0, 10, 0, 0)
    assert (cache.usage().held, cache.usage().cached, cache.usage().free, cache.usage().filled) == (0, 0, 1, 0)
    first, second = Request("a", range(10)), Request("b", range(9))
    serve(cache, first)
    serve(cache, second)
    assert cache.usage() == Usage(10, 4, 0, 6, 11, 16)
    assert (cache.usage().held, cache.usage().free, cache.usage().filled) == (0.4, 0.6, 11 / 16)
    cache.free(first)
    cache.free(second)
    assert cache.usage() == Usage(10, 0, 2, 8, 0, 0)
    assert cache.usage().cached == 0.2


def test_evictions_count_blocks() -> None:
    cache = KVCacheManager(4, 4)
    for number in range(3):
        request = Request(str(number), [number] * 12)
        serve(cache, request)
        cache.free(request)
    assert cache.num_evictions == 6


@pytest.mark.parametrize("num_computed", [0, 1, 7, 8, 12])
def test_filled_slots_are_the_computed_ones(num_computed: int) -> None:
    cache = KVCacheManager(11, 4)
    request = Request("a", range(12))
    cache.allocate(request, 12)
    cache.commit(request, num_computed)
    assert cache.usage().num_filled_slots == num_computed
