"""vLLM's own KV cache manager, asked for the same work where it is installed. `WHY_NOT` says why it is left out.

Written for vLLM 0.33. Its functions are called as its scheduler calls them, on blocks of 16 named by `sha256_cbor`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from medians import median_s

WHY_NOT: str | None = None
RELEASE = ""
try:
    import vllm
except ImportError as error:
    WHY_NOT = f"vLLM is left out: {error}"
else:
    RELEASE = vllm.__version__
    try:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.request import Request
    except ImportError as error:
        WHY_NOT = f"vLLM is left out: its release {RELEASE} is not supported ({error})"

BLOCK_SIZE = 16
MOST_TOKENS = 1 << 20


def _manager(num_blocks: int, windows: Sequence[int] = ()) -> Any:
    """One group of full attention, and one for each window."""
    shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    specs = [FullAttentionSpec(**shape), *(SlidingWindowSpec(**shape, sliding_window=window) for window in windows)]
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=MOST_TOKENS,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def _request(token_ids: Sequence[int], name: str = "r", **words: Any) -> Any:
    return Request(name, list(token_ids), SamplingParams(max_tokens=MOST_TOKENS), None, **words)


def _hasher() -> Any:
    init_none_hash(sha256_cbor)
    return get_request_block_hasher(BLOCK_SIZE, sha256_cbor)


def hashing(token_ids: Sequence[int]) -> Callable[[], list[bytes]]:
    """A call that names the full blocks."""
    hasher, request = _hasher(), _request(token_ids)
    return lambda: list(hasher(request))


def make(num_blocks: int) -> object:
    return _manager(num_blocks)


class FilledPool:
    """All blocks are cached under `names`, and free in the order `order` of their ids."""

    def __init__(self, names: Sequence[bytes], order: Sequence[int]) -> None:
        self.manager = _manager(len(names) + 1)
        self.pool = self.manager.block_pool
        self._named = _request([0])
        self._commit(self.pool.get_new_blocks(len(names)), names)
        self.pool.free_blocks([self.pool.blocks[block_id] for block_id in order])

    def _commit(self, blocks: Sequence[Any], names: Sequence[bytes]) -> None:
        self._named.block_hashes = names
        self.pool.cache_full_blocks(self._named, blocks, 0, len(blocks), BLOCK_SIZE, 0)

    def match_s(self, names: Sequence[bytes]) -> float:
        """Seconds to find them all."""
        request = _request([0] * (len(names) * BLOCK_SIZE + 1))
        request.block_hashes = list(names)
        assert self.manager.get_computed_blocks(request)[1] == len(names) * BLOCK_SIZE
        return median_s(lambda: self.manager.get_computed_blocks(request), 20)

    def touch_and_free_s(self, block_ids: Sequence[int]) -> float:
        blocks = [self.pool.blocks[block_id] for block_id in block_ids]

        def touch_and_free() -> None:
            self.pool.touch(blocks)
            self.pool.free_blocks(blocks)

        return median_s(touch_and_free, 100)

    def evict_commit_free_s(self, rounds: Sequence[Sequence[bytes]]) -> float:
        """One round for each of these lists of new names."""
        spent = []
        for names in rounds:
            start = time.perf_counter()
            blocks = self.pool.get_new_blocks(len(names))
            self._commit(blocks, names)
            self.pool.free_blocks(blocks)
            spent.append(time.perf_counter() - start)
        return statistics.median(spent)


def decode_step(
    prompts: Sequence[Sequence[int]], num_blocks: int, windows: Sequence[int]
) -> Callable[[Sequence[int]], object]:
    """A call that gives every request room for a token and then appends it. The prompts are computed."""
    manager, hasher = _manager(num_blocks, windows), _hasher()
    requests = [_request(prompt, f"r{number}", block_hasher=hasher) for number, prompt in enumerate(prompts)]

    def allocate(request: Any, num_tokens: int, token_id: int) -> None:
        assert manager.allocate_slots(request, num_tokens) is not None
        request.num_computed_tokens += num_tokens
        request.append_output_token_ids(token_id)

    def step(token_ids: Sequence[int]) -> None:
        manager.new_step_starts()
        for request, token_id in zip(requests, token_ids, strict=True):
            allocate(request, 1, token_id)

    for request in requests:
        allocate(request, request.num_tokens, 0)
    return step


def _refusal() -> str | None:
    """What this release does not know, found by asking for a little of everything."""
    try:
        names = hashing(range(64))()
        pool = FilledPool(names, [1, 2, 3, 4])
        pool.match_s(names)
        pool.touch_and_free_s([2])
        pool.evict_commit_free_s([[b"0" * 32]])
        decode_step([range(20)] * 2, 30, [16])([1, 2])
    except (AttributeError, TypeError, ValueError) as error:
        return f"vLLM is left out: its release {RELEASE} is not supported ({error})"
    return None


WHY_NOT = WHY_NOT or _refusal()
