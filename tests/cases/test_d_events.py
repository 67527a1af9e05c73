"""Cases of group D: what listeners are told of the cache's content."""
# ruff: noqa: N802

from collections.abc import Iterable, Sequence

import pytest

from kvpool import (
    BlockHash,
    BlockStored,
    ChunkedLocal,
    Event,
    FullAttention,
    GroupId,
    KVCacheManager,
    LayerKind,
    Request,
    SlidingWindow,
)
from kvpool.core.publication import Setting
from kvpool.testing import serve


def _stored(events: Iterable[Event], group_id: GroupId) -> list[BlockStored]:
    return [event for event in events if isinstance(event, BlockStored) and event.group_id == group_id]


def _parents(events: Iterable[BlockStored]) -> dict[BlockHash, BlockHash | None]:
    """What a listener takes for the parent of each block: those of one event follow one another."""
    return {
        name: parent
        for event in events
        for name, parent in zip(event.block_hashes, (event.parent_block_hash, *event.block_hashes), strict=False)
    }


def _cache_whose_window_has_h1_and_h2(tokens: Sequence[int]) -> KVCacheManager:
    """Boundaries alone are published. The window kept h1 and h2 of three blocks, the full group lost them, but not h0.

    So who comes with more of these tokens hits nothing, and publishes h0 in the window for others like itself.
    """
    cache = KVCacheManager(18, 16, [FullAttention(), SlidingWindow(20)], publication=0)
    first, other = Request("first", tokens[:49]), Request("other", [7] * 200)
    serve(cache, first)
    cache.free(first)
    assert cache.usage().num_cached == 5
    assert cache.allocate(other, 7 * 16) is not None
    cache.free(other)
    names = first.block_hashes(cache.hasher)
    assert [cache.findable(group) for group in (0, 1)] == [{names[0]}, {names[1], names[2]}]
    cache.take_events()
    return cache


@pytest.mark.parametrize("chunk", [16, 48, 81])
def test_D05_i_the_parent_is_the_block_before_and_not_the_one_sent_before(chunk: int) -> None:
    """h1 and h2 are stored already, a request stores h0, h3 and h4: two runs, the second on top of h2."""
    tokens = list(range(81))
    cache = _cache_whose_window_has_h1_and_h2(tokens)
    request = Request("R", tokens)
    hit = cache.match(request)
    assert (hit.num_tokens, hit.num_shared_tokens) == (0, 16)
    for start in range(0, 81, chunk):
        assert cache.allocate(request, min(chunk, 81 - start), hit if start == 0 else None) is not None
        cache.commit(request, min(start + chunk, 81))
    h0, h1, h2, h3, h4 = request.block_hashes(cache.hasher)

    events = cache.take_events()
    stored = _stored(events, 1)
    assert _parents(stored) == {h0: None, h3: h2, h4: h3}
    assert [name for event in stored for name in event.block_hashes] == [h0, h3, h4]
    if chunk == 81:
        assert stored == [
            BlockStored((h0,), None, tuple(range(16)), 16, 1),
            BlockStored((h3, h4), h2, tuple(range(48, 80)), 16, 1),
        ]
    assert _parents(_stored(events, 0)) == {h0: None, h1: h0, h2: h1, h3: h2, h4: h3}
    assert cache.findable(1) == {h0, h1, h2, h3, h4}
    cache.check()


def test_D05_ii_events_have_the_hashes_and_the_size_of_their_group() -> None:
    """Fine blocks of 64, a group with blocks of 256: of 512 tokens the coarse hashes are f3 and f7."""
    cache = KVCacheManager(20, 64, [FullAttention(block_size=256), SlidingWindow(512)])
    request = Request("R", range(513))
    assert cache.allocate(request, 513) is not None
    cache.commit(request, 256)
    cache.commit(request, 512)
    f = tuple(request.block_hashes(cache.hasher))
    assert len(set(f)) == 8
    events = cache.take_events()
    assert _stored(events, 0) == [
        BlockStored((f[3],), None, tuple(range(256)), 256, 0),
        BlockStored((f[7],), f[3], tuple(range(256, 512)), 256, 0),
    ]
    assert _stored(events, 1) == [
        BlockStored(f[:4], None, tuple(range(256)), 64, 1),
        BlockStored(f[4:], f[3], tuple(range(256, 512)), 64, 1),
    ]
    assert len(events) == 4
    assert [cache.findable(group) for group in (0, 1)] == [{f[3], f[7]}, set(f)]


def test_D05_ii_the_same_in_one_step() -> None:
    cache = KVCacheManager(20, 64, [FullAttention(block_size=256), FullAttention(block_size=64)])
    request = Request("R", range(513))
    assert cache.allocate(request, 513) is not None
    cache.commit(request, 513)
    f = tuple(request.block_hashes(cache.hasher))
    tokens = tuple(range(512))
    assert cache.take_events() == [
        BlockStored((f[3], f[7]), None, tokens, 256, 0),
        BlockStored(f, None, tokens, 64, 1),
    ]


@pytest.mark.parametrize("publication", ["ranked", "every", "dense", 0, 24, 96])
@pytest.mark.parametrize(
    "kinds",
    [
        [FullAttention()],
        [SlidingWindow(9, num_sinks=3)],
        [FullAttention(), SlidingWindow(9), SlidingWindow(5)],
        [FullAttention(block_size=12), SlidingWindow(17, num_sinks=9, block_size=8), ChunkedLocal(12)],
    ],
    ids=["full", "window with sinks", "full and windows", "three block sizes"],
)
@pytest.mark.parametrize("chunk", [1, 7, 40, 120])
def test_D05_every_event_stands_for_itself(kinds: Sequence[LayerKind], publication: Setting, chunk: int) -> None:
    """Whatever is skipped, an event's parent, tokens and size are those of its blocks, by the chain of the request."""
    cache = KVCacheManager(400, 4, kinds, publication=publication)
    for name, tokens in (("one", range(120)), ("two", [*range(60), *range(200, 290)]), ("three", range(130))):
        request = Request(name, tokens)
        hit = cache.match(request)
        for start in range(hit.num_tokens, request.num_tokens, chunk):
            count = min(chunk, request.num_tokens - start)
            assert cache.allocate(request, count, hit if start == hit.num_tokens else None) is not None
            cache.commit(request, start + count)
        cache.free(request)
        chain, unit = request.block_hashes(cache.hasher), cache.groups.unit
        ends: dict[BlockHash | None, int] = {None: 0}
        ends.update((block, (at + 1) * unit) for at, block in enumerate(chain))
        events = cache.take_events()
        assert all(isinstance(event, BlockStored) for event in events)
        for group in cache.groups.all:
            for event in _stored(events, group.group_id):
                assert event.block_size == group.block_size
                assert event.token_ids == tuple(
                    request.token_ids[ends[event.parent_block_hash] :][: len(event.token_ids)]
                )
                first = ends[event.parent_block_hash] // group.block_size
                stop = first + len(event.block_hashes)
                assert event.block_hashes == tuple(group.names(chain, first, stop))
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                assert set(event.block_hashes) <= cache.findable(group.group_id)
