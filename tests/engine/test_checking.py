"""The checking runner catches what it is there for: planted faults, each of them one that real caches had."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool import (
    NULL_BLOCK,
    BlockHasher,
    BlockPool,
    ChunkedLocal,
    CrossAttention,
    EncoderInput,
    FullAttention,
    KVCacheManager,
    LayerKind,
    Request,
    SlidingWindow,
    StateSpace,
)
from kvpool.core import manager
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler, SchedulerConfig


@pytest.fixture
def cache() -> KVCacheManager:
    return KVCacheManager(20, 4)


@pytest.fixture
def engine(cache: KVCacheManager) -> Engine:
    return Engine(Scheduler(cache), CheckingRunner(cache))


def start(engine: Engine, name: str, tokens: Sequence[int], max_tokens: int = 9) -> Request:
    """A request that has run for a step."""
    request = Request(name, tokens, max_tokens=max_tokens)
    engine.scheduler.add(request)
    engine.step()
    return request


def blocks(cache: KVCacheManager, request: Request, group: int = 0) -> list[int]:
    table = cache.table(request)
    assert table is not None
    return table.block_ids[group]


def test_without_a_fault_all_values_are_read_and_right(engine: Engine) -> None:
    """10 tokens, then 11 and 12: two layers of each."""
    start(engine, "a", range(10), max_tokens=3)
    engine.step()
    engine.step()
    runner = engine.runner
    assert isinstance(runner, CheckingRunner)
    assert runner.num_values_checked == 2 * (10 + 11 + 12)


def test_two_blocks_swapped_in_a_table_are_seen(cache: KVCacheManager, engine: Engine) -> None:
    a = start(engine, "a", range(10))
    blocks(cache, a)[:2] = [2, 1]
    with pytest.raises(
        AssertionError, match=r"'a' reads a foreign or stale value at position 0, group 0, layer 0: slot 8 of block 2"
    ):
        engine.step()


def test_equal_tokens_at_other_positions_are_other_values(cache: KVCacheManager, engine: Engine) -> None:
    a = start(engine, "a", [7] * 10)
    blocks(cache, a)[:2] = [2, 1]
    with pytest.raises(AssertionError, match="'a' reads a foreign or stale value at position 0"):
        engine.step()


def test_a_block_overwritten_by_another_request_is_seen(cache: KVCacheManager, engine: Engine) -> None:
    """b is given a block of a as if it were free, and writes its next token there."""
    a = start(engine, "a", range(10))
    b = start(engine, "b", range(50, 60))
    blocks(cache, b)[2] = blocks(cache, a)[0]
    with pytest.raises(AssertionError, match="'a' reads a foreign or stale value at position 2"):
        engine.step()


@pytest.fixture
def pure_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """For faults that are planted in the Python pool's own fields."""
    monkeypatch.setattr(manager, "ChosenPool", BlockPool)


@pytest.mark.usefixtures("pure_pool")
def test_a_name_that_outlives_its_block_is_seen(cache: KVCacheManager, engine: Engine) -> None:
    """The index still knows a's first block, which holds b's content by now."""
    pool: Any = cache._pool
    a = start(engine, "a", range(10), max_tokens=1)
    names = a.block_hashes(cache.hasher)
    b = start(engine, "b", range(50, 100))
    reused = blocks(cache, b)[0]
    pool._indexes[0].first[names[0]] = reused
    pool._names[reused] = names[0]
    with pytest.raises(AssertionError, match="'c' reads a foreign or stale value at position 0"):
        start(engine, "c", range(10))


def test_a_block_that_is_found_before_it_was_computed_is_seen(cache: KVCacheManager, engine: Engine) -> None:
    never_ran = Request("never ran", range(10))
    cache.allocate(never_ran, 10)
    cache.commit(never_ran, 10)
    cache.free(never_ran)
    with pytest.raises(AssertionError, match="'a' reads an unwritten value at position 0, group 0, layer 0"):
        start(engine, "a", range(10))


def test_a_table_without_a_copied_block_is_seen(cache: KVCacheManager, engine: Engine) -> None:
    """A block moved to another id without its values."""
    a = start(engine, "a", range(10))
    blocks(cache, a)[1] = 17
    with pytest.raises(AssertionError, match="'a' reads an unwritten value at position 4"):
        engine.step()


class NamedByLastTokens(Request):
    """Names a block by its last token alone: two different prompts share blocks."""

    __slots__ = ()

    def block_hashes(self, hasher: BlockHasher, next_block: bytes | None = None, /) -> list[bytes]:
        names = super().block_hashes(hasher, next_block)
        size = hasher.block_size
        return [bytes([self.token_ids[size * block + size - 1]]) for block in range(len(names))]


def test_a_block_shared_by_two_different_prompts_is_seen(engine: Engine) -> None:
    engine.scheduler.add(NamedByLastTokens("a", [1, 2, 3, 4, 5], max_tokens=9))
    engine.step()
    engine.scheduler.add(NamedByLastTokens("b", [1, 9, 3, 4, 5], max_tokens=9))
    with pytest.raises(AssertionError, match="'b' reads a foreign or stale value at position 1"):
        engine.step()


# -- several groups


def engine_of(*kinds: LayerKind, num_layers: int = 2, **options: Any) -> Engine:
    cache = KVCacheManager(60, 4, kinds, max_in_flight_tokens=8, **options)
    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=4)
    return Engine(Scheduler(cache, config), CheckingRunner(cache, num_layers))


@pytest.mark.parametrize("publication", ["ranked", "every", "dense", 0])
def test_every_kind_of_layer_reads_what_it_looks_at(publication: str | int) -> None:
    """Prompts that share prefixes, in chunks of 8, windows that slide, states, and an encoder."""
    kinds = (FullAttention(8), SlidingWindow(6), SlidingWindow(9, num_sinks=5), ChunkedLocal(16), StateSpace())
    engine = engine_of(*kinds, CrossAttention(), publication=publication)
    for n in range(24):
        tokens = [*range(4 * (n % 5)), *range(50 * n, 50 * n + 9)]
        encoder = EncoderInput("sound", 6) if n % 2 else None
        engine.scheduler.add(Request(str(n), tokens, max_tokens=20, encoder_input=encoder))
    while engine.scheduler.has_work:
        engine.step()
        engine.scheduler.cache.check()
    cache = engine.scheduler.cache
    assert cache.num_free_blocks == cache.num_usable_blocks
    assert cache.stats.num_hit_tokens > 0


@pytest.mark.parametrize(
    ("kind", "num_values"),
    [
        (FullAttention(), 8 + 10 + 11 + 12),
        (SlidingWindow(5), 8 + 6 + 5 + 5),
        (SlidingWindow(5, num_sinks=2), 8 + 8 + 7 + 7),
        (SlidingWindow(1), 8 + 2 + 1 + 1),
        (ChunkedLocal(8), 8 + 2 + 3 + 4),
        (StateSpace(), 0 + 1 + 1 + 1),
    ],
    ids=str,
)
def test_as_many_values_are_read_as_the_layers_look_at(kind: LayerKind, num_values: int) -> None:
    """A prompt of 10 tokens in steps of 8 and 2, then the 11th and the 12th; one layer, beside a full one."""
    engine = engine_of(FullAttention(), kind, num_layers=1, publication=0)
    engine.scheduler.add(Request("a", range(10), max_tokens=3))
    while engine.scheduler.has_work:
        engine.step()
    assert isinstance(engine.runner, CheckingRunner)
    assert engine.runner.num_values_checked == 8 + 10 + 11 + 12 + num_values


FAULTY: list[LayerKind] = [FullAttention(), SlidingWindow(6), StateSpace()]


@pytest.fixture
def grouped() -> Engine:
    return engine_of(*FAULTY)


def two_running(engine: Engine) -> tuple[Request, Request]:
    a, b = (Request(name, range(first, first + 6), max_tokens=20) for name, first in (("a", 0), ("b", 50)))
    for request in (a, b):
        engine.scheduler.add(request)
    engine.step()
    engine.step()
    return a, b


def test_a_group_that_reads_the_block_of_another_is_seen(grouped: Engine) -> None:
    """Both groups have the same tokens and positions there."""
    a, _ = two_running(grouped)
    cache = grouped.scheduler.cache
    blocks(cache, a, 1)[0] = blocks(cache, a, 0)[0]
    with pytest.raises(AssertionError, match="'a' reads a foreign or stale value at position 1, group 1, layer 0"):
        grouped.step()


def test_a_window_that_let_go_too_early_is_seen(grouped: Engine) -> None:
    """The null block stands where the window still looks."""
    a, _ = two_running(grouped)
    blocks(grouped.scheduler.cache, a, 1)[0] = NULL_BLOCK
    with pytest.raises(AssertionError, match=r"'a' reads an unwritten value at position \d, group 1, .* of block 0"):
        grouped.step()


def test_what_lies_before_the_window_is_nobody_s_business(grouped: Engine) -> None:
    a, b = two_running(grouped)
    cache = grouped.scheduler.cache
    while a.num_tokens < 13:
        grouped.step()
    blocks(cache, a, 1)[0] = blocks(cache, b, 0)[0]
    grouped.step()


def test_a_state_of_another_request_is_seen(grouped: Engine) -> None:
    a, b = two_running(grouped)
    cache = grouped.scheduler.cache
    blocks(cache, a, 2)[-1] = blocks(cache, b, 2)[-1]
    with pytest.raises(AssertionError, match="'a' reads a foreign or stale value at position 5, group 2, layer 0"):
        grouped.step()


@pytest.mark.parametrize("group", [0, 1])
def test_a_token_written_to_the_null_block_is_seen(grouped: Engine, group: int) -> None:
    a, _ = two_running(grouped)
    blocks(grouped.scheduler.cache, a, group)[-1] = NULL_BLOCK
    with pytest.raises(AssertionError, match=f"invariant 5: request 'a' writes into the null block, group {group}"):
        grouped.step()


@pytest.mark.usefixtures("pure_pool")
def test_a_state_that_is_found_at_another_length_is_seen(grouped: Engine) -> None:
    """The state after 12 tokens carries the name of that after 8."""
    a = Request("a", range(13), max_tokens=1)
    grouped.scheduler.add(a)
    while grouped.scheduler.has_work:
        grouped.step()
    cache = grouped.scheduler.cache
    pool: Any = cache._pool
    names, states = a.block_hashes(cache.hasher), pool._indexes[2].first
    states[names[1]] = states[names[2]]
    pool._names[states[names[1]]] = names[1]
    grouped.scheduler.add(Request("b", [*range(8), 90, 91], max_tokens=1))
    with pytest.raises(AssertionError, match="'b' reads a foreign or stale value at position 7, group 2, layer 0"):
        grouped.step()


def test_an_encoder_s_blocks_that_two_requests_share_are_seen() -> None:
    engine = engine_of(FullAttention(), CrossAttention())
    encoder = EncoderInput("sound", 6)
    a, b = (
        Request(name, range(first, first + 4), max_tokens=9, encoder_input=encoder)
        for name, first in (("a", 0), ("b", 50))
    )
    for request in (a, b):
        engine.scheduler.add(request)
        engine.step()
    cache = engine.scheduler.cache
    blocks(cache, b, 1)[0] = blocks(cache, a, 1)[0]
    with pytest.raises(AssertionError, match="'b' reads a foreign or stale value at position 0, group 1, layer 0"):
        engine.step()
