"""A decode batch of the native core and one in Python: two caches side by side, alike after every call.

`Twins` makes the histories: requests with shared prefixes join, step, run short, are served, leave, are freed or
turn out bad; drafts, tokens from outside and clearing among them. Both caches have the native pool, or both the Python
one where a case says so; only one has native batches.
"""

import copy
import gc
import pickle
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.unit.twins import Twins

from kvpool import (
    BlockRemoved,
    BlockStored,
    DecodeBatch,
    FullAttention,
    KVCacheManager,
    LayerKind,
    Request,
    SlidingWindow,
    UsageError,
)
from kvpool._native import NativeBlockPool
from kvpool.core.native_batch import NativeDecodeBatch
from kvpool.core.publication import Setting

pytestmark = pytest.mark.skipif(NativeBlockPool is None, reason="the native core is not in use")

FULL = FullAttention()
LAYOUTS: list[tuple[LayerKind, ...]] = [
    (FULL,),
    (FULL, FULL),
    (SlidingWindow(6),),
    (FULL, SlidingWindow(6)),
    (SlidingWindow(9, num_sinks=5), FULL),
    (SlidingWindow(6, num_sinks=3), SlidingWindow(9, num_sinks=10)),
    (FULL, SlidingWindow(6), SlidingWindow(13)),
    (SlidingWindow(7), FULL, SlidingWindow(7, num_sinks=2)),
]
NUM_CALLS = 150
WANTED = {"grown": 20, "unserved": 2, "step": 20, "leave": 5, "invalidate": 1, "serve": 20}


class PurePart(KVCacheManager):
    """A cache whose batches are Python's."""

    def _new_batch(self) -> DecodeBatch:
        return DecodeBatch(self._pool, self._room, self.groups, self._publisher, self.hasher)


class Pair(Twins):
    """Also compares what an engine takes from a batch."""

    def _state(self, side: int) -> list[object]:
        batch, cache = self.batches[side], self.caches[side]
        own: list[object] = [batch.num_tokens.tolist(), batch.slot_mapping().tolist(), batch.ending_rows()]
        own += [batch.block_tables(group.group_id).tolist() for group in cache.groups.all]
        own += [[request.request_id for request in batch.requests], [r.request_id for r in batch.unserved]]
        spare = [cache._pool.policy]
        return [own, spare, *super()._state(side)]

    def _events(self, cache: KVCacheManager) -> object:
        return [(type(event), event, hash(event)) for event in cache.take_events()]


def pair_of(rng: random.Random, kinds: Sequence[LayerKind], **options: Any) -> Pair:
    num_blocks, size = rng.choice([8, 16, 40]) * len(kinds), rng.choice([1, 2, 4, 4, 4])
    classes = (KVCacheManager, PurePart)
    caches = [make(num_blocks, size, kinds, max_in_flight_tokens=64, **options) for make in classes]
    pair = Pair((caches[0], caches[1]), rng)
    assert [type(batch) for batch in pair.batches] == [NativeDecodeBatch, DecodeBatch]
    return pair


@pytest.mark.parametrize("drop_last_block", [False, True])
@pytest.mark.parametrize("publication", ["ranked", "every", 0])
@pytest.mark.parametrize("kinds", LAYOUTS, ids=str)
def test_native_and_python_batches_are_alike_after_every_call(
    rng: random.Random, kinds: tuple[LayerKind, ...], publication: Setting, drop_last_block: bool
) -> None:
    total: Counter[str] = Counter()
    number = 0
    while number < 2 or any(total[name] < count for name, count in WANTED.items()):
        number += 1
        assert number < 100, f"some of {WANTED} never happens: {total}"
        history = rng.randrange(2**32)
        pair = pair_of(random.Random(history), kinds, publication=publication, drop_last_block=drop_last_block)
        try:
            pair.run(NUM_CALLS)
        except AssertionError as error:
            error.add_note(f"history {number}: random.Random({history})")
            raise
        total += pair.counts


def joined(cache: KVCacheManager, *requests: Request) -> DecodeBatch:
    """All of them computed but a first output of 0."""
    batch = cache.decode_batch()
    for request in requests:
        assert cache.allocate(request, request.num_tokens) is not None
        cache.commit(request, request.num_tokens)
        request.append(0)
        cache.join(batch, request)
    cache.serve(batch)
    return batch


def test_a_request_is_written_down_when_somebody_reads_it() -> None:
    cache = KVCacheManager(20, 4)
    request = Request("r", [1, 2, 3])
    batch = joined(cache, request)
    table = cache.table(request)
    assert table is not None
    tokens = request.token_ids
    for token in range(7):
        cache.step(batch, [token])
    assert len(tokens) == 4, "nobody has asked yet"
    assert request.num_tokens == 11
    assert tokens is request.token_ids
    assert tokens == [1, 2, 3, 0, *range(7)]
    cache.step(batch, [9])
    assert (table.num_slots, table.num_computed, table.num_committed) == (12, 11, 8)
    cache.step(batch, [9])
    assert len(table.block_ids[0]) == 4
    with pytest.raises(AttributeError, match="'Request' object has no attribute 'token'"):
        getattr(request, "token")  # noqa: B009
    cache.leave(batch, [request])
    assert request.keeper is table.keeper is None


def test_all_may_leave_at_once_and_while_they_are_looked_through() -> None:
    cache = KVCacheManager(40, 4)
    requests = [Request(str(number), [number] * 5) for number in range(6)]
    batch = joined(cache, *requests)
    cache.step(batch, range(6))
    for request in batch.requests:
        if int(str(request.request_id)) < 3:
            cache.leave(batch, [request])
    cache.step(batch, range(3))
    assert [request.num_tokens for request in requests] == [7, 7, 7, 8, 8, 8]
    cache.leave(batch, batch.requests)
    assert len(batch) == 0
    for request in requests:
        cache.free(request)
    cache.check()


def full_cache(*kinds: LayerKind) -> tuple[KVCacheManager, DecodeBatch]:
    """Eight requests decode, behind the boundaries of their prompts; every free block carries a name."""
    cache = KVCacheManager(1 + 8 * 6 * len(kinds), 4, kinds)
    batch = joined(cache, *[Request(str(number), [number] * 4) for number in range(8)])
    for _ in range(4):
        cache.step(batch, [*range(8)])
    ended: list[Request] = []
    while cache.num_free_blocks >= len(kinds):
        ended.append(Request(f"ended {len(ended)}", [9, len(ended), 9, 9]))
        cache.allocate(ended[-1], 4)
        cache.commit(ended[-1], 4)
    for request in ended:
        cache.free(request)
    cache.take_events()
    return cache, batch


def test_a_step_that_evicts_tells_it_once_a_group() -> None:
    cache, batch = full_cache(FULL, SlidingWindow(64))
    before = [cache.findable(group) for group in (0, 1)]
    for _ in range(4):
        assert cache.take_events() == []
        cache.step(batch, [*range(8)])
    events = cache.take_events()
    assert [type(event) for event in events] == [BlockStored] * 16 + [BlockRemoved] * 2
    for group, event in enumerate(events[-2:]):
        assert isinstance(event, BlockRemoved)
        assert (event.group_id, len(event.block_hashes)) == (group, 8)
        assert set(event.block_hashes) == before[group] - cache.findable(group)


def test_stored_blocks_are_told_in_plain_values_that_are_freed_with_the_events() -> None:
    """The garbage collector need not look at them."""
    num_allocated = []
    for _ in range(6):
        num_stored = 0
        cache, batch = full_cache(FULL, SlidingWindow(6))
        for _ in range(40):
            cache.step(batch, [*range(1000, 1000 + len(batch))])
            for event in cache.take_events():
                if isinstance(event, BlockStored):
                    num_stored += 1
                    assert not any(map(gc.is_tracked, (event, *event)))
            cache.leave(batch, batch.unserved)
        assert num_stored > 30
        del cache, batch, event
        gc.collect()
        num_allocated.append(sys.getallocatedblocks())
    assert num_allocated[-1] - num_allocated[2] < 30


def test_views_outlive_what_they_were_views_of() -> None:
    """They show the batch as it is, until it grows out of them."""
    cache = KVCacheManager(2000, 4)
    batch = joined(cache, Request("first", [1, 2, 3]))
    tables, lengths = batch.block_tables(), batch.num_tokens
    assert tables.dtype == np.int32
    assert (tables.flags.writeable, lengths.flags.writeable) == (False, False)
    cache.step(batch, [1])
    assert lengths.tolist() == [5]
    for number in range(40):
        request = Request(str(number), [number] * 70)
        cache.allocate(request, 70)
        cache.commit(request, 70)
        request.append(1)
        cache.join(batch, request)
    cache.serve(batch)
    cache.step(batch, [2] * 41)
    del batch
    assert tables.tolist() == [[1]]
    assert lengths.tolist() == [5]


def test_a_long_request_that_left_gives_its_memory_back() -> None:
    cache = KVCacheManager(5000, 4)
    batch = joined(cache, *[Request(str(number), [number] * 9) for number in range(40)])
    before = batch.block_tables().strides[0]
    long = Request("long", range(12_000))
    cache.allocate(long, 12_000)
    cache.join(batch, long)
    assert batch.block_tables().strides[0] >= 4 * 3000
    tables = batch.block_tables()[:40, :3].tolist()
    cache.leave(batch, [long])
    assert batch.block_tables().strides[0] == before
    assert batch.block_tables().tolist() == tables
    cache.leave(batch, batch.requests[::2])
    cache.step(batch, [1] * 20)
    cache.check()


def test_a_cache_cannot_be_copied_and_says_what_can_be_done() -> None:
    cache = KVCacheManager(20, 4)
    batch = joined(cache, Request("r", [1, 2, 3]))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a native decode batch cannot be copied or pickled"):
            copied(batch)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled: make another with the same arguments"):
            copied(cache)


@pytest.mark.parametrize("tokens", [[], [1, 2], [-1], [1.0], ["1"], [2**63], None, 7, np.array([[1]]), [None]])
def test_a_step_that_cannot_be_made_changes_nothing(tokens: Any) -> None:
    cache = KVCacheManager(20, 4)
    request = Request("r", [1, 2, 3])
    batch = joined(cache, request)
    with pytest.raises((UsageError, TypeError)):
        cache.step(batch, tokens)
    assert request.token_ids == [1, 2, 3, 0]
    cache.check()


@pytest.mark.parametrize("token", [0, 23, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
def test_tokens_of_any_width_are_named_alike(token: int) -> None:
    names = []
    for make in (KVCacheManager, PurePart):
        cache = make(40, 4)
        batch = joined(cache, Request("r", [1, 2, 3]))
        for number in range(30):
            tokens: Any = np.array([token - (number % 3 if token > 3 else 0)])
            cache.step(batch, tokens)
        names.append(cache.findable())
        cache.check()
    assert names[0] == names[1]
    assert len(names[0]) == 8
