"""Where a request's tokens lie."""

import numpy as np
import pytest

from kvpool import BlockTable, KVCacheManager, Request, UsageError


@pytest.fixture
def table() -> BlockTable:
    return BlockTable(Request("r", [1]), [[5, 2, 9]], block_sizes=[4], num_computed=4)


def test_the_hit_of_a_new_table_has_room_and_is_computed_and_committed(table: BlockTable) -> None:
    assert (table.num_slots, table.num_computed, table.num_committed) == (4, 4, 4)


def test_slots_follow_the_blocks(table: BlockTable) -> None:
    slots = table.slot_mapping(0, 12)
    assert slots.tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 36, 37, 38, 39]
    assert slots.dtype == np.int64
    assert slots.shape == (12,)
    assert table.slot_mapping(3, 9).tolist() == [23, 8, 9, 10, 11, 36]
    assert table.slot_mapping(7, 7).tolist() == []


@pytest.mark.parametrize(("start", "stop"), [(0, 13), (-1, 2), (5, 4), (13, 13)])
def test_positions_without_room_are_refused(table: BlockTable, start: int, stop: int) -> None:
    with pytest.raises(UsageError, match=f"'r': slots {start} .. {stop} asked for, 12 allocated"):
        table.slot_mapping(start, stop)


def test_a_group_has_its_own_blocks_and_block_size() -> None:
    table = BlockTable(Request("r", [1]), [[1, 2], [3, 4], [5]], block_sizes=[2, 2, 4], num_computed=0)
    assert table.slot_mapping(1, 3, group_id=1).tolist() == [7, 8]
    assert table.slot_mapping(1, 3, group_id=2).tolist() == [21, 22]
    with pytest.raises(UsageError, match=r"'r': slots 0 \.\. 5 asked for, 4 allocated"):
        table.slot_mapping(0, 5, group_id=0)


def test_slots_of_the_null_block_are_below_the_block_size() -> None:
    table = BlockTable(Request("r", [1]), [[0, 3]], block_sizes=[4], num_computed=0)
    assert table.slot_mapping(2, 6).tolist() == [2, 3, 12, 13]


def test_slots_of_the_cache_are_those_of_its_table() -> None:
    cache = KVCacheManager(8, 4)
    request = Request("r", range(6))
    table = cache.allocate(request, 6)
    assert table is not None
    assert table.slot_mapping(0, 8).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    cache.allocate(request, 9)
    assert table.slot_mapping(8, 12).tolist() == [12, 13, 14, 15]


def test_a_table_shows_its_counts_and_blocks(table: BlockTable) -> None:
    assert repr(table) == "BlockTable('r', committed=4, computed=4, slots=4, block_ids=[[5, 2, 9]])"
