"""kvpool: the KV cache manager for LLM serving.

A fixed set of blocks, a name for what each one holds, and one rule for when it may be reused.
"""

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.decode_batch import DecodeBatch, StepResult
from kvpool.core.groups import FullAttention
from kvpool.core.hashing import BlockHasher
from kvpool.core.hit import Hit, HitEnd
from kvpool.core.manager import KVCacheManager
from kvpool.core.request import Adapter, MediaItem, Request, RequestLike
from kvpool.errors import ConfigError, KVPoolError, MissingExtraError, RefusedError, TraceError, UsageError
from kvpool.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvpool.stats import CacheStats, Usage
from kvpool.types import NULL_BLOCK, BlockHash, BlockId, GroupId, RequestId

__all__ = [
    "NULL_BLOCK",
    "Adapter",
    "AllBlocksCleared",
    "BlockHash",
    "BlockHasher",
    "BlockId",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTable",
    "CacheStats",
    "ConfigError",
    "DecodeBatch",
    "Event",
    "FullAttention",
    "GroupId",
    "Hit",
    "HitEnd",
    "KVCacheManager",
    "KVPoolError",
    "MediaItem",
    "MissingExtraError",
    "RefusedError",
    "Request",
    "RequestId",
    "RequestLike",
    "StepResult",
    "TraceError",
    "Usage",
    "UsageError",
]
