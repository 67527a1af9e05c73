"""Which blocks can be found under which names.

Owns: the index of one group, and the names that left it lately.
Knows nothing of: holders, the free queue, what a name is made of.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvpool.core.eviction import RecentNames
from kvpool.types import BlockHash, BlockId


class NameIndex:
    """Names to blocks: `first` is what is found, a plain dict that the pool fills.

    Several blocks may carry one name (two requests computed the same prefix at the same time). Each keeps it; the one
    that was added first is the one that is found.
    """

    def __init__(self) -> None:
        self.first: dict[BlockHash, BlockId] = {}
        self.further: dict[BlockHash, OrderedDict[BlockId, None]] = {}
        """Oldest first; none of these is empty."""
        self.evicted = RecentNames()

    def add_copy(self, name: BlockHash, block_id: BlockId) -> None:
        """This block carries a name that another is found under already."""
        self.further.setdefault(name, OrderedDict())[block_id] = None

    def drop(self, names: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> Sequence[BlockHash]:
        """These blocks do not carry their names any more. The names that can be found no longer, in order."""
        if not self.further:
            for name in names:
                del self.first[name]
            return names
        return [name for name, block in zip(names, block_ids, strict=True) if not self._drop_copy(name, block)]

    def _drop_copy(self, name: BlockHash, block_id: BlockId) -> bool:
        """Whether other blocks carry the name too: then the oldest of them is the one that is found from now on."""
        further = self.further.get(name)
        if further is None:
            del self.first[name]
            return False
        if self.first[name] == block_id:
            self.first[name], _ = further.popitem(last=False)
        else:
            del further[block_id]
        if not further:
            del self.further[name]
        return True

    def carriers(self) -> dict[BlockHash, set[BlockId]]:
        """All blocks of every name. O(names)."""
        assert all(self.further.values()), "invariant 3: an empty list of copies"
        return {name: {block, *self.further.get(name, ())} for name, block in self.first.items()}
