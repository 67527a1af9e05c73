"""What a request takes, in blocks: the one formula (invariant 12).

The planner promises by it what a cache admits by it. Three figures: what a request holds at most while its prompt is
computed (a reservation), what it holds while it decodes (steady state), and what its content alone comes to.

Knows nothing of: who holds a block, how many there are.
"""

from collections.abc import Callable, Sequence
from math import lcm

from kvpool.plan.kinds import CrossAttention, LayerKind, StateSpace

MAX_TOKENS = 2**31 - 1
"""No request is longer: positions are int32 in the kernels."""


def max_blocks(
    kinds: Sequence[LayerKind], num_tokens: int, max_in_flight_tokens: int, num_encoder_tokens: int = 0
) -> int:
    """The most blocks that one request of `num_tokens` tokens holds at any time, over groups of these kinds.

    Every kind has its block size. Holds while no more than `max_in_flight_tokens` tokens of it are in flight.
    """
    return sum(
        kind.max_live_blocks(_tokens(kind, num_tokens, num_encoder_tokens), size_of(kind), max_in_flight_tokens)
        + scratch_blocks(kind)
        for kind in kinds
    )


def steady_blocks(kinds: Sequence[LayerKind], num_tokens: int, num_encoder_tokens: int = 0) -> int:
    """The most blocks that a request holds while it decodes one token at a time at a length of `num_tokens`."""
    return max_blocks(kinds, num_tokens, 1, num_encoder_tokens)


def longest(fits: Callable[[int], bool]) -> int:
    """The most tokens that fit, where whatever is shorter fits too. At most MAX_TOKENS; 0 where not even one does."""
    found, too_long = 0, MAX_TOKENS + 1
    while too_long - found > 1:
        middle = (found + too_long) // 2
        if fits(middle):
            found = middle
        else:
            too_long = middle
    return found


def scratch_blocks(kind: LayerKind) -> int:
    """Blocks that a request holds beside its table."""
    return kind.num_scratch_blocks if isinstance(kind, StateSpace) else 0


def size_of(kind: LayerKind) -> int:
    """Its block size, which a layout has found."""
    assert kind.block_size is not None, "kinds of a layout have their block size"
    return kind.block_size


def _tokens(kind: LayerKind, num_tokens: int, num_encoder_tokens: int) -> int:
    return num_encoder_tokens if isinstance(kind, CrossAttention) else num_tokens


def live_tokens(kind: LayerKind, num_tokens: int, num_encoder_tokens: int = 0) -> int:
    """Of how many tokens a layer of this kind keeps something once `num_tokens` are computed, the last one included."""
    if isinstance(kind, CrossAttention):
        return num_encoder_tokens
    return num_tokens - kind.first_live(max(num_tokens - 1, 0))


def alignment(kinds: Sequence[LayerKind]) -> int:
    """Hits end at multiples of this many tokens, where blocks of all groups end; 0 without anything to look up."""
    return lcm(*(size_of(kind) for kind in kinds if not isinstance(kind, CrossAttention))) if kinds else 0
