"""An engine keeps its own request class: the cache needs only what `RequestLike` says, names included."""

from collections.abc import Sequence

from kvpool import BlockHash, BlockHasher, KVCacheManager, RequestLike


class ChunkedPrompt:
    """A prompt of numbered chunks, a block each: the numbers so far name a block, and nothing is hashed."""

    reads_cache = True
    max_tokens: int | None = None
    num_encoder_tokens = 0

    def __init__(self, request_id: str, chunks: Sequence[int], block_size: int) -> None:
        self.request_id = request_id
        self.token_ids = [chunk for chunk in chunks for _ in range(block_size)] + [0]
        self.num_prompt_tokens = len(self.token_ids)
        self.num_preemptions = 0
        self._names = [str(chunks[: n + 1]).encode() for n in range(len(chunks))]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def block_hashes(self, _hasher: BlockHasher, _next_block: bytes | None = None, /) -> Sequence[BlockHash]:
        return self._names

    def plain_name(self, _hasher: BlockHasher, _num_blocks: int = 1, /) -> BlockHash | None:
        return None


cache = KVCacheManager(num_blocks=16, block_size=8)
for request_id, chunks in {"first": [1, 2, 3], "second": [1, 2, 4], "third": [2, 3]}.items():
    request: RequestLike = ChunkedPrompt(request_id, chunks, cache.block_size)
    hit = cache.match(request)
    cache.allocate(request, request.num_tokens - hit.num_tokens, hit)
    cache.commit(request, request.num_tokens)
    print(f"{request_id}: chunks {chunks}, hit {hit.num_tokens} tokens because {hit.reason}")
