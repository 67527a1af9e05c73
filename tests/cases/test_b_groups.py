"""Cases of group B that are about groups of layers: how long a prefix must be, and which blocks of it are needed."""
# ruff: noqa: N802

import itertools
import math
import random
from collections.abc import Collection, Sequence

import pytest

from kvpool import BlockPool, ChunkedLocal, FullAttention, HitEnd, KVCacheManager, LayerKind, Request, SlidingWindow
from kvpool.core.groups import Groups
from kvpool.core.lookup import longest_hit
from kvpool.plan.grouping import group_layers
from kvpool.plan.spec import Attention
from kvpool.testing import serve

MIXED = [FullAttention(block_size=size) for size in (128, 4096, 32, 2, 8)]


def _second_hit(cache: KVCacheManager, num_tokens: int) -> int:
    """What a prompt hits when it is sent again."""
    first, second = (Request(name, range(num_tokens)) for name in ("warm", "again"))
    serve(cache, first)
    cache.free(first)
    return cache.match(second).num_tokens


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "num_hit"),
    [
        (1024, 1024, 0), (1024, 1025, 1024), (1024, 2047, 1024), (1024, 4096, 3072),
        (2096, 2000, 0), (2096, 2097, 2096), (2096, 4193, 4192),
    ],
)  # fmt: skip
def test_B06_a_prompt_sent_again_hits_all_full_blocks_before_its_last_token(
    block_size: int, num_tokens: int, num_hit: int
) -> None:
    cache = KVCacheManager(10, block_size)
    assert _second_hit(cache, num_tokens) == num_hit
    assert (cache.alignment, cache.smallest_hit) == (block_size, block_size)


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(2048, 0), (4096, 0), (4097, 4096)])
def test_B06_groups_meet_at_the_common_multiple_of_their_block_sizes(num_tokens: int, num_hit: int) -> None:
    cache = KVCacheManager(10_000, groups=MIXED)
    assert _second_hit(cache, num_tokens) == num_hit
    assert (cache.alignment, cache.smallest_hit) == (4096, 4096)


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(1537, 0), (3073, 1536)])
def test_B06_a_draft_model_drops_the_last_block_of_the_hit(num_tokens: int, num_hit: int) -> None:
    cache = KVCacheManager(10, 1536, drop_last_block=True)
    assert _second_hit(cache, num_tokens) == num_hit
    assert (cache.alignment, cache.smallest_hit) == (1536, 3072)
    assert cache.match(Request("why", range(num_tokens))).reason is HitEnd.DROPPED


def test_B06_a_prompt_three_times_hits_66_percent_in_all() -> None:
    """One warm-up and two more of 16,007 tokens, in blocks of 256."""
    cache = KVCacheManager(200, 256)
    hits = [serve(cache, Request(str(number), range(16_007))).num_tokens for number in range(3)]
    assert hits == [0, 15_872, 15_872]
    stats = cache.stats
    assert (stats.num_requests, stats.num_hit_tokens, stats.num_queried_tokens) == (3, 31_744, 48_021)
    assert f"{stats.hit_rate:.1%}" == "66.1%"


def test_B06_no_hit_is_shorter_than_the_smallest_and_that_one_hits() -> None:
    """Of any layout: a shared prefix of `smallest_hit` tokens gives a hit, one token less gives none."""
    layouts: Sequence[Sequence[LayerKind]] = ([FullAttention()], MIXED, _windows())
    for kinds, drops in itertools.product(layouts, (False, True)):
        cache = KVCacheManager(20_000, groups=kinds, drop_last_block=drops)
        smallest = cache.smallest_hit
        assert smallest == cache.alignment * (2 if drops else 1)
        serve(cache, Request("warm", range(smallest + 1)))
        enough = Request("enough", [*range(smallest), 9, 9])
        assert cache.match(enough).num_tokens == cache.alignment
        short = Request("short", [*range(smallest - 1), 9, 9])
        assert cache.match(short).num_tokens == 0


def _windows() -> list[LayerKind]:
    return [FullAttention(block_size=24), SlidingWindow(40, block_size=16), ChunkedLocal(64, block_size=32)]


def test_B06_a_prompt_sent_again_hits_by_the_formula(rng: random.Random) -> None:
    """floor((n - 1) / align) * align, less one align where the last block is dropped: whatever layers there are."""
    for _ in range(200):
        sizes = [rng.choice((1, 2, 3, 4, 6, 8)) for _ in range(rng.randint(1, 4))]
        kinds: list[LayerKind] = [rng.choice(_kinds_with_blocks_of(size)) for size in sizes]
        drops, num_tokens = rng.random() < 0.5, rng.randint(1, 100)
        cache = KVCacheManager(2_000, groups=kinds, drop_last_block=drops)
        align = math.lcm(*sizes)
        expected = max((num_tokens - 1) // align * align - (align if drops else 0), 0)
        assert _second_hit(cache, num_tokens) == expected, (kinds, drops, num_tokens)


def _kinds_with_blocks_of(size: int) -> list[LayerKind]:
    return [
        FullAttention(block_size=size),
        SlidingWindow(5, block_size=size),
        SlidingWindow(11, num_sinks=3, block_size=size),
        ChunkedLocal(4 * size, block_size=size),
    ]


def _cache_that_has_blocks_from(first: int, *, drops: bool) -> tuple[KVCacheManager, list[int]]:
    """A prompt of 9 tokens whose blocks before this one slid out of its window and were taken by another request.

    Answers the ids of its four full blocks too; the null block where one is gone.
    """
    cache = KVCacheManager(10, 2, [SlidingWindow(4)], publication="every", drop_last_block=drops)
    warm, other = Request("warm", range(9)), Request("other", [7] * 18)
    num_computed = 4 + 2 * first
    table = cache.allocate(warm, num_computed)
    assert table is not None
    cache.commit(warm, num_computed)
    assert cache.allocate(warm, 9 - num_computed) is table
    assert cache.allocate(other, 2 * cache.num_free_blocks) is not None
    cache.free(other)
    cache.commit(warm, 9)
    blocks = table.block_ids[0][:4]
    cache.free(warm)
    assert cache.findable() == set(warm.block_hashes(cache.hasher)[first:])
    return cache, blocks


@pytest.mark.parametrize(
    ("first", "drops", "num_hit"),
    [(2, False, 8), (2, True, 0), (1, False, 8), (1, True, 6)],
    ids=["i", "i drop-last", "ii", "ii drop-last"],
)
def test_B07_what_is_left_after_the_drop_fills_the_window(first: int, drops: bool, num_hit: int) -> None:
    """Window 4 in blocks of 2: a hit needs the last two blocks, or the last three where one is dropped."""
    cache, (_, one, two, three) = _cache_that_has_blocks_from(first, drops=drops)
    request = Request("again", range(9))
    hit = cache.match(request)
    assert hit.num_tokens == num_hit
    assert hit.block_ids == ({8: [0, 0, two, three], 6: [0, one, two], 0: []}[num_hit],)
    assert (one == 0) is (first == 2)
    table = cache.allocate(request, 9 - num_hit, hit)
    assert table is not None
    assert table.block_ids[0][: num_hit // 2] == hit.block_ids[0]
    cache.check()


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("window", range(1, 12))
def test_B07_a_hit_has_all_that_its_next_token_looks_at(window: int, drops: bool) -> None:
    """Every choice of cached blocks of four, each position asked: so a shorter run counts only at the very start."""
    names = [bytes([at]) * 32 for at in range(4)]
    groups = Groups([SlidingWindow(window)], 2, drops_last_block=drops, max_in_flight_tokens=9)

    def is_whole(cached: Collection[int], num_tokens: int) -> bool:
        return {position // 2 for position in range(max(num_tokens - window + 1, 0), num_tokens)} <= set(cached)

    for cached in itertools.chain.from_iterable(itertools.combinations(range(4), count) for count in range(5)):
        pool = BlockPool(5)
        blocks = pool.allocate(4)
        assert blocks is not None
        pool.commit([blocks[at] for at in cached], [names[at] for at in cached])
        found = longest_hit(pool, groups, names, 8)
        dropped = 2 if drops else 0
        # With a drop, the block that is dropped was found too, and what comes before it is whole.
        could_be = [n for n in range(0, 9 - dropped, 2) if is_whole(cached, n) and (not drops or n // 2 in cached)]
        assert found.num_tokens == max(could_be, default=0)
        assert is_whole(cached, found.num_tokens)
        held = [block for block in found.block_ids[0] if block]
        assert held == blocks[found.num_tokens // 2 - len(held) : found.num_tokens // 2]


def _chunked_layers() -> Sequence[LayerKind]:
    """48 layers: 12 full and 36 that look at their chunk of 8,192 tokens."""
    full = Attention(num_kv_heads=8, head_dim=128)
    local = Attention(num_kv_heads=8, head_dim=128, kind=ChunkedLocal(8_192))
    layout = group_layers([local, local, local, full] * 12)
    assert [len(group.layers) for group in layout.groups] == [12] * 4
    assert str(layout.waste) == "no padding layers"
    return layout.kinds


def test_B12_local_layers_need_nothing_at_the_border_of_a_chunk() -> None:
    """The full group has 20,000 tokens; the local ones nothing, then four blocks, then all of the last chunk.

    Only boundaries are published in local layers. A prompt of one block has none; what it says later is in full layers.
    """
    kinds = _chunked_layers()
    cache = KVCacheManager(20_000, 16, kinds, publication=0, max_in_flight_tokens=20_001)
    full = next(at for at, kind in enumerate(kinds) if isinstance(kind, FullAttention))
    local = [at for at in range(4) if at != full]
    tokens = list(range(20_001))

    talker = Request("talker", tokens[:16])
    assert cache.allocate(talker, 16) is not None
    for token_id in tokens[16:]:
        talker.append(token_id)
    assert cache.allocate(talker, 20_001) is not None
    cache.commit(talker, 20_001)
    assert [len(cache.findable(group)) for group in (full, *local)] == [1_250, 0, 0, 0]
    prompt = Request("prompt", tokens)
    hit = cache.match(prompt)
    assert hit.num_tokens == 16_384
    assert hit.reason is HitEnd.LAGGING_GROUP
    assert [hit.block_ids[group] for group in local] == [[0] * 1_024] * 3
    full_blocks = [block for block in hit.block_ids[full] if block]
    assert len(full_blocks) == len(set(full_blocks)) == 1_024

    short = Request("short", tokens[:16_449])
    assert serve(cache, short).num_tokens == 16_384
    names = set(short.block_hashes(cache.hasher)[1_024:1_028])
    assert [cache.findable(group) for group in local] == [names] * 3
    hit = cache.match(prompt)
    assert hit.num_tokens == 16_448
    blocks = [hit.block_ids[group] for group in local]
    assert [ids[:1_024] for ids in blocks] == [[0] * 1_024] * 3
    real = [block for ids in blocks for block in ids[1_024:]]
    assert len(set(real) - {0}) == len(real) == 3 * 4
    assert len(hit.block_ids[full]) == 1_028

    assert serve(cache, Request("long", tokens)).num_tokens == 16_448
    hit = cache.match(prompt)
    assert hit.num_tokens == 20_000
    assert hit.reason is HitEnd.PARTIAL_BLOCK
    assert [hit.block_ids[group].count(0) for group in (full, *local)] == [0, 1_024, 1_024, 1_024]
    assert [len(ids) for ids in hit.block_ids] == [1_250] * 4
    cache.check()


@pytest.mark.parametrize("num_tokens", range(0, 20_001, 1_024 - 16))
def test_B12_a_local_layer_needs_the_blocks_since_its_chunk_began(num_tokens: int) -> None:
    """A local group alone: without the first of them a hit falls to the chunk's start."""
    names = [number.to_bytes(32, "big") for number in range(num_tokens // 16)]
    groups = Groups([ChunkedLocal(8_192)], 16, max_in_flight_tokens=8_192)
    begin = num_tokens // 8_192 * 512
    pool = BlockPool(1_500)
    blocks = pool.allocate(len(names) - begin)
    assert blocks is not None
    pool.commit(blocks[1:], names[begin + 1 :])
    assert longest_hit(pool, groups, names, num_tokens).num_tokens == begin * 16
    pool.commit(blocks[:1], names[begin : begin + 1])
    assert longest_hit(pool, groups, names, num_tokens).num_tokens == num_tokens
