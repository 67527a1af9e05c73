"""What each kind of layer keeps: by hand-made tables, and by a cache that is watched while it serves one request."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import (
    NULL_BLOCK,
    ChunkedLocal,
    ConfigError,
    CrossAttention,
    FullAttention,
    KVCacheManager,
    LayerKind,
    Request,
    SlidingWindow,
    StateSpace,
)
from kvpool.core.publication import DEFAULT_PUBLICATION, Setting
from kvpool.plan.kinds import cdiv

# -- which tokens are live


@pytest.mark.parametrize(
    ("kind", "lengths", "first_live"),
    [
        (FullAttention(), [0, 1, 100], [0, 0, 0]),
        (CrossAttention(), [0, 1, 100], [0, 0, 0]),
        (SlidingWindow(1), [0, 1, 2, 100], [0, 1, 2, 100]),
        (SlidingWindow(4), [0, 1, 2, 3, 4, 5, 8, 100], [0, 0, 0, 0, 1, 2, 5, 97]),
        (SlidingWindow(4, num_sinks=2), [0, 3, 4, 5, 100], [0, 0, 1, 2, 97]),
        (ChunkedLocal(8), [0, 1, 7, 8, 9, 15, 16, 17], [0, 0, 0, 8, 8, 8, 16, 16]),
        (ChunkedLocal(1), [0, 1, 2], [0, 1, 2]),
        (StateSpace(), [0, 1, 2, 100], [0, 0, 1, 99]),
    ],
    ids=str,
)
def test_the_first_token_that_is_looked_at(kind: LayerKind, lengths: list[int], first_live: list[int]) -> None:
    assert [kind.first_live(n) for n in lengths] == first_live


@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_a_window_is_what_the_next_token_looks_at_but_for_itself(window: int) -> None:
    for n in range(3 * window):
        looked_at = [k for k in range(n) if k > n - window]
        assert list(range(SlidingWindow(window).first_live(n), n)) == looked_at


@pytest.mark.parametrize("chunk", [1, 4, 12])
def test_a_chunk_is_what_the_next_token_looks_at_but_for_itself(chunk: int) -> None:
    for n in range(3 * chunk):
        looked_at = [k for k in range(n) if k // chunk == n // chunk]
        assert list(range(ChunkedLocal(chunk).first_live(n), n)) == looked_at


# -- what cannot work


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(0), "window is 0: .* a number from 1 on"),
        (lambda: SlidingWindow(-5), "window is -5: "),
        (lambda: SlidingWindow(4, num_sinks=-1), "num_sinks is -1: 0 or more"),
        (lambda: ChunkedLocal(0), "chunk_size is 0: .* a number from 1 on"),
        (lambda: ChunkedLocal(-8), "chunk_size is -8: "),
        (lambda: StateSpace(checkpoints=-16), "checkpoints is -16: an interval of 0 or more tokens"),
        (lambda: StateSpace(checkpoints="all"), "checkpoints is 'all': \"none\", an interval in tokens, or None"),
        (lambda: StateSpace(max_checkpoints=-1), "max_checkpoints is -1: 0 or more"),
        (lambda: StateSpace(num_scratch_blocks=-1), "num_scratch_blocks is -1: 0 or more"),
    ],
)
def test_what_is_no_layer_is_refused(make: Callable[[], LayerKind], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("chunk", "block_size", "nearest"), [(8_192, 24, 16), (8, 16, 8), (100, 16, 10), (7, 5, 1), (12, 8, 6)]
)
def test_a_chunk_that_ends_inside_a_block_is_refused_with_a_block_size_that_works(
    chunk: int, block_size: int, nearest: int
) -> None:
    kind = ChunkedLocal(chunk)
    with pytest.raises(
        ConfigError,
        match=rf"chunk_size {chunk} is no multiple of the block size {block_size}: {nearest} is the largest",
    ):
        kind.validate(block_size)
    kind.validate(nearest)


@pytest.mark.parametrize(
    "kind", [FullAttention(), SlidingWindow(5), StateSpace(), CrossAttention(), ChunkedLocal(32)], ids=str
)
def test_any_other_block_size_will_do(kind: LayerKind) -> None:
    for block_size in (1, 4, 16, 32):
        kind.validate(block_size)


# -- how much is held


@pytest.mark.parametrize(
    ("kind", "num_tokens", "in_flight", "most"),
    [
        (FullAttention(), 33, 1, 3),
        (CrossAttention(), 1_500, 1, 94),
        (SlidingWindow(1_024), 1, 8_192, 1),
        (SlidingWindow(1_024), 100_000, 1, 65),
        (SlidingWindow(1_024), 100_000, 8_192, 577),
        (SlidingWindow(1_024, num_sinks=17), 100_000, 1, 67),
        (SlidingWindow(1_024), 1_000, 8_192, 63),
        (SlidingWindow(1), 100_000, 1, 2),
        (ChunkedLocal(8_192), 100_000, 1, 512),
        (ChunkedLocal(8_192), 100_000, 8_192, 1_024),
        (ChunkedLocal(8_192), 100, 8_192, 7),
        (StateSpace(), 16, 1, 1),
        (StateSpace(), 100_000, 8_192, 2),
    ],
    ids=str,
)
def test_the_most_blocks_of_16_that_are_held(kind: LayerKind, num_tokens: int, in_flight: int, most: int) -> None:
    assert kind.max_live_blocks(num_tokens, 16, in_flight) == most


def most_held(
    kind: LayerKind,
    block_size: int,
    num_prompt_tokens: int,
    chunk: int,
    num_outputs: int,
    publication: Setting = DEFAULT_PUBLICATION,
) -> int:
    """The most blocks that a request holds in its table while a cache serves it: its prompt in chunks, then outputs."""
    num_blocks = 4 + 2 * (num_prompt_tokens + num_outputs)
    cache = KVCacheManager(
        num_blocks, block_size, [kind], publication=publication, max_in_flight_tokens=chunk, events=False
    )
    request = Request("r", range(num_prompt_tokens))
    most = 0
    for stop in [*range(chunk, num_prompt_tokens, chunk), *range(num_prompt_tokens, num_prompt_tokens + num_outputs)]:
        if stop > num_prompt_tokens:
            request.append(stop)
        table = cache.table(request)
        table = cache.allocate(request, stop - (table.num_computed if table else 0))
        assert table is not None
        most = max(most, cache.num_usable_blocks - cache.num_free_blocks)
        assert sum(map(bool, table.block_ids[0])) == cache.num_usable_blocks - cache.num_free_blocks
        cache.commit(request, stop)
    cache.check()
    assert most <= cache.max_blocks(request.num_tokens), "invariant 12"
    return most


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 120))
def test_a_window_never_holds_more_than_itself_and_a_chunk(window: int, chunk: int, block: int, length: int) -> None:
    most = most_held(SlidingWindow(window), block, length, chunk, num_outputs=10)
    assert most <= cdiv(min(window - 1 + chunk, length + 9), block) + 1


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(0, 20), st.integers(1, 30), st.integers(1, 9), st.integers(1, 120))
def test_sinks_are_held_beside_the_window(window: int, sinks: int, chunk: int, block: int, length: int) -> None:
    most = most_held(SlidingWindow(window, num_sinks=sinks), block, length, chunk, num_outputs=10)
    assert most <= cdiv(window - 1 + chunk, block) + 1 + cdiv(sinks, block)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 9), st.integers(1, 120))
def test_chunked_layers_never_hold_more_than_a_chunk_and_what_is_in_flight(
    blocks_a_chunk: int, chunk: int, block: int, length: int
) -> None:
    kind = ChunkedLocal(blocks_a_chunk * block)
    assert most_held(kind, block, length, chunk, num_outputs=10) <= cdiv(kind.chunk_size - 1 + chunk, block)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.integers(1, 9),
    st.sampled_from([StateSpace(), StateSpace(0), StateSpace("none"), StateSpace(max_checkpoints=3)]),
    st.sampled_from(["ranked", "every", "dense", 0]),
)
def test_a_state_is_held_twice_at_most(steps: list[int], block: int, kind: StateSpace, publication: Setting) -> None:
    """Steps of any size in any order, one token or many; the tokens that follow decode in a batch."""
    cache = KVCacheManager(100, block, [kind], publication=publication, max_in_flight_tokens=20)
    request = Request("r", range(sum(steps)))
    for count in steps:
        table = cache.allocate(request, count)
        assert table is not None
        cache.commit(request, table.num_computed + count)
        assert cache.num_held_blocks(request) <= cache.max_blocks(table.num_computed) <= 2
    request.append(0)
    batch = cache.decode_batch()
    assert cache.allocate(request, 1) is not None
    cache.join(batch, request)
    for _ in range(3 * block):
        assert cache.step(batch, [0]).unserved == []
        assert cache.num_held_blocks(request) <= 2
    cache.check()


@pytest.mark.parametrize("publication", ["ranked", 0])
@pytest.mark.parametrize(
    "kind", [FullAttention(), SlidingWindow(7), SlidingWindow(7, num_sinks=5), ChunkedLocal(8), StateSpace()], ids=str
)
def test_drafted_tokens_are_in_flight_like_any_others(kind: LayerKind, publication: Setting) -> None:
    """One token and nine drafts a step, of which three come true: ten in flight.

    A state needs a block at every border among the drafts, any of which may turn out to be the last that comes true:
    these come on top of what a request holds otherwise.
    """
    cache = KVCacheManager(60, 4, [kind], publication=publication, max_in_flight_tokens=10)
    request = Request("r", range(40))
    for stop in range(3, 40, 3):
        table = cache.table(request)
        first = table.num_computed + 1 if table is not None else 3
        num_ahead = 9 if table is not None else 0
        assert cache.allocate(request, 3 if table is None else 1, num_lookahead_tokens=num_ahead) is not None
        cache.commit(request, stop)
        num_drafted = cdiv(first + num_ahead, 4) - cdiv(first, 4) if isinstance(kind, StateSpace) else 0
        assert cache.num_held_blocks(request) <= cache.max_blocks(first + num_ahead) + num_drafted


@pytest.mark.parametrize(("window", "block"), [(1, 16), (2, 16), (128, 16), (1_024, 16), (1_000, 24), (7, 1)])
def test_a_decode_at_length_100_000_holds_the_window_alone(window: int, block: int) -> None:
    cache = KVCacheManager(20_000, block, [SlidingWindow(window)], max_in_flight_tokens=8_192, events=False)
    request = Request("r", [7] * 100_000)
    table = cache.allocate(request, 1)
    assert table is not None
    cache.commit(request, 1)
    while table.num_computed < request.num_tokens:
        stop = min(table.num_computed + 8_192, request.num_tokens)
        assert cache.allocate(request, stop - table.num_computed) is table
        cache.commit(request, stop)
    batch = cache.decode_batch()
    cache.join(batch, request)
    limit = cdiv(window - 1, block) + 1
    for _ in range(3 * block):
        cache.step(batch, [7])
        assert cache.num_usable_blocks - cache.num_free_blocks <= limit
    assert cache.max_blocks(100_000) <= cdiv(window - 1 + 8_192, block) + 1


@pytest.mark.parametrize("stop", [7, 8, 9, 15, 16, 17, 24])
def test_the_live_blocks_of_every_kind_at_one_length(stop: int) -> None:
    """Blocks of 4, prompt computed in steps of 1: what a table shows when the next token has its room."""
    kinds: list[LayerKind] = [
        FullAttention(),
        SlidingWindow(6),
        SlidingWindow(6, num_sinks=5),
        ChunkedLocal(8),
        StateSpace(),
    ]
    cache = KVCacheManager(200, 4, kinds, publication=0)
    request = Request("r", range(stop + 1))
    for count in range(1, stop + 1):
        cache.allocate(request, 1)
        cache.commit(request, count)
    table = cache.allocate(request, 1)
    assert table is not None
    shown = ["".join("." if block == NULL_BLOCK else "x" for block in ids) for ids in table.block_ids]
    expected = {
        7: ["xx", "xx", "xx", "xx", ".x"],
        8: ["xxx", "xxx", "xxx", "..x", ".xx"],
        9: ["xxx", ".xx", "xxx", "..x", "..x"],
        15: ["xxxx", "..xx", "xxxx", "..xx", "...x"],
        16: ["xxxxx", "..xxx", "xxxxx", "....x", "...xx"],
        17: ["xxxxx", "...xx", "xx.xx", "....x", "....x"],
        24: ["xxxxxxx", "....xxx", "xx..xxx", "......x", ".....xx"],
    }
    assert shown == expected[stop]
