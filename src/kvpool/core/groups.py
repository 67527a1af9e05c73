"""Per kind of layer: how many blocks a request holds, and what counts as a hit.

A group is a set of layers that keep the same thing. A new kind of layer is a new class here; nothing else branches on
it.
Knows nothing of: requests, who holds a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.core.block_pool import BlockPool
from kvpool.types import BlockHash, BlockId


def cdiv(number: int, divisor: int) -> int:
    """Ceiling division of whole numbers."""
    return -(-number // divisor)


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Layers that look at every earlier token, latent attention too: all blocks are live, a hit needs them all."""

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """The blocks that a request of `num_tokens` holds. One formula promises capacity and admits (invariant 12)."""
        return cdiv(num_tokens, block_size)

    def max_tokens(self, num_blocks: int, block_size: int) -> int:
        """The longest request that these blocks hold: `num_blocks` turned round."""
        return num_blocks * block_size

    def longest_hit(self, pool: BlockPool, names: Sequence[BlockHash]) -> list[BlockId]:
        """The blocks of the longest cached prefix of `names`. Changes nothing."""
        return pool.match(names)
