"""What the oracle of several groups remembers: what layers look at, and what was written into each block.

Shares no code with the core. Of the kinds of layers it knows one thing, which earlier tokens a token looks at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from kvpool import BlockHash, ChunkedLocal, CrossAttention, FullAttention, LayerKind, Request, SlidingWindow, StateSpace


def tokens_looked_at(kind: LayerKind, n: int) -> set[int]:
    """The tokens before n that the token at position n looks at; n - 1 stands for the state after n tokens."""
    match kind:
        case SlidingWindow():
            return {token for token in range(n) if token > n - kind.window or token < kind.num_sinks}
        case ChunkedLocal():
            return {token for token in range(n) if token // kind.chunk_size == n // kind.chunk_size}
        case StateSpace():
            return {n - 1} if n else set()
    return set(range(n))


@dataclass
class Layers:
    """One group. What it looks at is worked out once for each length."""

    group_id: int
    kind: LayerKind
    size: int
    _needed: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_state = isinstance(self.kind, StateSpace)
        self.is_encoder = isinstance(self.kind, CrossAttention)
        self.is_full = isinstance(self.kind, FullAttention)
        self.num_scratch = self.kind.num_scratch_blocks if isinstance(self.kind, StateSpace) else 0

    def num_blocks(self, n: int) -> int:
        return (n + self.size - 1) // self.size

    def blocks_looked_at(self, n: int) -> list[int]:
        """By the token at position n."""
        return self.blocks_of_hit(n, 0)

    def blocks_of_hit(self, n: int, num_dropped: int) -> list[int]:
        """The blocks that must be there for a search to find n tokens, of which the last `num_dropped` are left out.

        What is left out must be there too, but for states: one behind the hit is of no use.
        """
        if (n, num_dropped) not in self._needed:
            tokens = tokens_looked_at(self.kind, max(n - num_dropped, 0))
            if num_dropped and not self.is_state:
                tokens |= set(range(n - num_dropped, n))
            self._needed[n, num_dropped] = sorted({token // self.size for token in tokens})
        return self._needed[n, num_dropped]

    def is_dead(self, index: int, num_computed: int) -> bool:
        """Whether no token to come looks at the block, nor is written into it."""
        return (index + 1) * self.size <= num_computed and index not in self.blocks_looked_at(num_computed)


class Prefixes:
    """Numbers of prefixes: equal for requests that begin with the same tokens and keys."""

    def __init__(self) -> None:
        self._pids: dict[Request, list[int]] = {}
        self._numbers: dict[object, int] = {}

    def pids(self, request: Request) -> list[int]:
        """Of the request's first 0, 1, 2 .. tokens. The list grows with the request."""
        pids = self._pids.setdefault(request, [self._number((request.cache_salt, request.encoder_input))])
        for token in request.token_ids[len(pids) - 1 :]:
            pids.append(self._number((pids[-1], token)))
        return pids

    def _number(self, thing: object) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))


@dataclass(eq=False)
class Run:
    """A request's computation from token `start` on. What it made at `bad_from` and later cannot be trusted.

    `bases` are what it was computed on top of: other runs, up to a token.
    """

    pids: list[int]
    start: int
    bases: "list[tuple[Run, int]]"
    bad_from: float = inf


@dataclass(eq=False)
class Content:
    """What was written into a block: tokens from `start` to `end` - 1, or the state after exactly `end` tokens.

    Once it has a `name` it can be found. If it is spare, it is evicted before what is not.
    """

    run: Run
    layers: Layers
    start: int
    end: int = 0
    name: tuple[int, int] | None = None
    digest: BlockHash = b""
    is_spare: bool = False

    @property
    def is_bad(self) -> bool:
        return self.run.bad_from < self.end

    def is_of(self, pids: Sequence[int], end: int) -> bool:
        """Whether it was written up to `end`, for a request that begins with the same tokens and keys."""
        if self.layers.is_state and self.end != end:
            return False
        return self.end >= end and self.run.pids[end] == pids[end]


@dataclass(eq=False)
class Record:
    """A live request. `pids[n]` is a number that stands for its first n tokens and its keys.

    Tokens before `outside` are not computed here: the hit, and what comes from elsewhere. `stops` are the lengths at
    which a step ended.
    """

    request: Request
    run: Run
    ids: list[list[int]]
    outside: int
    boundaries: set[int]
    computed: int
    committed: int
    scratch: list[int] = field(default_factory=list)
    stops: set[int] = field(default_factory=set)

    @property
    def pids(self) -> list[int]:
        return self.run.pids

    @property
    def num_held(self) -> int:
        """Blocks, the null block left out."""
        return sum(block > 0 for ids in [*self.ids, self.scratch] for block in ids)


@dataclass(frozen=True)
class Expected:
    """A hit: its length, what was found, and how much of it the groups that are asked first have."""

    num_tokens: int
    num_found: int
    num_shared: int
    ids: list[list[int]]
