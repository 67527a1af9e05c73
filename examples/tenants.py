"""Who may find whose blocks: a tenant and a salt each keep a request apart, and the hit says when they did."""

from kvpool import KVCacheManager, Request, UsageError
from kvpool.testing import serve

PROMPT = list(range(200, 233))
cache = KVCacheManager(num_blocks=64, block_size=8)


def send(name: str, *, tenant: str | None = None, cache_salt: str | None = None) -> None:
    request = Request(name, PROMPT, tenant=tenant, cache_salt=cache_salt)
    hit = serve(cache, request)
    cache.free(request)
    print(f"{name:34} hit {hit.num_tokens:2} of {len(PROMPT)}: {hit.reason}")


send("acme asks", tenant="acme")
send("acme asks again", tenant="acme")
send("globex asks the same", tenant="globex")
send("nobody in particular asks", tenant=None)
send("acme, one user's salt", tenant="acme", cache_salt="user-7")
send("acme, the same salt again", tenant="acme", cache_salt="user-7")
send("no tenant, a salt that says acme", cache_salt="acme")

try:
    Request("careless", PROMPT, cache_salt="")
except UsageError as error:
    print(f"refused: {error}")
