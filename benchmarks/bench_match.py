"""What does a lookup cost, as a function of its length?

A prompt of so many blocks is cached and asked for by a request whose names are known already. In one group of full
attention; in six groups, five of them windows of 1,024 tokens; and the worst case: the windows hold one block less than
a hit needs, so that all blocks of all kinds are looked through and nothing is found. Beside: hashing the prompt, which
happens once, before the first lookup. Medians of 60.
"""

from typing import TypeAlias

from medians import median_s, print_table

from kvpool import FullAttention, KVCacheManager, LayerKind, Request, SlidingWindow
from kvpool.testing import serve

Layout: TypeAlias = tuple[LayerKind, ...]
SIZES = (100, 1_000, 2_048, 4_096, 8_192)
ONE: Layout = (FullAttention(),)
SIX: Layout = (FullAttention(), *[SlidingWindow(1024)] * 5)
THREE: Layout = (FullAttention(), SlidingWindow(512), SlidingWindow(1024))


def lookup_s(num_blocks: int, groups: Layout, *, misses: bool = False) -> float:
    """Seconds of a lookup. One that misses shares a block less than the windows kept their tails for."""
    cache = KVCacheManager(
        (num_blocks + 2) * len(groups), groups=groups, publication=0 if misses else "ranked", max_in_flight_tokens=2**20
    )
    tokens = [*range(num_blocks * 16 + 1)]
    serve(cache, Request("first", tokens))
    request = Request("second", tokens[:-32] if misses else tokens)
    found = cache.match(request)
    assert found.num_tokens == (0 if misses else num_blocks * 16)
    return median_s(lambda: cache.match(request), 60)


def hashing_s(num_blocks: int) -> float:
    hasher, tokens = KVCacheManager(2).hasher, [*range(num_blocks * 16)]
    return median_s(lambda: hasher.names(tokens), 20)


def main() -> None:
    rows = []
    for num_blocks in SIZES:
        times = [lookup_s(num_blocks, ONE), lookup_s(num_blocks, SIX), lookup_s(num_blocks, THREE, misses=True)]
        cells = [cell for s in times for cell in (f"{s * 1e6:,.0f}", f"{s / num_blocks * 1e9:,.0f}")]
        rows.append((f"{num_blocks:,}", *cells, f"{hashing_s(num_blocks) / num_blocks * 1e9:,.0f}"))
    ways = ("1 group", "6 groups", "worst of 3")
    columns = (f"{way}\n{unit}" for way in ways for unit in ("us", "ns/block"))
    print_table("A lookup of that many blocks of 16", ("blocks", *columns, "hashing\nns/block"), rows)


if __name__ == "__main__":
    main()
