"""Cases of group F: tenants do not see each other's prefixes."""
# ruff: noqa: N802

import itertools

import pytest

from kvpool import BlockStored, KVCacheManager, Request, UsageError
from kvpool.testing import serve

PROMPT = list(range(33))


def test_F01_tenants_and_salts_keep_prefixes_apart() -> None:
    """`tenant` says who was authenticated; the `cache_salt` that a client chooses can only narrow that."""
    cache = KVCacheManager(60, 16)
    requests = [
        Request("1", PROMPT, tenant="t1", cache_salt="s1"),
        Request("2", PROMPT, tenant="t2", cache_salt="s2"),
        Request("3", PROMPT, tenant="t1", cache_salt="s1"),
        Request("4", PROMPT, tenant="t2", cache_salt="s1"),
        Request("5", PROMPT),
        Request("6", PROMPT[:13], tenant="t1", cache_salt="s1"),
        Request("7", PROMPT[:13], tenant="t1", cache_salt="s1"),
    ]
    assert [serve(cache, request).num_tokens for request in requests] == [0, 0, 32, 0, 0, 0, 0]
    for word in ("cache_salt", "tenant"):
        with pytest.raises(UsageError, match=f"empty {word}"):
            Request("8", PROMPT, **{word: ""})  # type: ignore[arg-type]
    cache.check()


def test_F01_the_same_text_as_tenant_and_as_salt_is_not_the_same() -> None:
    cache = KVCacheManager(60, 16)
    keys = [("x", None), (None, "x"), ("x", "x"), (None, None)]
    requests = [Request(f"{tenant}/{salt}", PROMPT, tenant=tenant, cache_salt=salt) for tenant, salt in keys]
    assert [serve(cache, request).num_tokens for request in requests] == [0, 0, 0, 0]


def test_F01_the_same_salt_hits_and_another_does_not() -> None:
    """Paired: the second half alone would also pass with caching off."""
    cache = KVCacheManager(60, 16)
    serve(cache, Request("first", PROMPT, cache_salt="s"))
    assert cache.match(Request("same", PROMPT, cache_salt="s")).num_tokens == 32
    assert cache.match(Request("other", PROMPT, cache_salt="S")).num_tokens == 0


def test_F01_a_new_salt_each_request_never_hits() -> None:
    cache = KVCacheManager(60, 16)
    for number in range(10):
        serve(cache, Request(str(number), PROMPT, cache_salt=f"random-{number}"))
    assert cache.stats.num_queried_tokens == 330
    assert cache.stats.hit_rate == 0.0


def test_F01_salted_names_differ_in_every_block_and_so_do_events() -> None:
    cache = KVCacheManager(60, 16)
    for salt in (None, "s1", "s2"):
        serve(cache, Request(str(salt), PROMPT, cache_salt=salt))
    events = cache.take_events()
    stored = [set(event.block_hashes) for event in events if isinstance(event, BlockStored)]
    assert [len(names) for names in stored] == [2, 2, 2]
    assert not any(one & other for one, other in itertools.combinations(stored, 2))
