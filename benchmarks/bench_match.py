"""What does looking up a cached prefix cost, and hashing it the first time? Medians of 200 lookups."""

import random

from medians import median_s, print_table

from kvpool import KVCacheManager, Request
from kvpool.testing import serve


def measure(num_blocks: int) -> tuple[float, float]:
    """Seconds of a lookup that hits that many blocks, and of hashing them for the first time."""
    rng = random.Random(1)
    tokens = [rng.randrange(128_000) for _ in range(num_blocks * 16 + 1)]
    cache = KVCacheManager(20_480, events=False)
    serve(cache, Request("first", tokens))
    request = Request("second", tokens)
    assert cache.match(request).num_tokens == num_blocks * 16
    hashing_s = median_s(lambda: cache.hasher.names(tokens), 20)
    return median_s(lambda: cache.match(request), 200), hashing_s


def main() -> None:
    rows = []
    for num_blocks in (10, 100, 1_000, 8_192):
        match_s, hashing_s = measure(num_blocks)
        per_block = (f"{seconds / num_blocks * 1e9:,.0f}" for seconds in (match_s, hashing_s))
        rows.append((f"{num_blocks:,}", f"{match_s * 1e6:,.1f}", *per_block))
    print_table("A hit of that many blocks of 16", ("blocks", "match, us", "ns a block", "hashing, ns a block"), rows)


if __name__ == "__main__":
    main()
