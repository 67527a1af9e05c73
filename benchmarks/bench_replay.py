"""How many block references a second does cache mode look up, on one core?

    python benchmarks/bench_replay.py [TRACE ...] [--blocks 3000,30000] [--first N]

Without traces, a generated one in the shape of a chat service: blocks of 512, a shared first block, a third of the
rest seen before. Each source is replayed from memory (the cache alone) and as it is read. Of a trace too long for that,
the first N requests from memory. Medians of 3 runs.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import islice

from medians import median_s, print_table

from kvpool.replay.readers import open_trace
from kvpool.replay.settings import ReplaySettings, Source
from kvpool.replay.simulator import replay
from kvpool.replay.trace import TraceRequest


class InMemory:
    """Requests that are read already."""

    seed = None
    num_skipped = 0

    def __init__(self, name: str, block_size: int | None, requests: Sequence[TraceRequest]) -> None:
        self.name = name
        self.block_size = block_size
        self.requests = requests

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)


def generated() -> InMemory:
    rng = random.Random(1)
    requests: list[TraceRequest] = []
    next_id = 1
    for number in range(12_000):
        length = min(1 + int(rng.lognormvariate(2.8, 0.9)), 240)
        earlier = rng.choice(requests[-2_000:]).block_ids if number and rng.random() < 0.6 else None
        shared = list(earlier or [0])[: rng.randrange(1, length + 1)]
        ids = shared + list(range(next_id, next_id + length - len(shared)))
        next_id += length
        requests.append(TraceRequest(str(number), number * 0.3, length * 512, 300, block_ids=ids))
    return InMemory("generated", 512, requests)


def rate(source: Source, settings: ReplaySettings, num_references: int) -> str:
    """Millions of references a second."""
    return f"{num_references / median_s(lambda: replay(source, settings), 3) / 1e6:.2f}"


def row(source: Source, num_blocks: int, first: int | None) -> tuple[str, ...]:
    settings = ReplaySettings(num_blocks, raw=source.block_size is not None)
    loaded = InMemory(source.name, source.block_size, list(islice(source, first)))
    tally = replay(loaded, settings).all
    in_memory = rate(loaded, settings, tally.total_blocks)
    as_read = rate(source, settings, tally.total_blocks) if first is None else "-"
    return (
        source.name[:22],
        f"{num_blocks:,}",
        f"{tally.total_blocks:,}",
        f"{tally.block_hit_rate:.1%}",
        in_memory,
        as_read,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--blocks", default="3000,30000", help="sizes of the pools, with commas between")
    parser.add_argument("--first", type=int, help="how many requests of each trace")
    options = parser.parse_args()
    sources: list[Source] = [open_trace(path) for path in options.traces] or [generated()]
    sizes = [int(size) for size in options.blocks.split(",")]
    rows = [row(source, num_blocks, options.first) for source in sources for num_blocks in sizes]
    columns = ("source", "pool", "references", "hits", "M/s in memory", "M/s as read")
    print_table("Cache mode, one core", columns, rows)


if __name__ == "__main__":
    main()
