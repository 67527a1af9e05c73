"""Cases of group B: which prompts share a prefix, and which must not."""
# ruff: noqa: N802

import json
import os
import subprocess
import sys

from kvpool import Adapter, BlockHasher, KVCacheManager, Request
from kvpool.engine.scheduler import Scheduler
from kvpool.testing import serve

_NAMES_OF_40_TOKENS = """
import json
from kvpool import BlockHasher
hasher = BlockHasher(16)
for keys in ([None, None], [(), ()]):
    print(json.dumps([name.hex() for name in hasher.names(range(40), None, keys)]))
"""


def test_B01_an_adapter_is_its_name_and_its_id_and_no_salt() -> None:
    """Unloading an adapter needs no call: no request can ask for its names any more, and they age out."""
    cache = KVCacheManager(30, 4)
    tokens = list(range(1, 10))
    first, second, salted = Adapter("a", "1"), Adapter("a", "2"), Adapter("S", "3")
    requests = [
        Request("R1", tokens, adapter=first),
        Request("R2", tokens, adapter=second),
        Request("R3", tokens, cache_salt="S"),
        Request("R4", tokens, adapter=salted),
        Request("R5", tokens),
        Request("R6", tokens, adapter=first),
    ]
    assert [serve(cache, request).num_tokens for request in requests] == [0, 0, 0, 0, 0, 8]
    names = {name for request in requests for name in request.block_hashes(cache.hasher)}
    assert len(names) == 10
    cache.check()


def _names_in_a_fresh_process(hash_seed: str) -> list[list[str]]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", _NAMES_OF_40_TOKENS], env=environment, capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_B05_names_are_the_same_in_every_process() -> None:
    """That a store refuses names of another seed comes with the stores."""
    one, other = _names_in_a_fresh_process("1"), _names_in_a_fresh_process("4242")
    assert one == other
    without, empty = one
    assert without == empty == [name.hex() for name in BlockHasher(16).names(range(40))]
    assert len(without) == 2
    assert not {bytes.fromhex(name) for name in without} & set(BlockHasher(16, seed="other").names(range(40)))
    assert BlockHasher(16, seed="other").root != BlockHasher(16).root


def test_B09_requests_that_do_not_read_the_cache_still_fill_it() -> None:
    cache = KVCacheManager(60, 16)
    scheduler = Scheduler(cache)
    prompts = [[*range(54), *range(1000 * n, 1000 * n + n - 54)] for n in (55, 56, 57)]
    pooling = [Request(f"pool-{len(p)}", p, reads_cache=False, max_tokens=1) for p in prompts]
    assert [_num_computed(scheduler, request) for request in pooling] == [55, 56, 57]
    assert cache.stats.num_requests == 0
    ordinary = Request("ordinary", [*range(54), 1, 2, 3], max_tokens=1)
    assert _num_computed(scheduler, ordinary) == 57 - 48
    stats = cache.stats
    assert (stats.num_requests, stats.num_queried_tokens, stats.num_hit_tokens) == (1, 57, 48)


def _num_computed(scheduler: Scheduler, request: Request) -> int:
    """How many positions of the prompt are computed, and so give an output."""
    scheduler.add(request)
    batch = scheduler.schedule()
    assert scheduler.commit(batch, [0]) == [request]
    return batch.counts[0]
