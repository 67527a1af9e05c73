"""Many requests decode together: join once, step as often as you like, leave when they end."""

from kvpool import KVCacheManager, Request
from kvpool.testing import serve

cache = KVCacheManager(num_blocks=12, block_size=4)
requests = [Request(f"r{number}", list(range(10 * number, 10 * number + 6 + number))) for number in range(3)]
batch = cache.decode_batch()
for request in requests:
    serve(cache, request)
    request.append(0)
    cache.join(batch, request)

while cache.serve(batch):
    result = cache.step(batch, [request.num_tokens for request in batch.requests])
    told = [f"{r.request_id} gets block {block}" for r, block in zip(result.grown, result.block_ids, strict=True)]
    told += [f"{request.request_id} has no room" for request in result.unserved]
    print(f"lengths {batch.num_tokens}, {cache.num_free_blocks} blocks free  {', '.join(told)}")

newest = batch.requests[-1]
cache.leave(batch, [newest])
cache.free(newest)
print(f"{newest.request_id} leaves: {cache.num_free_blocks} blocks free, {len(batch.unserved)} without room")
print(f"now all are served: {cache.serve(batch)}, {cache.num_free_blocks} blocks free")

cache.leave(batch, list(batch.requests))
for request in requests[:2]:
    cache.free(request)
cache.check()
