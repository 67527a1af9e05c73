"""What does the native core give, beside the Python core, beside vLLM where it is installed, and beside the floor?

Hashing is a ratio to a floor measured here: two SHA-256 compressions a block, which no hasher of these names can do
without. Block operations are in ns a block, through the verbs that take and give arrays (native) or lists (both). In
large pools arrays ask for other blocks every time, and the floor is memory: one random read a block, of a place in as
many bytes as the pool has. Where ids or names are known in advance many reads run at the same time; the queue of free
blocks tells the next only when the one before was read. Medians. `--blocks` sets the sizes of the pools; pools in
Python are left out where they would have more than 1 million.
"""

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import peer_vllm
from medians import median_s, print_table

from kvpool import BlockHasher, BlockPool
from kvpool._native import WHY_PURE

if WHY_PURE:
    print(f"nothing to compare: {WHY_PURE}")
    sys.exit()

from kvpool._native import _core
from kvpool._native.pool import NativeBlockPool

SIZES = (20_000, 1_000_000, 10_000_000)
MOST_PURE = 1_000_000
WARM = 100_000
NUM_TOKENS, NUM_HITS, ROUND = 131_072, 8_192, 512
NUM_ROUNDS, NUM_PROMPTS = 403, 51  # each is timed once, after three that do not count
AT_ONCE = 64
MATCH, TOUCH, EVICT = "match, 8,192 hits", "touch + free", "evict + commit + free"
MAKE, COLLECT = "making it, ms", "more time of gc, ms"
MISSING = "-"
Row: TypeAlias = tuple[str, ...]


def hashing() -> list[Row]:
    """A prompt of 128K tokens in blocks of 16: ns a block, and times the floor."""
    rng, hasher = random.Random(1), BlockHasher(16)
    tokens = [rng.randrange(128_256) for _ in range(NUM_TOKENS)]
    array, out, count = np.array(tokens, np.int32), bytearray(NUM_TOKENS * 2), NUM_TOKENS // 16
    floor = median_s(lambda: _core.compressions(2 * count), 40)
    calls: dict[str, Callable[[], object]] = {
        "floor: two compressions a block": lambda: _core.compressions(2 * count),
        "int32 array to bytes": lambda: _core.hash_into(array, 16, hasher.root, out),
        "int32 array to list": lambda: hasher.names(array),
        "list to list": lambda: hasher.names(tokens),
        "list to list, pure": lambda: hasher._pure_names(tokens, hasher.root, []),
    }
    if not peer_vllm.WHY_NOT:
        calls["list to list, vLLM"] = peer_vllm.hashing(tokens)
    rows: list[Row] = []
    for what, call in calls.items():
        seconds = median_s(call, 10 if "pure" in what or "vLLM" in what else 60)
        rows.append((what, f"{seconds / count * 1e9:,.1f}", f"{seconds / floor:,.2f}"))
    return rows


def floors(num_bytes: int) -> dict[str, float]:
    """ns of a random read in so many bytes: of one after the other for evictions, else of many at the same time."""
    num_lines = num_bytes // 64
    lines = np.zeros((num_lines, 16), np.int32)
    order = np.random.default_rng(4).permutation(num_lines).astype(np.int32)
    lines[order, 0] = np.roll(order, -1)

    def read_s(at_once: int, count: int) -> float:
        heads = np.ascontiguousarray(order[:: num_lines // at_once][:at_once])
        return median_s(lambda: _core.follow(lines, heads, count // at_once), 100) / count

    apart, chained = read_s(AT_ONCE, NUM_HITS), read_s(1, ROUND)
    return {MATCH: apart, TOUCH: apart, EVICT: chained}


def filled(pool: Any, num_blocks: int) -> tuple[Any, "np.ndarray[Any, Any]"]:
    """All blocks are cached and free, in an order of chance; and their names, as rows of 32 bytes."""
    rng = np.random.default_rng(1)
    blocks = np.empty(num_blocks - 1, np.int32)
    names = rng.integers(0, 256, (num_blocks - 1, 32), dtype=np.uint8)
    if isinstance(pool, NativeBlockPool):
        assert pool.allocate_into(blocks)
        pool.commit(blocks, names)
        rng.shuffle(blocks)
        pool.free(blocks)
    else:
        taken = pool.allocate(num_blocks - 1)
        pool.commit(taken, [row.tobytes() for row in names])
        pool.free(rng.permutation(taken).tolist())
    return pool, names


def native_operations(pool: NativeBlockPool, names: "np.ndarray[Any, Any]") -> dict[str, float]:
    """ns a block through arrays."""
    rng = np.random.default_rng(2)
    some, room = np.empty(ROUND, np.int32), np.empty(NUM_HITS, np.int32)
    num_prompts = 1 if len(names) < WARM else NUM_PROMPTS
    picks = rng.permutation(len(names))[: num_prompts * NUM_HITS].reshape(num_prompts, NUM_HITS)
    prompts = [names[pick] for pick in picks]
    rounds = rng.integers(1, pool.num_blocks, (NUM_ROUNDS, ROUND), dtype=np.int32)
    fresh = rng.integers(0, 256, (200, ROUND, 32), dtype=np.uint8)
    turn = -1

    def match() -> None:
        nonlocal turn
        turn += 1
        assert pool.match_into(prompts[turn % len(prompts)], room) == NUM_HITS

    def touch_and_free() -> None:
        nonlocal turn
        turn += 1
        blocks = rounds[turn % len(rounds)]
        pool.touch(blocks)
        pool.free(blocks)

    def evict_commit_free() -> None:
        nonlocal turn
        turn += 1
        names = fresh[turn % len(fresh)]
        names[:, :8] += 1
        start = time.perf_counter()
        pool.allocate_into(some)
        pool.commit(some, names)
        pool.free(some)
        spent.append(time.perf_counter() - start)

    spent: list[float] = []
    found = {
        MATCH: median_s(match, NUM_PROMPTS - 3) / NUM_HITS,
        TOUCH: median_s(touch_and_free, NUM_ROUNDS - 3) / ROUND,
    }
    for _ in range(NUM_ROUNDS):
        evict_commit_free()
    return {**found, EVICT: statistics.median(spent) / ROUND}


def listed_operations(pool: Any) -> dict[str, float]:
    """ns a block through lists, which both pools take."""
    rng = random.Random(3)
    cached = rng.sample(pool.free_block_ids(), NUM_HITS)
    prompt, some = [pool.name(block) for block in cached], cached[:ROUND]

    def touch_and_free() -> None:
        pool.touch(some)
        pool.free(some)

    found = {
        MATCH: median_s(lambda: pool.match(prompt), 20) / NUM_HITS,
        TOUCH: median_s(touch_and_free, 100) / ROUND,
    }
    spent = []
    for _ in range(100):
        fresh = [rng.randbytes(32) for _ in range(ROUND)]
        start = time.perf_counter()
        blocks = pool.allocate(ROUND)
        pool.commit(blocks, fresh)
        pool.free(blocks)
        spent.append(time.perf_counter() - start)
    return {**found, EVICT: statistics.median(spent) / ROUND}


def vllm_operations(num_blocks: int) -> dict[str, float]:
    """The same through lists of vLLM's blocks, and what its pool of the size costs."""
    rng, before = random.Random(3), collection_s()
    names = [rng.randbytes(32) for _ in range(num_blocks - 1)]
    pool = peer_vllm.FilledPool(names, rng.sample(range(1, num_blocks), num_blocks - 1))
    cached = rng.sample(range(1, num_blocks), NUM_HITS)
    found = {
        MATCH: pool.match_s([names[block_id - 1] for block_id in cached]) / NUM_HITS,
        TOUCH: pool.touch_and_free_s(cached[:ROUND]) / ROUND,
        EVICT: pool.evict_commit_free_s([[rng.randbytes(32) for _ in range(ROUND)] for _ in range(100)]) / ROUND,
    }
    del names
    found[COLLECT] = collection_s() - before
    del pool
    return {**found, MAKE: making_s(lambda: peer_vllm.make(num_blocks))}


def collection_s() -> float:
    return median_s(gc.collect, 9)


def making_s(make: Callable[[], object]) -> float:
    """The median time until it is there; what the last one left behind is cleared away before."""
    spent = []
    for _ in range(5):
        gc.collect()
        start = time.perf_counter()
        made = make()
        spent.append(time.perf_counter() - start)
        del made
    return statistics.median(spent)


def of_size(num_blocks: int) -> tuple[list[Row], list[Row]]:
    """Native through arrays beside the floor, and beside native, pure and vLLM's through lists."""
    before = collection_s()
    pool, names = filled(NativeBlockPool(num_blocks), num_blocks)
    num_bytes = pool.num_bytes
    native = {**native_operations(pool, names), COLLECT: collection_s() - before}
    listed = listed_operations(pool)
    del pool
    native[MAKE] = making_s(lambda: NativeBlockPool(num_blocks))
    floor = floors(num_bytes)
    pure: dict[str, float] = {}
    peer: dict[str, float] = {}
    if num_blocks <= MOST_PURE:
        pool, _ = filled(BlockPool(num_blocks), num_blocks)
        pure = {**listed_operations(pool), COLLECT: collection_s() - before}
        del pool
        pure[MAKE] = making_s(lambda: BlockPool(num_blocks))
        peer = {} if peer_vllm.WHY_NOT else vllm_operations(num_blocks)
    low = [
        (what, *(f"{ns:,.1f}" for ns in (floor[what] * 1e9, native[what] * 1e9, native[what] / floor[what])))
        for what in floor
    ]
    beside: list[Row] = []
    for what, unit in {**dict.fromkeys(listed, 1e9), MAKE: 1e3, COLLECT: 1e3}.items():
        columns = (native, listed, pure, peer)
        cells = [f"{column[what] * unit:,.1f}" if what in column else MISSING for column in columns]
        ratios = [
            f"{other[what] / native[what]:,.0f}" if what in listed and other else MISSING for other in (pure, peer)
        ]
        beside.append((what, *cells, *ratios))
    return low, [*beside, ("bytes a block", f"{num_bytes / num_blocks:.1f}", *[MISSING] * 5)]


def step_pace() -> float:
    """Steps a second of a loop that is Python throughout."""
    pool, stop, steps = BlockPool(2_000), time.perf_counter() + 0.5, 0
    while time.perf_counter() < stop:
        pool.free(pool.allocate(50) or ())
        steps += 1
    return steps / 0.5


def pace_beside_thread(hash_once: Callable[[], object]) -> float:
    """The same while a thread hashes."""
    is_over = threading.Event()

    def hash_on() -> None:
        while not is_over.is_set():
            hash_once()

    thread = threading.Thread(target=hash_on)
    thread.start()
    pace = step_pace()
    is_over.set()
    thread.join()
    return pace


def pace_beside_process() -> float:
    """The same while another process hashes: what is lost then is lost to the machine, not to Python's lock."""
    program = (
        "import numpy as np\nfrom kvpool._native import _core\n"
        f"tokens, out = np.arange({NUM_TOKENS}, dtype=np.int32), bytearray({NUM_TOKENS * 2})\nprint(flush=True)\n"
        "while True:\n    _core.hash_into(tokens, 16, bytes(32), out)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pace = step_pace()
        process.kill()
    return pace


def beside_a_thread() -> list[Row]:
    """Which part of its pace a step loop keeps while prompts of 128K tokens are hashed."""
    tokens = random.Random(1).choices(range(128_256), k=NUM_TOKENS)
    array, out, root, hasher = np.array(tokens, np.int32), bytearray(NUM_TOKENS * 2), bytes(32), BlockHasher(16)
    paces: dict[str, Callable[[], float]] = {
        "int32 array to bytes, in another process": pace_beside_process,
        "int32 array to bytes": lambda: pace_beside_thread(lambda: _core.hash_into(array, 16, root, out)),
        "list to list": lambda: pace_beside_thread(lambda: hasher.names(tokens)),
        "list to list, pure": lambda: pace_beside_thread(lambda: hasher._pure_names(tokens, root, [])),
    }
    rows: list[Row] = []
    for what, pace in paces.items():
        kept = [pace() / step_pace() for _ in range(7)]
        rows.append((what, f"{statistics.median(kept):.0%}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", default=",".join(map(str, SIZES)), help="sizes of the pools, with commas between")
    sizes = [int(size) for size in parser.parse_args().blocks.split(",")]
    features = _core.features()
    print(peer_vllm.WHY_NOT or f"beside vLLM {peer_vllm.RELEASE}")
    gc.collect()
    gc.freeze()  # what was imported is no part of any figure
    print_table(
        f"Hashing 128K tokens in blocks of 16, SHA-256 by {features['sha256']}",
        ("", "ns/block", "x floor"),
        hashing(),
    )
    for size in sizes:
        low, beside = of_size(size)
        title = f"A pool of {size:,} blocks, all cached"
        print_table(title, ("ns/block", "floor", "native, arrays", "x floor"), low)
        columns = ("ns/block", "arrays", "lists", "pure", "vLLM", "pure, x", "vLLM, x")
        print_table("Native through arrays and through lists, the Python core, vLLM", columns, beside)
    title = f"A step loop while a thread hashes prompts of 128K tokens, {os.cpu_count()} processors"
    print_table(title, ("", "pace kept"), beside_a_thread())


if __name__ == "__main__":
    main()
