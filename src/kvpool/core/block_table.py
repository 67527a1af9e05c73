"""A request's blocks in order, and where its tokens' keys and values lie.

Owns: the block ids of one request, and how far it is allocated, computed and committed.
Knows nothing of: other requests, and who else holds these blocks.
"""

import numpy as np
import numpy.typing as npt

from kvpool.core.request import RequestLike
from kvpool.errors import UsageError
from kvpool.types import BlockId, GroupId


class BlockTable:
    """One list of block ids a group; block i holds tokens i * block_size .. (i + 1) * block_size - 1 (invariant 7).

    Read it, do not write it: the cache does. `num_slots` tokens have room, `num_computed` of them have keys and
    values, `num_committed` can be found by others: committed <= computed <= slots (invariant 6). `is_decoding` while
    the request is in a `DecodeBatch`.
    """

    __slots__ = ("block_ids", "block_size", "is_decoding", "num_committed", "num_computed", "num_slots", "request")

    def __init__(
        self, request: RequestLike, block_ids: list[list[BlockId]], block_size: int, num_computed: int
    ) -> None:
        self.request = request
        self.block_ids = block_ids
        self.block_size = block_size
        self.num_slots = len(block_ids[0]) * block_size
        self.num_computed = num_computed
        self.num_committed = num_computed
        self.is_decoding = False

    def slot_mapping(self, start: int, stop: int, group_id: GroupId = 0) -> npt.NDArray[np.int64]:
        """The slots of tokens start .. stop - 1: int64, shape (stop - start,), slot = block id * block_size + offset.

        UsageError when a position has no room yet.
        """
        if not 0 <= start <= stop <= self.num_slots:
            raise UsageError(
                f"request {self.request.request_id!r}: slots {start} .. {stop} asked for, {self.num_slots} allocated"
            )
        positions = np.arange(start, stop)
        blocks = np.asarray(self.block_ids[group_id], dtype=np.int64)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def __repr__(self) -> str:
        counts = f"committed={self.num_committed}, computed={self.num_computed}, slots={self.num_slots}"
        return f"BlockTable({self.request.request_id!r}, {counts}, block_ids={self.block_ids})"
