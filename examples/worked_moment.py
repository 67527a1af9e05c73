"""Ten blocks, seven moments: the life of a small cache, line by line (docs/example.md tells it in words)."""

from kvpool import KVCacheManager, Request

SYSTEM_PROMPT = list(range(100, 112))
cache = KVCacheManager(num_blocks=12, block_size=4)


def send(name: str, tokens: list[int], salt: str | None = None) -> Request:
    request = Request(name, tokens, cache_salt=salt)
    hit = cache.match(request)
    table = cache.allocate(request, len(tokens) - hit.num_tokens, hit)
    assert table is not None
    cache.commit(request, len(tokens))
    print(f"{name}: hit {hit.num_tokens}, computed {len(tokens) - hit.num_tokens}, table {table.block_ids[0]}")
    print(f"   the hit ended because {hit.reason}")
    return request


a = send("A", [*SYSTEM_PROMPT, 1, 2, 3, 4, 5])
b = send("B, while A runs", [*SYSTEM_PROMPT, 7, 8, 9, 10])
print("holders of blocks 1 to 6:", [cache.holders(block_id) for block_id in range(1, 7)])
cache.free(a)
cache.free(b)
print("A ends, then B; the free queue:", cache.free_block_ids())
send("B's prompt, tenant T2", [*SYSTEM_PROMPT, 7, 8, 9, 10], salt="T2")
send("B's prompt again", [*SYSTEM_PROMPT, 7, 8, 9, 10])
print("the free queue:", cache.free_block_ids())
send("E, unrelated", list(range(500, 512)))
print("evicted on the way:", cache.num_evictions, "blocks")
cache.check()
