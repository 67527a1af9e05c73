"""kvpool: the KV cache manager for LLM serving.

A fixed set of blocks, a name for what each one holds, and one rule for when it may be reused.
"""

from kvpool.core.block_pool import BlockPool
from kvpool.core.block_table import BlockTable
from kvpool.core.decode_batch import DecodeBatch, StepResult
from kvpool.core.hashing import BlockHasher
from kvpool.core.hit import Hit, HitEnd
from kvpool.core.manager import KVCacheManager
from kvpool.core.request import Adapter, EncoderInput, MediaItem, PromptEmbeds, Request, RequestLike
from kvpool.errors import ConfigError, KVPoolError, MissingExtraError, RefusedError, TraceError, UsageError
from kvpool.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvpool.plan.kinds import ChunkedLocal, CrossAttention, FullAttention, LayerKind, SlidingWindow, StateSpace
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
    "ChunkedLocal",
    "ConfigError",
    "CrossAttention",
    "DecodeBatch",
    "EncoderInput",
    "Event",
    "FullAttention",
    "GroupId",
    "Hit",
    "HitEnd",
    "KVCacheManager",
    "KVPoolError",
    "LayerKind",
    "MediaItem",
    "MissingExtraError",
    "PromptEmbeds",
    "RefusedError",
    "Request",
    "RequestId",
    "RequestLike",
    "SlidingWindow",
    "StateSpace",
    "StepResult",
    "TraceError",
    "Usage",
    "UsageError",
]
