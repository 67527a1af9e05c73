"""What happened to the cache's content, as plain values, and the log that collects them.

Owns: the events nobody has taken yet.
Knows nothing of: who listens, and how events travel.

Replaying the events in order on an empty set of names gives the names that the cache can find, group by group
(invariant 10).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvpool.types import BlockHash, GroupId

_LOG = logging.getLogger(__name__)


class BlockStored(NamedTuple):
    """Consecutive full blocks of one request became findable.

    `parent_block_hash` names the block before the first of them, findable or not; None at the start of a prompt.
    `token_ids` are the tokens of all of them in order, `block_size` to a block: the block size of the group.
    A name may be stored again while it is still findable: adding it twice changes nothing.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    group_id: GroupId


class BlockRemoved(NamedTuple):
    """The last block under each of these names was reused, or its content withdrawn: they can no longer be found."""

    block_hashes: tuple[BlockHash, ...]
    group_id: GroupId = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found any more: the cache was cleared, or (see `EventLog`) events were lost.

    No tuple like the others: one without fields is false, and equal to ().
    """


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events in order, until somebody takes them.

    Events about `limit` blocks are kept. When nobody takes them in time, all are dropped and the next list begins with
    AllBlocksCleared: a listener then knows fewer names than the cache holds, never one too many.
    Removals with nothing stored between them are one event a group, in order of groups.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._num_blocks = 0
        self._events: list[Event] = []
        self._removed: dict[GroupId, list[BlockHash]] = {}
        """Names that are gone since the last of these events."""

    def stored(
        self,
        names: Sequence[BlockHash],
        parent: BlockHash | None,
        token_ids: Sequence[int],
        block_size: int,
        group_id: GroupId = 0,
    ) -> None:
        """Consecutive blocks with these names and tokens became findable in a group; `parent` names the one before."""
        self._make_room(len(names))
        self._close_removed()
        self._events.append(BlockStored(tuple(names), parent, tuple(token_ids), block_size, group_id))

    def stored_all(self, events: list[BlockStored]) -> None:
        """The same for many at once, each of one block."""
        self._make_room(len(events))
        self._close_removed()
        self._events += events

    def removed(self, names: Sequence[BlockHash], group_id: GroupId = 0) -> None:
        """Nothing under these names can be found in the group any more."""
        self._make_room(len(names))
        self._removed.setdefault(group_id, []).extend(names)

    def cleared(self) -> None:
        """Nothing at all can be found any more; what happened before no longer matters."""
        self._events, self._removed, self._num_blocks = [AllBlocksCleared()], {}, 0

    def take(self) -> list[Event]:
        """All events since the last call, oldest first; the log is empty afterwards."""
        self._close_removed()
        taken, self._events, self._num_blocks = self._events, [], 0
        return taken

    def _close_removed(self) -> None:
        """What comes next is no removal."""
        if self._removed:
            self._events += [BlockRemoved(tuple(names), group) for group, names in sorted(self._removed.items())]
            self._removed = {}

    def _make_room(self, num_blocks: int) -> None:
        self._num_blocks += num_blocks
        if self._num_blocks > self._limit:
            _LOG.warning(
                "events about %d blocks were not taken and are dropped: "
                "call take_events() each step, or pass events=False",
                self._num_blocks - num_blocks,
            )
            self.cleared()
            self._num_blocks = num_blocks
