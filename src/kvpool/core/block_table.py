"""A request's blocks in order, and where its tokens' keys and values lie.

Owns: the block ids of one request, and how far it is allocated, computed and committed.
Knows nothing of: other requests, and who else holds these blocks.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.core.late import Keeper, written_late
from kvpool.core.request import RequestLike
from kvpool.errors import UsageError
from kvpool.types import BlockId, GroupId


@written_late("block_ids", "num_slots", "num_computed", "num_committed")
class BlockTable:
    """One list of block ids a group; block i holds tokens i * block_size .. (i + 1) * block_size - 1 (invariant 7).

    Where nothing is kept the null block stands: before a window, between the states that a step passed over.
    Read it, do not write it: the cache does. `num_slots` tokens have room, `num_computed` of them have keys and
    values, `num_committed` were offered to others: committed <= computed <= slots (invariant 6). `is_decoding` while
    the request is in a `DecodeBatch`.
    """

    __slots__ = (
        "block_ids", "block_sizes", "boundaries", "first_held", "is_decoding", "keeper", "last_stop", "num_committed",
        "num_computed", "num_once_committed", "num_outside", "num_slots", "request", "scratch_ids",
    )  # fmt: skip

    def __init__(
        self,
        request: RequestLike,
        block_ids: list[list[BlockId]],
        block_sizes: Sequence[int],
        num_computed: int,
        boundaries: Sequence[int] = (),
    ) -> None:
        self.request = request
        self.block_ids = block_ids
        self.block_sizes = block_sizes
        self.scratch_ids: Sequence[BlockId] = ()
        """Blocks for states after drafted tokens, group after group; beside the table, held until the end."""
        self.first_held = [0] * len(block_ids)
        """Of each kind that slides: blocks before this one were let go of, but for the sinks."""
        self.boundaries = boundaries
        """Lengths in tokens at which others may want to go on from here."""
        self.num_once_committed = 0
        """What was committed before the request was cut back for bad content: some of it may still be found."""
        self.num_outside = num_computed
        """Tokens before this one are not computed here: the hit, and what was announced to come from outside."""
        self.last_stop = num_computed
        """The last common border that computing stopped at, and did not pass over: what states are of."""
        self.num_slots = num_computed
        self.num_computed = num_computed
        self.num_committed = num_computed
        self.is_decoding = False
        self.keeper: Keeper | None = None
        """The batch that writes this down when it is read, if there is one."""

    def slot_mapping(self, start: int, stop: int, group_id: GroupId = 0) -> npt.NDArray[np.int64]:
        """The slots of tokens start .. stop - 1: int64, shape (stop - start,), slot = block id * block_size + offset.

        Tokens of the encoder, in a group of cross attention. A slot below block_size is in the null block: nothing is
        kept there. UsageError when a position has no room yet.
        """
        block_size = self.block_sizes[group_id]
        num_slots = len(self.block_ids[group_id]) * block_size
        if not 0 <= start <= stop <= num_slots:
            raise UsageError(
                f"request {self.request.request_id!r}: slots {start} .. {stop} asked for, {num_slots} allocated"
            )
        first = start // block_size
        blocks = np.array(self.block_ids[group_id][first : -(-stop // block_size)], dtype=np.int64)
        positions = np.arange(start, stop)
        return blocks[positions // block_size - first] * block_size + positions % block_size

    def __repr__(self) -> str:
        counts = f"committed={self.num_committed}, computed={self.num_computed}, slots={self.num_slots}"
        return f"BlockTable({self.request.request_id!r}, {counts}, block_ids={self.block_ids})"
