"""A router's view: an index that is kept from events alone, and equals what the cache can find at every moment."""

import random

from kvpool import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVCacheManager, Request
from kvpool.testing import serve

cache = KVCacheManager(num_blocks=24, block_size=4)
index: set[BlockHash] = set()
rng = random.Random(3)

for number in range(200):
    topic = rng.randrange(6)
    prompt = [topic] * rng.randrange(4, 30) + [rng.randrange(100) for _ in range(6)]
    request = Request(f"r{number}", prompt)
    serve(cache, request)
    cache.free(request)
    stored = removed = 0
    for event in cache.take_events():
        match event:
            case BlockStored(block_hashes=names):
                index.update(names)
                stored += len(names)
            case BlockRemoved(block_hashes=names):
                index.difference_update(names)
                removed += len(names)
            case AllBlocksCleared():
                index.clear()
    assert index == cache.findable()
    if number % 40 == 0:
        print(f"request {number:3}: {stored} stored, {removed} removed, {len(index)} names in the index")

print(f"200 requests, {cache.num_evictions} evictions: the index equals the cache after every one")
