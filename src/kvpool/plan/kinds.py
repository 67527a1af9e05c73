"""The kinds of layers: what each keeps of a request's tokens.

One question tells a kind from another: which earlier tokens does the token at position n still look at? That is what
`first_live` answers, for n tokens computed; everything else follows. The blocks that are live at n tokens are those
that overlap what is looked at; a request lets go of the others; and a prefix of n tokens can be hit when the blocks
live at n are all found, since the next token looks at nothing else. `slides` gives the remainders, by the block size,
of the lengths at which another block becomes the first live one; `max_live_blocks` the most blocks that are held at a
time while a request of so many tokens is computed, at most `max_in_flight_tokens` in a step.

Knows nothing of: heads, bytes, blocks' ids, who holds them.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from kvpool.errors import ConfigError


def cdiv(number: int, divisor: int) -> int:
    """Ceiling division of whole numbers."""
    return -(-number // divisor)


@dataclass(frozen=True, slots=True)
class _Everything:
    """Nothing ever falls out of use."""

    block_size: int | None = None

    num_sinks: ClassVar[int] = 0

    def validate(self, block_size: int) -> None:
        """Any block size will do."""

    def first_live(self, num_tokens: int) -> int:
        """0: everything stays live."""
        return 0

    def slides(self, block_size: int) -> tuple[int, ...]:
        """Never."""
        return ()

    def max_live_blocks(self, num_tokens: int, block_size: int, max_in_flight_tokens: int) -> int:
        """All blocks."""
        return cdiv(num_tokens, block_size)


@dataclass(frozen=True, slots=True)
class FullAttention(_Everything):
    """Layers that look at every earlier token; latent attention (MLA) too. `block_size` None: the cache's."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers whose token at position n looks at itself and the `window` - 1 tokens before it.

    The first `num_sinks` tokens of a request are looked at always (attention sinks).
    """

    window: int
    num_sinks: int = 0
    block_size: int | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.window) or self.window < 1:
            raise ConfigError(f"window is {self.window}: a token looks at least at itself, so a number from 1 on")
        if not _is_whole(self.num_sinks) or self.num_sinks < 0:
            raise ConfigError(f"num_sinks is {self.num_sinks}: 0 or more tokens at the start stay live")

    def validate(self, block_size: int) -> None:
        """Any block size will do."""

    def first_live(self, num_tokens: int) -> int:
        """The first of the last `window` - 1 tokens."""
        return max(num_tokens - self.window + 1, 0)

    def slides(self, block_size: int) -> tuple[int, ...]:
        """Where a block ends just before the window begins."""
        return ((self.window - 1) % block_size,)

    def max_live_blocks(self, num_tokens: int, block_size: int, max_in_flight_tokens: int) -> int:
        """The window and a chunk in flight, which need not begin on a border: hence one more, and the sinks."""
        behind = cdiv(self.window - 1 + max_in_flight_tokens, block_size) + 1
        return min(cdiv(num_tokens, block_size), behind + cdiv(self.num_sinks, block_size))


@dataclass(frozen=True, slots=True)
class ChunkedLocal:
    """Layers that look only at the tokens of their own chunk: positions are cut into chunks of `chunk_size`."""

    chunk_size: int
    block_size: int | None = None

    num_sinks: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not _is_whole(self.chunk_size) or self.chunk_size < 1:
            raise ConfigError(
                f"chunk_size is {self.chunk_size}: a token looks at least at itself, so a number from 1 on"
            )

    def validate(self, block_size: int) -> None:
        """ConfigError unless chunks end on block borders: a block of two chunks would be half dead."""
        if self.chunk_size % block_size:
            raise ConfigError(
                f"chunk_size {self.chunk_size} is no multiple of the block size {block_size}: "
                f"{_largest_divisor(self.chunk_size, block_size)} is the largest block size below that divides it"
            )

    def first_live(self, num_tokens: int) -> int:
        """The start of the chunk that the next token is in; at a border that is the next token itself."""
        return num_tokens // self.chunk_size * self.chunk_size

    def slides(self, block_size: int) -> tuple[int, ...]:
        """At some of the block borders: those that are chunk borders."""
        return (0,)

    def max_live_blocks(self, num_tokens: int, block_size: int, max_in_flight_tokens: int) -> int:
        """The current chunk, all but its last token, and the tokens in flight behind it."""
        return min(cdiv(num_tokens, block_size), cdiv(self.chunk_size - 1 + max_in_flight_tokens, block_size))


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Layers that keep one state of fixed size: Mamba, linear attention, short convolutions, RWKV.

    A block holds the state after its last token, so of the blocks that a step passes over only the last is written.
    The state is overwritten until it stands on a block border; there it becomes a checkpoint, that a hit of exactly so
    many tokens can start from. Which borders: `checkpoints` None leaves it to the cache's publication setting; a number
    of tokens is an interval of its own, beside the boundaries (0: these alone); "none" keeps none, and then no prefix
    can ever be hit. A request keeps at most `max_checkpoints` of an interval: where its prompt and outputs have room
    for more, the interval is widened. `num_scratch_blocks` blocks more are held by each request for its life: states
    after drafted tokens, that can be thrown away.
    """

    checkpoints: int | str | None = None
    max_checkpoints: int | None = None
    num_scratch_blocks: int = 0
    block_size: int | None = None

    num_sinks: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if isinstance(self.checkpoints, str) and self.checkpoints != "none":
            raise ConfigError(f'checkpoints is {self.checkpoints!r}: "none", an interval in tokens, or None')
        if self.checkpoints not in (None, "none") and (not _is_whole(self.checkpoints) or int(self.checkpoints) < 0):
            raise ConfigError(f"checkpoints is {self.checkpoints}: an interval of 0 or more tokens")
        if self.max_checkpoints is not None and (not _is_whole(self.max_checkpoints) or self.max_checkpoints < 0):
            raise ConfigError(f"max_checkpoints is {self.max_checkpoints}: 0 or more, or None for no limit")
        if not _is_whole(self.num_scratch_blocks) or self.num_scratch_blocks < 0:
            raise ConfigError(f"num_scratch_blocks is {self.num_scratch_blocks}: 0 or more")

    def validate(self, block_size: int) -> None:
        """Any block size will do: it is the distance of the borders."""

    def first_live(self, num_tokens: int) -> int:
        """The token that the state was last changed by."""
        return max(num_tokens - 1, 0)

    def slides(self, block_size: int) -> tuple[int, ...]:
        """Behind a border, when the state stands in another block than before."""
        return (1 % block_size,)

    def max_live_blocks(self, num_tokens: int, block_size: int, max_in_flight_tokens: int) -> int:
        """The state that a step starts from, and the one it ends with."""
        return min(cdiv(num_tokens, block_size), 2)


@dataclass(frozen=True, slots=True)
class CrossAttention(_Everything):
    """Decoder layers that look at the encoder's output: blocks for the encoder's tokens, whatever the decoder does.

    They are the request's own for its life, and are not looked up by prefix; `num_tokens` counts the encoder's tokens.
    """


LayerKind: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | StateSpace | CrossAttention


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def kind_in_words(kind: LayerKind) -> str:
    """For tables: sliding window 1,024."""
    match kind:
        case FullAttention():
            return "full attention"
        case SlidingWindow():
            return f"sliding window {kind.window:,}" + (f" with {kind.num_sinks} sinks" if kind.num_sinks else "")
        case ChunkedLocal():
            return f"chunks of {kind.chunk_size:,}"
        case CrossAttention():
            return "cross attention"
        case StateSpace():
            every = f" kept every {kind.checkpoints:,} tokens" if isinstance(kind.checkpoints, int) else ""
            return "state without checkpoints" if kind.checkpoints == "none" else f"state{every}"


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)
