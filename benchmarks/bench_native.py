"""What does the native core give, beside the Python core in the same run?

Hashing is a ratio to a floor measured here: two SHA-256 compressions a block, which no hasher of these names can do
without. Block operations are in ns a block, through the verbs that take and give arrays (native) or lists (both). In
large pools other blocks are asked for every time, so that the floor there is the latency of memory. Medians. `--blocks`
sets the sizes of the pools; the Python pool is left out where it would have more than 1 million.
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
    rows: list[Row] = []
    for what, call in calls.items():
        seconds = median_s(call, 10 if "pure" in what else 60)
        rows.append((what, f"{seconds / count * 1e9:,.1f}", f"{seconds / floor:,.2f}"))
    return rows


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
    picks = [rng.choice(len(names), NUM_HITS, replace=False) for _ in range(1 if len(names) < WARM else 24)]
    prompts = [np.ascontiguousarray(names[pick]) for pick in picks]
    rounds = [rng.integers(1, pool.num_blocks, ROUND, dtype=np.int32) for _ in range(200)]
    fresh = [rng.integers(0, 256, (ROUND, 32), dtype=np.uint8) for _ in range(200)]
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
        "match, 8,192 hits": median_s(match, 48) / NUM_HITS,
        "touch + free": median_s(touch_and_free, 400) / ROUND,
    }
    for _ in range(400):
        evict_commit_free()
    return {**found, "evict + commit + free": statistics.median(spent) / ROUND}


def listed_operations(pool: Any) -> dict[str, float]:
    """ns a block through lists, which both pools take."""
    rng = random.Random(3)
    cached = rng.sample(pool.free_block_ids(), NUM_HITS)
    prompt, some = [pool.name(block) for block in cached], cached[:ROUND]

    def touch_and_free() -> None:
        pool.touch(some)
        pool.free(some)

    found = {
        "match, 8,192 hits": median_s(lambda: pool.match(prompt), 20) / NUM_HITS,
        "touch + free": median_s(touch_and_free, 100) / ROUND,
    }
    spent = []
    for _ in range(100):
        fresh = [rng.randbytes(32) for _ in range(ROUND)]
        start = time.perf_counter()
        blocks = pool.allocate(ROUND)
        pool.commit(blocks, fresh)
        pool.free(blocks)
        spent.append(time.perf_counter() - start)
    return {**found, "evict + commit + free": statistics.median(spent) / ROUND}


def collection_s() -> float:
    return median_s(gc.collect, 9)


def of_size(num_blocks: int) -> list[Row]:
    """Native through arrays, native and pure through lists; and what a pool of the size costs."""
    before = collection_s()
    columns: list[dict[str, float]] = []
    pool, names = filled(NativeBlockPool(num_blocks), num_blocks)
    num_bytes = pool.num_bytes / num_blocks
    columns.append({**native_operations(pool, names), "gc": collection_s() - before})
    columns.append(listed_operations(pool))
    del pool
    columns[0]["make"] = median_s(lambda: NativeBlockPool(num_blocks), 5)
    if num_blocks <= MOST_PURE:
        pure, _ = filled(BlockPool(num_blocks), num_blocks)
        columns.append({**listed_operations(pure), "gc": collection_s() - before})
        del pure
        columns[2]["make"] = median_s(lambda: BlockPool(num_blocks), 3)
    else:
        columns.append({})
    rows: list[Row] = []
    for what, unit in {**dict.fromkeys(columns[1], 1e9), "make": 1e3, "gc": 1e3}.items():
        cells = [f"{column[what] * unit:,.1f}" if what in column else MISSING for column in columns]
        gain = columns[2][what] / columns[0][what] if what in columns[2] and what != "gc" else None
        title = {"make": "making it, ms", "gc": "more time of a full collection, ms"}.get(what, what)
        rows.append((title, *cells, f"{gain:,.0f}" if gain else MISSING))
    return [*rows, ("bytes a block", f"{num_bytes:.1f}", MISSING, MISSING, MISSING)]


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
    print_table(
        f"Hashing 128K tokens in blocks of 16, SHA-256 by {features['sha256']}",
        ("", "ns/block", "x floor"),
        hashing(),
    )
    for size in sizes:
        columns = ("ns/block", "native, arrays", "native, lists", "pure, lists", "pure / arrays")
        print_table(f"A pool of {size:,} blocks, all cached", columns, of_size(size))
    title = f"A step loop while a thread hashes prompts of 128K tokens, {os.cpu_count()} processors"
    print_table(title, ("", "pace kept"), beside_a_thread())


if __name__ == "__main__":
    main()
