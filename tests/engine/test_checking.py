"""The checking runner catches what it is there for: planted faults, each of them one that real caches had."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool import BlockHasher, KVCacheManager, Request
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler


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


def blocks(cache: KVCacheManager, request: Request) -> list[int]:
    table = cache.table(request)
    assert table is not None
    return table.block_ids[0]


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
        AssertionError, match=r"'a' reads a foreign or stale value at position 0, layer 0: slot 8 of block 2"
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


def test_a_name_that_outlives_its_block_is_seen(cache: KVCacheManager, engine: Engine) -> None:
    """The index still knows a's first block, which holds b's content by now."""
    pool: Any = cache._pool
    a = start(engine, "a", range(10), max_tokens=1)
    names = a.block_hashes(cache.hasher)
    b = start(engine, "b", range(50, 100))
    reused = blocks(cache, b)[0]
    pool._index[names[0]] = reused
    pool._names[reused] = names[0]
    with pytest.raises(AssertionError, match="'c' reads a foreign or stale value at position 0"):
        start(engine, "c", range(10))


def test_a_block_that_is_found_before_it_was_computed_is_seen(cache: KVCacheManager, engine: Engine) -> None:
    never_ran = Request("never ran", range(10))
    cache.allocate(never_ran, 10)
    cache.commit(never_ran, 10)
    cache.free(never_ran)
    with pytest.raises(AssertionError, match="'a' reads an unwritten value at position 0, layer 0"):
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
