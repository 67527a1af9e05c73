"""What does looking up a cached prefix cost, and hashing it the first time? Medians of 200 lookups."""

import random

from medians import median_s, print_table

from kvpool import KVCacheManager, Request


def main() -> None:
    rng = random.Random(1)
    rows = []
    for num_blocks in (10, 100, 1_000, 8_192):
        tokens = [rng.randrange(128_000) for _ in range(num_blocks * 16 + 1)]
        cache = KVCacheManager(20_480, events=False)
        first = Request("first", tokens)
        cache.allocate(first, len(tokens))
        cache.commit(first, len(tokens))
        hashing_s = median_s(lambda tokens=tokens: Request("new", tokens).block_hashes(cache.hasher), 20)  # type: ignore[misc]
        request = Request("second", tokens)
        assert cache.match(request).num_tokens == num_blocks * 16
        match_s = median_s(lambda request=request: cache.match(request), 200)  # type: ignore[misc]
        per_block = (f"{seconds / num_blocks * 1e9:,.0f}" for seconds in (match_s, hashing_s))
        rows.append((f"{num_blocks:,}", f"{match_s * 1e6:,.1f}", *per_block))
    print_table("A hit of that many blocks of 16", ("blocks", "match, us", "ns a block", "hashing, ns a block"), rows)


if __name__ == "__main__":
    main()
