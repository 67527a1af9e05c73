"""Random layouts: what groups a cache has, and how it was told to run."""

import random
from dataclasses import dataclass, replace
from math import lcm

from kvpool import ChunkedLocal, CrossAttention, FullAttention, KVCacheManager, LayerKind, SlidingWindow, StateSpace

SIZES = [(1,), (2,), (4,), (8,), (1, 2), (2, 4), (4, 8), (1, 2, 4, 8), (2, 3), (3, 6)]
LONGEST = 64
"""No prompt has more tokens."""


@dataclass(frozen=True)
class Layout:
    """What a cache is made of."""

    kinds: tuple[LayerKind, ...]
    num_blocks: int
    publication: str | int
    drops_last_block: bool
    max_in_flight_tokens: int

    def cache(self) -> KVCacheManager:
        return KVCacheManager(
            self.num_blocks,
            groups=self.kinds,
            publication=self.publication,
            drop_last_block=self.drops_last_block,
            max_in_flight_tokens=self.max_in_flight_tokens,
        )

    @property
    def has_states(self) -> bool:
        return any(isinstance(kind, StateSpace) for kind in self.kinds)

    @property
    def has_windows(self) -> bool:
        return any(isinstance(kind, SlidingWindow | ChunkedLocal | StateSpace) for kind in self.kinds)

    @property
    def has_full(self) -> bool:
        return any(isinstance(kind, FullAttention) for kind in self.kinds)

    @property
    def has_encoder(self) -> bool:
        return any(isinstance(kind, CrossAttention) for kind in self.kinds)


def random_layout(rng: random.Random) -> Layout:
    sizes = rng.choice(SIZES)
    alignment = lcm(*sizes)
    kinds = [random_kind(rng, rng.choice(sizes), alignment) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        kinds.append(rng.choice(kinds))
    if rng.random() < 0.1:
        kinds.insert(rng.randint(0, len(kinds)), CrossAttention(block_size=rng.choice([1, 2, 4])))
    # The alignment that came out may be smaller than the sizes to choose from.
    alignment = lcm(*[kind.block_size or 1 for kind in kinds if not isinstance(kind, CrossAttention)])
    kinds = [_aligned(kind, alignment) for kind in kinds]
    # Room for a few whole requests of groups that keep all.
    a_request = sum(LONGEST // (kind.block_size or 1) for kind in kinds)
    settings: list[str | int] = ["ranked", "ranked", "every", "dense", 0, alignment * rng.randint(1, 4)]
    return Layout(
        tuple(kinds),
        num_blocks=max(int(a_request * rng.uniform(0.4, 2.5)), 8),
        publication=rng.choice(settings),
        drops_last_block=rng.random() < 0.2,
        max_in_flight_tokens=rng.choice([4, 10, 20, LONGEST]),
    )


def random_kind(rng: random.Random, size: int, alignment: int) -> LayerKind:
    match rng.choice(["full", "full", "window", "window", "chunk", "state"]):
        case "full":
            return FullAttention(block_size=size)
        case "window":
            num_sinks = rng.choice([0, 0, 0, rng.randint(1, 5)])
            return SlidingWindow(rng.choice([rng.randint(1, 8), rng.randint(1, 40)]), num_sinks, block_size=size)
        case "chunk":
            return ChunkedLocal(size * rng.randint(1, 6), block_size=size)
    checkpoints = rng.choices([None, 0, alignment * rng.randint(1, 3), "none"], [8, 3, 4, 1])[0]
    return StateSpace(checkpoints, rng.choice([None, None, rng.randint(0, 3)]), rng.choice([0, 0, 0, 1, 2]), size)


def _aligned(kind: LayerKind, alignment: int) -> LayerKind:
    """A state's interval of its own, as a multiple of the alignment."""
    if isinstance(kind, StateSpace) and isinstance(kind.checkpoints, int):
        return replace(kind, checkpoints=-(-kind.checkpoints // alignment) * alignment)
    return kind
