"""What an engine takes from a decode batch as arrays: block tables, and where the next tokens' keys and values go."""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvpool import (
    ChunkedLocal,
    ConfigError,
    CrossAttention,
    FullAttention,
    KVCacheManager,
    LayerKind,
    Request,
    SlidingWindow,
    StateSpace,
)  # fmt: skip
from kvpool.core.request import EncoderInput, RequestLike
from kvpool.replay.named import NamedRequest

FULL = FullAttention()


@pytest.mark.parametrize(
    "kinds",
    [
        (FULL,),
        (FULL, SlidingWindow(6, num_sinks=2)),
        (FULL, ChunkedLocal(8)),
        (FULL, StateSpace()),
        (FULL, FullAttention(8)),
        (FULL, CrossAttention()),
    ],
    ids=str,
)
def test_arrays_say_what_the_tables_say(kinds: Sequence[LayerKind]) -> None:
    cache = KVCacheManager(120, 4, kinds)
    batch = cache.decode_batch()
    requests = [
        Request(f"r{n}", [n] * (3 + 5 * n), encoder_input=EncoderInput("x", 6) if CrossAttention() in kinds else None)
        for n in range(4)
    ]
    for request in requests:
        cache.allocate(request, request.num_tokens)
        cache.commit(request, request.num_tokens)
        request.append(0)
        cache.allocate(request, 1)
        cache.join(batch, request)
    for token in range(30):
        slots = batch.slot_mapping()
        assert slots.dtype == np.int64
        assert slots.shape == (len(kinds), 4)
        for group in cache.groups.all:
            blocks = batch.block_tables(group.group_id)
            assert blocks.dtype == np.int32
            for row, request in enumerate(requests):
                table, last = cache.table(request), request.num_tokens - 1
                assert table is not None
                ids = table.block_ids[group.group_id]
                assert blocks[row].tolist() == ids + [0] * (blocks.shape[1] - len(ids))
                if not group.is_encoder:
                    assert slots[group.group_id, row] == table.slot_mapping(last, last + 1, group.group_id)[0]
        if token == 20:
            cache.leave(batch, [requests.pop(1)])
            requests.append(Request("new", [7]))
            cache.allocate(requests[-1], 1)
            cache.join(batch, requests[-1])
        cache.step(batch, [token] * 4)


def test_a_token_without_room_has_its_slot_in_the_null_block() -> None:
    cache = KVCacheManager(3, 4)
    request = Request("r", range(8))
    cache.allocate(request, 8)
    cache.commit(request, 8)
    request.append(0)
    batch = cache.decode_batch()
    cache.join(batch, request)
    assert (batch.slot_mapping().tolist(), batch.block_tables().tolist()) == ([[0]], [[1, 2]])
    assert batch.unserved == [request]


def test_an_empty_batch_has_empty_arrays() -> None:
    batch = KVCacheManager(3, 4, [FULL, FULL]).decode_batch()
    assert (batch.block_tables(1).shape, batch.slot_mapping().shape, batch.num_tokens.shape) == ((0, 0), (2, 0), (0,))


def test_arrays_can_only_be_read() -> None:
    cache, request = KVCacheManager(3, 4), Request("r", range(3))
    batch = cache.decode_batch()
    cache.allocate(request, 3)
    cache.join(batch, request)
    for array in (batch.block_tables(), batch.slot_mapping(), batch.num_tokens):
        assert not array.flags.writeable


@pytest.mark.parametrize("number", [-1, 2, 2**70])
def test_groups_and_blocks_that_are_not_there_are_named(number: int) -> None:
    cache = KVCacheManager(2, 4, [FULL, FULL])
    with pytest.raises(IndexError, match=f"there is no block {number}: the pool has 2"):
        cache.holders(number)
    for ask in (cache.findable, cache.decode_batch().block_tables):
        with pytest.raises(IndexError, match=f"there is no group {number}: the cache has 2"):
            ask(number)


@pytest.mark.parametrize("size", [np.int32(4), np.int64(4), 2**20 + 1, 2**21])
def test_blocks_of_any_size(size: int) -> None:
    cache, request = KVCacheManager(np.int64(9), size), Request("r", range(3))  # type: ignore[arg-type]
    batch = cache.decode_batch()
    cache.allocate(request, 3)
    cache.join(batch, request)
    for token in range(6):
        cache.step(batch, [token])
    assert request.token_ids == [0, 1, 2, *range(6)]
    assert type(cache.block_size) is int
    cache.check()


@pytest.mark.parametrize("size", [True, 4.0, "4", None])
def test_what_is_no_size_is_refused(size: Any) -> None:
    for arguments in ((9, size), (size, 4)):
        with pytest.raises(ConfigError, match="a whole number is needed"):
            KVCacheManager(*arguments)


class Open(Request):
    """One with attributes of its own beside its slots."""

    def __init__(self) -> None:
        super().__init__("open", range(9))
        self.note = "mine"


@pytest.mark.parametrize("make", [lambda: Request("r", range(9)), lambda: NamedRequest("r", 9, [7], 4, serial=1), Open])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda request: pickle.loads(pickle.dumps(request))])
def test_a_copy_of_a_request_in_a_batch_is_nobodys(
    make: Callable[[], Request | NamedRequest], copied: Callable[[RequestLike], RequestLike]
) -> None:
    cache = KVCacheManager(60, 4)
    batch, request = cache.decode_batch(), make()
    cache.allocate(request, 9)
    cache.commit(request, 9)
    request.append(100)
    cache.join(batch, request)
    cache.serve(batch)
    for token in range(5):
        cache.step(batch, [token])
    twin = copied(request)
    assert twin.token_ids[-5:] == [*range(5)]
    cache.step(batch, [5])
    assert (twin.num_tokens, request.num_tokens) == (15, 16)
    assert getattr(twin, "note", None) == getattr(request, "note", None)
