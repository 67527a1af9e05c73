"""Running whole prompts through a cache, with no model."""

from kvpool.core.hit import Hit
from kvpool.core.manager import KVCacheManager
from kvpool.core.request import Request


def serve(cache: KVCacheManager, request: Request) -> Hit:
    """Admit a request, compute all its tokens, and publish them. The pool must have room."""
    hit = cache.match(request)
    table = cache.allocate(request, request.num_tokens - hit.num_tokens, hit)
    assert table is not None, f"{request.request_id!r} does not fit: {cache.num_free_blocks} blocks are free"
    cache.commit(request, request.num_tokens)
    return hit
