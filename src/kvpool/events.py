"""What happened to the cache's content, as plain values, and the log that collects them.

Owns: the events nobody has taken yet.
Knows nothing of: who listens, and how events travel.

Replaying the events in order on an empty set of names gives the names that the cache can find (invariant 10).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvpool.types import BlockHash, GroupId

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive full blocks of one request became findable.

    `parent_block_hash` names the block before the first of them, None at the start of a prompt. `token_ids` are the
    tokens of all of them in order, `block_size` to a block.
    A name may be stored again while it is still findable: adding it twice changes nothing.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    group_id: GroupId


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last block under each of these names was reused: they can no longer be found."""

    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more: the cache was cleared, or (see `EventLog`) events were lost."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events in order, until somebody takes them.

    At most `limit` (2 or more) are kept. When nobody takes them in time, all are dropped and the next list begins with
    AllBlocksCleared: a listener then knows fewer names than the cache holds, never one too many.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._noted: list[Event | _Stored] = []

    def add(self, event: Event) -> None:
        self._note(event)

    def add_stored(
        self, names: Sequence[BlockHash], start: int, stop: int, token_ids: Sequence[int], size: int
    ) -> None:
        """Blocks start .. stop - 1 of a request with these names and tokens. Both may grow later, and not change.

        The event is made when it is taken, so that the step that stores does not pay for it.
        """
        self._note((names, start, stop, token_ids, block_size))

    def _note(self, event: "Event | _Stored") -> None:
        if len(self._noted) >= self._limit:
            _LOG.warning("%d cache events were not taken and are dropped: call take_events() each step", self._limit)
            self._noted = [AllBlocksCleared()]
        self._noted.append(event)

    def take(self) -> list[Event]:
        """All events since the last call, oldest first; the log is empty afterwards."""
        taken, self._noted = self._noted, []
        return [_made(event) if isinstance(event, tuple) else event for event in taken]


_Stored: TypeAlias = tuple[Sequence[BlockHash], int, int, Sequence[int], int]


def _made(stored: _Stored) -> BlockStored:
    names, start, stop, token_ids, size = stored
    return BlockStored(
        block_hashes=tuple(names[start:stop]),
        parent_block_hash=names[start - 1] if start else None,
        token_ids=tuple(token_ids[start * size : stop * size]),
        block_size=size,
        group_id=0,
    )
