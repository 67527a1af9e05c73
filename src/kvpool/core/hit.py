"""What a lookup found, and why it did not find more.

Owns: the names of first blocks that were stored lately, with and without their extra keys.
Knows nothing of: blocks, who holds them.
"""

from enum import StrEnum
from typing import NamedTuple

from kvpool.core.eviction import RecentNames
from kvpool.types import BlockHash, BlockId


class HitEnd(StrEnum):
    """Why a hit is not longer."""

    LAST_TOKEN = "the last token is always computed"
    DROPPED = "the last block found is seen again by the draft model"
    PARTIAL_BLOCK = "the next block is not full"
    NEVER_SEEN = "the next block was never seen"
    EVICTED = "the next block was evicted"
    OTHER_KEYS = "the first block is cached under another salt, tenant, adapter or media item"
    NOT_KEPT = "the window or state that the next block needs was not kept"
    LAGGING_GROUP = "another group of layers holds less of the prefix"
    NOT_READ = "the request does not read the cache"


class Hit(NamedTuple):
    """The cached prefix of a request: `num_tokens` tokens in whole blocks, their ids group by group.

    The null block stands where a group needs none. `num_shared_tokens` is how far the groups that keep everything could
    have gone; where there are none, how far the prefix was computed by others lately. Where it is more than was hit,
    windows or states lagged. It holds nothing: pass it to `allocate` before the cache changes, or match again.
    """

    num_tokens: int
    block_ids: tuple[list[BlockId], ...]
    reason: HitEnd
    num_shared_tokens: int = 0


class FirstBlocks:
    """Remembers first blocks, so that a miss can tell other content from the same content under other keys."""

    def __init__(self) -> None:
        self._names = RecentNames()
        self._plain = RecentNames()

    def add(self, name: BlockHash, plain_name: BlockHash | None) -> None:
        """A first block was stored under `name`; `plain_name` is what its tokens alone would have given."""
        self._names.add(name)
        if plain_name is not None:
            self._plain.add(plain_name)

    def miss(self, name: BlockHash, plain_name: BlockHash | None) -> HitEnd:
        """Why a first block of this name is not in the cache."""
        if name in self._names:
            return HitEnd.EVICTED
        if plain_name is not None and plain_name in self._plain:
            return HitEnd.OTHER_KEYS
        return HitEnd.NEVER_SEEN
