"""Cases of group C: every block is accounted for, and reused in the right order."""
# ruff: noqa: N802

from kvpool import AllBlocksCleared, KVCacheManager, Request
from kvpool.engine.checking import CheckingRunner
from kvpool.engine.engine import Engine
from kvpool.engine.scheduler import Scheduler
from kvpool.testing import serve


def served_and_freed(cache: KVCacheManager, request: Request) -> int:
    """The tokens that the request hit."""
    hit = serve(cache, request)
    cache.free(request)
    return hit.num_tokens


def test_C02_i_shared_blocks_are_counted_once() -> None:
    """469,952 slots in blocks of 32: five blocks are shared, three are empty at the end."""
    cache = KVCacheManager(469_952 // 32 + 1, 32)
    shared = list(range(160))
    first = Request("first", shared + [1] * (7_000 * 32))
    second = Request("second", shared + [2] * (7_678 * 32))
    assert serve(cache, first).num_tokens == 0
    assert serve(cache, second).num_tokens == 160
    cache.free(first)
    cache.free(second)
    usage = cache.usage()
    assert usage.num_cached * 32 == 469_856
    assert usage.num_empty * 32 == 96
    assert usage.num_held == 0
    assert usage.num_cached + usage.num_empty == usage.num_usable == 14_686


def assert_adds_up(cache: KVCacheManager) -> None:
    """free + idle cached + referenced + null = all, and each block is in exactly one class."""
    usage = cache.usage()
    classes = (usage.num_empty, usage.num_cached, usage.num_held)
    assert all(0 <= count <= usage.num_usable for count in classes)
    assert sum(classes) + 1 == cache.num_blocks
    free = cache.free_block_ids()
    held = [block for block in range(cache.num_blocks) if cache.holders(block)]
    assert sorted([0, *free, *held]) == list(range(cache.num_blocks))
    assert (len(free), len(held)) == (usage.num_empty + usage.num_cached, usage.num_held)
    assert cache.num_free_blocks == len(free)


def test_C02_ii_the_sum_holds_after_every_operation() -> None:
    """The device's part of the case: 10 blocks, 6 referenced, 4 idle and cached. Host tiers do not exist yet."""
    cache = KVCacheManager(11, 4)
    idle, running = Request("idle", range(16)), Request("running", range(100, 124))
    taker, more = Request("taker", [7, 8, 9]), Request("more", range(200, 220))
    assert_adds_up(cache)
    for request in (idle, running):
        table = cache.allocate(request, request.num_tokens)
        assert table is not None
        assert_adds_up(cache)
        cache.commit(request, request.num_tokens)
        assert_adds_up(cache)
    cache.free(idle)
    assert_adds_up(cache)
    usage = cache.usage()
    assert (usage.num_empty, usage.num_cached, usage.num_held) == (0, 4, 6)

    assert cache.allocate(taker, 3) is not None
    assert_adds_up(cache)
    usage = cache.usage()
    assert (usage.num_empty, usage.num_cached, usage.num_held) == (0, 3, 7)

    assert cache.allocate(more, 20) is None
    assert_adds_up(cache)
    cache.step([taker], [1])
    assert_adds_up(cache)
    for request in (taker, running):
        cache.free(request)
        assert_adds_up(cache)
    usage = cache.usage()
    assert (usage.num_empty, usage.num_cached, usage.num_held) == (1, 9, 0)
    assert cache.clear()
    assert_adds_up(cache)
    assert cache.usage().num_empty == 10


def test_C03_i_a_reused_block_is_found_under_its_old_name_no_more() -> None:
    cache = KVCacheManager(3, 4)
    x = [1, 1, 1, 1, 2, 2, 2]
    served_and_freed(cache, Request("X", x))
    assert cache.match(Request("X soon", x)).num_tokens == 4
    serve(cache, Request("Y", [3] * 8))
    assert cache.match(Request("X again", x)).num_tokens == 0
    cache.check()


def _cache_with_one_held_and_a_prefix_of_two_idle() -> KVCacheManager:
    cache = KVCacheManager(5, 4)
    served_and_freed(cache, Request("prefix", range(8)))
    serve(cache, Request("running", [50, 51]))
    assert cache.free_block_ids() == [4, 2, 1]
    return cache


def test_C03_ii_idle_hits_count_as_needed() -> None:
    cache = _cache_with_one_held_and_a_prefix_of_two_idle()
    z = Request("Z", range(13))
    hit = cache.match(z)
    assert hit.block_ids == ([1, 2],)
    assert cache.num_blocks_needed(z, 13 - 8, hit) == 4
    assert cache.allocate(z, 13 - 8, hit) is None
    assert cache.free_block_ids() == [4, 2, 1]
    assert cache.table(z) is None
    assert cache.match(z) == hit
    cache.check()


def test_C03_iii_what_just_fits_is_admitted_and_hits_keep_their_names() -> None:
    cache = _cache_with_one_held_and_a_prefix_of_two_idle()
    scheduler = Scheduler(cache)
    z = Request("Z", range(12))
    scheduler.add(z)
    assert list(scheduler.schedule()) == [(z, 8, 12 - 8)]
    assert cache.free_block_ids() == []
    table = cache.table(z)
    assert table is not None
    assert table.block_ids == [[1, 2, 4]]
    assert cache.match(Request("other", range(12))).block_ids == ([1, 2],)
    cache.check()


def test_C06_unfilled_blocks_are_reused_before_findable_ones() -> None:
    cache = KVCacheManager(6, 4)
    hits = [
        served_and_freed(cache, Request(name, tokens))
        for name, tokens in (("A", [1] * 9), ("B", [2] * 9), ("C", [3] * 3), ("A again", [1] * 9))
    ]
    assert hits == [0, 0, 0, 8]


def test_C06_cyclic_prompts_hit_in_full_with_one_spare_block() -> None:
    def last_round(num_usable: int) -> list[int]:
        cache = KVCacheManager(num_usable + 1, 4)
        rounds = [[served_and_freed(cache, Request(f"{n}/{k}", [k] * 17)) for k in range(5)] for n in range(4)]
        return rounds[-1]

    assert last_round(21) == [16] * 5
    assert sum(last_round(20)) < 5 * 16


def test_C10_clearing_waits_for_running_requests_or_preempts_them() -> None:
    """Refused while busy, with running requests reset, and idle. Outer tiers, which must be told, do not exist yet."""
    cache = KVCacheManager(10, 4)
    scheduler = Scheduler(cache)
    engine = Engine(scheduler, CheckingRunner(cache))
    scheduler.add(Request("R0", range(12), max_tokens=1))
    engine.step()
    running = Request("R1", range(100, 108), max_tokens=5)
    scheduler.add(running)
    engine.step()
    assert len(set(running.block_hashes(cache.hasher)) & cache.findable()) == 2
    assert cache.usage().num_cached == 3

    cache.take_events()
    before = cache.free_block_ids(), cache.findable(), repr(cache.table(running)), list(scheduler.running)
    assert scheduler.reset_prefix_cache() is False
    assert (cache.free_block_ids(), cache.findable(), repr(cache.table(running)), list(scheduler.running)) == before
    assert cache.take_events() == []

    assert scheduler.reset_prefix_cache(preempt_running=True) is True
    assert list(scheduler.waiting) == [running]
    assert scheduler.running == []
    assert cache.table(running) is None
    assert cache.findable() == set()
    assert cache.num_free_blocks == 9
    assert cache.take_events() == [AllBlocksCleared()]
    assert cache.match(running).num_tokens == 0
    assert list(scheduler.schedule()) == [(running, 0, 9)]

    scheduler.abort(running)
    assert cache.findable() == set()
    assert scheduler.reset_prefix_cache() is True
