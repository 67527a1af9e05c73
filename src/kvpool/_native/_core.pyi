"""The compiled part of the native core."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.events import BlockStored
from kvpool.types import BlockHash, BlockId, GroupId

_Row: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
_Ids: TypeAlias = Iterable[BlockId] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
_Names: TypeAlias = Iterable[BlockHash] | _Row
_Tie: TypeAlias = tuple[int, BlockId, BlockHash, int]
"""What of a lineage (0: the border, 1: inside, 2: the whole), of which block; the name, and how many tokens."""
_Tokens: TypeAlias = Iterable[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]

SOURCES: str
"""`sources.digest` of what it was built from; empty where it was not told."""

def features() -> dict[str, str]:
    """`sha256`: the processor's instructions for it; "none" where it has none."""

def hash_blocks(
    token_ids: _Tokens, block_size: int, parent: bytes, extras: Iterable[bytes | None] | None = None
) -> list[bytes] | None:
    """The names of the full blocks after the one named `parent`; None where a token id is not from 0 to 2**32 - 1.

    `extras` are the encoded extra keys of the first blocks. Other threads run meanwhile where there are many.
    """

def hash_into(
    token_ids: _Tokens,
    block_size: int,
    parent: bytes,
    out: bytearray | memoryview | npt.NDArray[np.uint8],
    extras: Iterable[bytes | None] | None = None,
) -> int | None:
    """The same, written to `out` one behind the other; how many there are."""

def hash_encoded(encoded: bytes, block_size: int, parent: bytes, extra: bytes | None = None) -> bytes:
    """The name of one block whose tokens are encoded already."""

def encode_blocks(blocks: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> list[bytes] | None:
    """The encoded tokens of each row; None where a token id is not from 0 to 2**32 - 1."""

def compressions(count: int) -> int:
    """So many SHA-256 compressions, one after the other: what benchmarks measure against."""

def follow(lines: npt.NDArray[np.int32], heads: npt.NDArray[np.int32], steps: int) -> None:
    """Each head goes on to the line that its line begins with, `steps` times: what benchmarks measure against.

    A line is 16 numbers, 64 bytes. A head waits for its line; several heads wait at the same time.
    """

class Pool:
    """See `kvpool.core.block_pool.BlockPool`; here is what it does not have."""

    def __new__(
        cls,
        num_blocks: int,
        num_groups: int,
        is_ranked: bool,
        on_removed: Callable[[list[BlockHash], GroupId], object] | None,
        lineages: dict[BlockId, Any],
        /,
    ) -> Self: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_usable(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_evictions(self) -> int: ...
    @property
    def num_bytes(self) -> int:
        """The memory of all blocks and of the index, once every page of it was touched."""

    def free_block_ids(self) -> list[BlockId]: ...
    def holders(self, block_id: BlockId, /) -> int: ...
    def name(self, block_id: BlockId, /) -> BlockHash | None: ...
    def group_id(self, block_id: BlockId, /) -> GroupId: ...
    def has_lineage(self, block_id: BlockId, /) -> bool:
        """Whether the block has a name, and more than a plain parent was told for it."""

    def names(self, group_id: GroupId = 0) -> set[BlockHash]: ...
    def was_evicted(self, name: BlockHash, group_id: GroupId = 0) -> bool: ...
    def match(self, names: _Names, group_id: GroupId = 0) -> list[BlockId]: ...
    def match_into(self, names: _Names, out: npt.NDArray[np.int32], group_id: GroupId = 0) -> int:
        """The same, written to `out`; how many there are."""

    def finder(self, group_id: GroupId, /) -> Callable[[BlockHash], BlockId | None]: ...
    def carry(self, block_ids: _Ids, names: _Names, group_id: GroupId = 0) -> bool: ...
    def num_idle(self, block_ids: _Ids, /) -> int: ...
    def check(self) -> None: ...
    def touch(self, block_ids: _Ids, /) -> None: ...
    def allocate(self, count: int, /) -> list[BlockId] | None: ...
    def allocate_into(self, out: npt.NDArray[np.int32], /) -> bool:
        """As many as `out` has room for, written to it; False, and nothing has changed, when fewer are free."""

    def commit(
        self,
        block_ids: _Ids,
        names: _Names,
        group_id: GroupId = 0,
        parents: Sequence[Any] | None = None,
        *,
        spare: _Ids = (),
    ) -> None: ...
    def free(self, block_ids: _Ids, /) -> None: ...
    def free_each(self, block_ids: _Ids, /) -> None: ...
    def free_groups(self, runs: Iterable[_Ids], /) -> None: ...
    def keep(self, block_ids: _Ids, /) -> None: ...
    def clear(self) -> bool: ...
    def find_dependents(self, names: Mapping[BlockHash, int], ties: Iterable[_Tie], /) -> list[BlockId]:
        """The blocks with these names, and what depends on that which is bad; rising. O(blocks)."""

    def withdraw_dependents(self, names: Mapping[BlockHash, int], ties: Iterable[_Tie], /) -> int:
        """These, and what depends on what nobody carries, lose their names; how many do."""

class View:
    """A read-only array over memory of the core, for `numpy.asarray`: no copy, and good as long as it is kept."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

_Answer: TypeAlias = tuple[list[Any], View, list[Any]]
"""Requests with a block more in each group, these blocks (int32, requests x groups), and those whose last token has no
room."""

class Rows:
    """The rows of a decode batch, in blocks of one size in all groups of a pool. See `kvpool.core.native_batch`.

    Rows are told by their place. A broken count or an id that is not there raises, and nothing has changed.
    """

    def __new__(
        cls,
        pool: Pool,
        block_size: int,
        keeps_last_border: bool,
        windows: Iterable[tuple[int, int, Iterable[GroupId]]],
        published: Iterable[tuple[GroupId, bool]],
        remainders: Iterable[int],
        on_stored: Callable[[list[BlockStored]], object] | None,
        on_named: Callable[[list[BlockHash]], object] | None,
        /,
    ) -> Self:
        """`windows`: tokens, sink blocks and groups of each; `published`: the groups that publish, whether as spare.

        A row of n tokens may let go of blocks where n % block_size is one of `remainders`. `on_stored` gets what a step
        stored, an event for each block; without it no event is told, of what was evicted neither. `on_named` gets the
        names alone.
        """

    def add(
        self,
        request: Any,
        table: Any,
        late_name: str | None,
        tokens: list[int],
        block_ids: list[list[BlockId]],
        first_held: Iterable[int],
        num_computed: int,
        limit: int | None,
        tail: _Tokens,
        parent: BlockHash,
        extra: bytes | None,
        plain_from: int,
        /,
    ) -> None:
        """A row at the end, `limit` tokens long at its end. `tokens` and `block_ids` are the request's and its table's.

        `late_name` is the attribute of the request that may be taken away; None: its tokens are always up to date.
        The rest as in `follow`.
        """

    def follow(
        self,
        row: int,
        request: Any,
        num_tokens: int,
        tail: _Tokens,
        parent: BlockHash,
        extra: bytes | None,
        plain_from: int,
        /,
    ) -> None:
        """All blocks before these last tokens of the row are committed, the last of them under the name `parent`.

        Blocks that begin at token `plain_from` or later have the encoded extra keys `extra`, and are published.
        Nothing happens when the row is another request's by now, or is longer.
        """

    def remove(self, requests: Iterable[Any], /) -> None:
        """They leave, up to date; the others keep their order. UsageError, and nothing changes, for who has no row."""

    def step(self, token_ids: _Tokens, is_published: bool, /) -> _Answer | bool | None:
        """Full blocks are committed, each row gets a token and room for it; None: nothing grew, all have room.

        False, and nothing has changed, where that cannot be done here: no token for each row, a row without room, a
        block that is not plain. With `is_published` all full blocks are committed already.
        """

    def serve(self) -> bool:
        """Room for rows without, as far as there is any. Whether all have room now."""

    def settle(self) -> None:
        """Write down what is new of all rows."""

    def read(self, thing: object, name: str, /) -> Any:
        """An attribute of a request or a table once that is done; nobody can make a step in between."""

    def borders(self) -> list[tuple[int, Any, Any]]:
        """Row, request and table of each whose length is a multiple of the block size, up to date."""

    def requests(self) -> list[Any]:
        """In order of their rows. A list that stays as it is when requests leave."""

    def member(self, row: int, /) -> tuple[Any, Any]:
        """The request and the table of a row."""

    def ending_rows(self) -> list[int]:
        """Rows whose next token is their last."""

    def unserved(self) -> list[int]:
        """Rows whose last token has no room, in order."""

    def last_tokens(self) -> View:
        """int64, shape (1, rows)."""

    def lengths(self) -> View:
        """int64, shape (rows,)."""

    def block_tables(self, group_id: GroupId, /) -> View:
        """int32, shape (rows, columns)."""

    def slot_mapping(self) -> View:
        """int64, shape (groups, rows): of the last token of each row; a copy."""
