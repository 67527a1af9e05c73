"""Cases of group C in windows: what may be let go of while a step is still running."""
# ruff: noqa: N802

import random

import pytest

from kvpool import BlockTable, FullAttention, KVCacheManager, Request, SlidingWindow
from kvpool.core.publication import Setting

WINDOW = SlidingWindow(128)

publications = pytest.mark.parametrize("publication", ["every", "ranked"])
"""What of a window is worth keeping: nothing, or what the last border needs until the next one is reached."""


def _with_190_computed(num_tokens: int, publication: Setting) -> tuple[KVCacheManager, Request, BlockTable]:
    """A request of so many tokens, 190 of which are computed, in one step, so that nothing has slid yet."""
    cache = KVCacheManager(40, 32, [WINDOW], publication=publication)
    request = Request("R", range(num_tokens))
    table = cache.allocate(request, 190)
    assert table is not None
    cache.commit(request, 190)
    assert 0 not in table.block_ids[0]
    return cache, request, table


def _first_held(num_computed: int, publication: Setting) -> int:
    """The first block that is not let go of before a step of one token: 191 - 127 = 64, and 160 - 127 = 33."""
    border = num_computed // 32 * 32 if publication == "ranked" else num_computed
    return max(border - 127, 0) // 32


@publications
def test_C07_i_a_token_in_flight_does_not_move_the_window(publication: Setting) -> None:
    """191 tokens are scheduled, 190 are computed: 63 are out of the window of 128, so block 0 alone is let go of."""
    cache, request, table = _with_190_computed(400, publication)
    blocks = list(table.block_ids[0])
    assert len(blocks) == 6
    for num_scheduled in (191, 192):
        assert cache.allocate(request, num_scheduled - 190) is table
        assert table.block_ids == [[0, *blocks[1:]]]
        assert [cache.holders(block) for block in (0, *blocks)] == [0, 0, 1, 1, 1, 1, 1]
        assert cache.free_block_ids().count(blocks[0]) == 1
        cache.check()
    for num_computed in (191, 192):
        cache.commit(request, num_computed)
        held = list(table.block_ids[0])
        assert cache.allocate(request, 1) is table
        first = _first_held(num_computed, publication)
        assert table.block_ids[0][: len(held)] == [0] * first + blocks[first:]
        assert cache.holders(0) == 0
        cache.check()
    assert table.block_ids[0][:6] == [0, 0, *blocks[2:]]
    assert [cache.free_block_ids().count(block) for block in (0, *blocks[:3])] == [0, 1, 1, 0]


@publications
@pytest.mark.parametrize("num_accepted", range(4))
def test_C07_ii_drafts_in_flight_do_not_move_it_either(num_accepted: int, publication: Setting) -> None:
    """194 are scheduled, three of them drafts that may be rejected: still block 0 alone, until they are computed."""
    cache, request, table = _with_190_computed(191, publication)
    blocks = list(table.block_ids[0])
    assert cache.allocate(request, 1, num_lookahead_tokens=3) is table
    more = table.block_ids[0][6:]
    assert table.num_slots == 224
    assert len(more) == 1
    assert table.block_ids == [[0, *blocks[1:], *more]]
    cache.check()

    for token_id in range(num_accepted):
        request.append(token_id)
    cache.commit(request, 191 + num_accepted)
    request.append(7)
    cache.trim(request)
    assert cache.allocate(request, 1) is table
    first = _first_held(191 + num_accepted, publication)
    assert first == (1 if publication == "ranked" and not num_accepted else 2)
    assert table.block_ids[0][:6] == [0] * first + blocks[first:]
    assert len(table.block_ids[0]) == (6 if num_accepted == 0 else 7)
    cache.check()


def test_C07_rejected_drafts_give_back_their_room_and_nothing_else() -> None:
    cache, request, table = _with_190_computed(191, "every")
    num_free = cache.num_free_blocks
    assert cache.allocate(request, 1, num_lookahead_tokens=3) is table
    assert cache.num_free_blocks == num_free + 1 - 1  # block 0, and the seventh
    cache.trim(request)
    assert cache.num_free_blocks == num_free + 1
    assert (table.block_ids[0].count(0), len(table.block_ids[0])) == (1, 6)
    cache.check()


@publications
def test_C07_in_a_batch_the_token_in_flight_does_not_move_the_window(publication: Setting) -> None:
    """The same for a request that decodes with others: a step lets go of what the computed tokens do not look at."""
    cache = KVCacheManager(40, 32, [WINDOW], publication=publication)
    request = Request("R", range(190))
    table = cache.allocate(request, 190)
    assert table is not None
    cache.commit(request, 189)
    blocks = list(table.block_ids[0])
    batch = cache.decode_batch()
    cache.join(batch, request)
    assert table.block_ids == [blocks]
    cache.step(batch, [1])
    assert request.num_tokens == 191
    assert table.block_ids == [[0, *blocks[1:]]]
    assert [cache.holders(block) for block in (0, *blocks)] == [0, 0, 1, 1, 1, 1, 1]
    cache.step(batch, [2])
    assert request.num_tokens == 192
    first = _first_held(191, publication)
    assert table.block_ids == [[0] * first + blocks[first:]]
    cache.step(batch, [3])
    assert table.block_ids == [[0, 0, *blocks[2:], table.block_ids[0][6]]]
    assert [cache.holders(block) for block in (0, *blocks)] == [0, 0, 0, 1, 1, 1, 1]
    cache.check()


@publications
@pytest.mark.parametrize("in_batch", [False, True])
def test_C07_no_block_that_the_running_step_reads_is_ever_let_go_of(
    in_batch: bool, publication: Setting, rng: random.Random
) -> None:
    """300 steps: each reads the last 128 tokens before and with its own, the others are gone. Tables only grow."""
    cache = KVCacheManager(60, 32, [FullAttention(), WINDOW], publication=publication)
    request = Request("R", range(rng.randint(1, 200)))
    table = cache.allocate(request, request.num_tokens)
    assert table is not None
    batch = cache.decode_batch()
    if in_batch:
        cache.join(batch, request)
    length = 0
    for _ in range(300):
        if in_batch:
            cache.step(batch, [rng.randint(0, 9)])
        else:
            cache.commit(request, request.num_tokens)
            request.append(rng.randint(0, 9))
            assert cache.allocate(request, 1) is table
        # All but the last token are computed; the last one is what the running step computes.
        in_flight = request.num_tokens - 1
        full, window = table.block_ids
        assert len(full) == len(window) == in_flight // 32 + 1 >= length
        length = len(window)
        first = _first_held(in_flight, publication)
        assert first <= max(in_flight - 127, 0) // 32
        assert [bool(block) for block in window] == [at >= first for at in range(length)]
        assert length - first <= 5
        assert all(full)
        assert cache.holders(0) == 0
        assert 0 not in cache.free_block_ids()
        cache.check()
    if in_batch:
        cache.leave(batch, [request])
    cache.free(request)
    assert sorted(cache.free_block_ids()) == list(range(1, 60))
