"""The words for identity: what names a block, its content, a request, a group of layers.

Knows nothing of: everything else. Every other module may import this one.
"""

from typing import TypeAlias

BlockId: TypeAlias = int
"""Which block of the pool: 0 .. num_blocks - 1."""

BlockHash: TypeAlias = bytes | int
"""The name of a block's content *and of everything before it*. A digest (bytes) where tokens were hashed, the trace's
own id (int) where a trace names its blocks already. The cache only asks whether two names are equal."""

RequestId: TypeAlias = str
GroupId: TypeAlias = int
"""The position of a group in the cache's list of groups."""

NULL_BLOCK: BlockId = 0
"""Stands where no memory is needed; never held, hashed, freed or evicted (invariant 5)."""
