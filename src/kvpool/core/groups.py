"""The groups of a cache: what follows, in blocks, from the kinds of their layers.

A group is a set of layers that keep the same thing and share a block table. All groups draw from one pool.
Knows nothing of: requests, who holds a block, what a block contains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm

from kvpool.errors import ConfigError
from kvpool.limits import MAX_GROUPS, whole_number
from kvpool.plan.demand import MAX_TOKENS, longest, max_blocks, scratch_blocks
from kvpool.plan.kinds import CrossAttention, FullAttention, LayerKind, StateSpace, cdiv
from kvpool.types import BlockHash, GroupId


@dataclass(frozen=True)
class Group:
    """One group. Its block i holds tokens i * block_size .. (i + 1) * block_size - 1, or the state after them.

    `scale` is how many hashing units a block has: its name is that of its last unit, which covers all before.
    """

    group_id: GroupId
    kind: LayerKind
    block_size: int
    scale: int

    @cached_property
    def is_state(self) -> bool:
        """A step writes only the last block that it reaches."""
        return isinstance(self.kind, StateSpace)

    @cached_property
    def is_windowed(self) -> bool:
        """Blocks fall out of use while the request goes on."""
        return not isinstance(self.kind, FullAttention | CrossAttention)

    @cached_property
    def is_encoder(self) -> bool:
        """Its blocks stand for the encoder's tokens, and are not looked up."""
        return isinstance(self.kind, CrossAttention)

    @cached_property
    def num_sink_blocks(self) -> int:
        """Blocks at the start that stay live."""
        return cdiv(self.kind.num_sinks, self.block_size)

    @cached_property
    def num_scratch_blocks(self) -> int:
        """Blocks that a request holds beside its table."""
        return scratch_blocks(self.kind)

    def names(self, chain: Sequence[BlockHash], start: int, stop: int) -> Sequence[BlockHash]:
        """The names of its full blocks start .. stop - 1 at most, from those of all hashing units."""
        scale = self.scale
        return chain[start:stop] if scale == 1 else chain[(start + 1) * scale - 1 : stop * scale : scale]

    def num_blocks(self, num_tokens: int) -> int:
        """The length of a table that reaches `num_tokens`, null blocks included."""
        return cdiv(num_tokens, self.block_size)

    def first_live_block(self, num_tokens: int) -> int:
        """Of a request of `num_tokens` computed tokens: blocks before this one are dead, but for the sinks.

        So a hit of `num_tokens` needs the blocks from here on, and the sinks.
        """
        return self.kind.first_live(num_tokens) // self.block_size

    def new_blocks(self, held: int, start: int, stop: int, num_ahead: int = 0) -> Sequence[int]:
        """The positions from `held` on that need a block for a step that computes tokens start .. stop - 1.

        `num_ahead` drafted tokens follow. Positions between that are not named here are passed over by a state, or are
        out of the window already.
        """
        end = cdiv(stop + num_ahead, self.block_size)
        if end <= held:
            return ()
        live = self.first_live_block(start)
        if self.is_state:
            last = range(max((stop - 1) // self.block_size, held), end)
            return (live, *last) if start and held <= live < last.start else last
        if live <= held:
            return range(held, end)
        return (*range(held, min(self.num_sink_blocks, live)), *range(live, end))


class Groups:
    """All groups of a cache, and where they agree.

    `unit` is the number of tokens that are hashed at a time: all block sizes are multiples of it. Hits end at multiples
    of `alignment`, where blocks of all groups end. `drops_last_block`: a hit leaves out the last aligned block that was
    found. `bundles` are the groups that are looked up, those of the same kind and block size together, and groups that
    keep everything first. `keep_all`: some group keeps everything. `is_plain`: it is the only one.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        block_size: int,
        *,
        drops_last_block: bool = False,
        max_in_flight_tokens: int,
    ) -> None:
        if isinstance(kinds, LayerKind):
            raise ConfigError(f"groups is {kinds!r}: a list of kinds is needed, one for each group")
        if not kinds:
            raise ConfigError("no groups are given: at least 1, such as FullAttention()")
        if len(kinds) > MAX_GROUPS:
            raise ConfigError(f"{len(kinds)} groups are given: at most {MAX_GROUPS} share a pool")
        for group_id, kind in enumerate(kinds):
            if not isinstance(kind, LayerKind):
                raise ConfigError(
                    f"groups[{group_id}] is {kind!r}: a kind of layers is needed, such as FullAttention()"
                )
        if max_in_flight_tokens < 1:
            raise ConfigError(f"max_in_flight_tokens is {max_in_flight_tokens}: a step computes at least 1 token")
        sizes = [_block_size(kind, block_size) for kind in kinds]
        found = [size for kind, size in zip(kinds, sizes, strict=True) if not isinstance(kind, CrossAttention)]
        if not found:
            raise ConfigError(f"all {len(kinds)} groups are cross attention: no group keeps the decoder's tokens")
        self.unit = gcd(*found)
        self.alignment = lcm(*found)
        if self.alignment > MAX_TOKENS:
            raise ConfigError(
                f"block sizes {sorted(set(found))} meet every {self.alignment} tokens only, {MAX_TOKENS} is the "
                "longest request: choose multiples of one another"
            )
        self.drops_last_block = drops_last_block
        self.max_in_flight_tokens = max_in_flight_tokens
        self.all = tuple(
            Group(group_id, replace(kind, block_size=size), size, max(size // self.unit, 1))
            for group_id, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
        )
        self.bundles = _bundles(self.all)
        self.states = tuple(kind for kind in kinds if isinstance(kind, StateSpace))
        self.is_plain = len(self.all) == 1 and isinstance(self.all[0].kind, FullAttention)
        self.keep_all = any(isinstance(group.kind, FullAttention) for group in self.all)
        self.are_windowed = any(group.is_windowed for group in self.all)
        self.decoder = tuple(group for group in self.all if not group.is_encoder)

    def __len__(self) -> int:
        return len(self.all)

    def require(self, group_id: GroupId) -> None:
        """IndexError unless there is such a group."""
        if not 0 <= group_id < len(self.all):
            raise IndexError(f"there is no group {group_id}: the cache has {len(self.all)}")

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every group, with its block size."""
        return tuple(group.kind for group in self.all)

    @cached_property
    def inner_ends(self) -> tuple[int, ...]:
        """Where blocks of some group end between two common borders, in tokens behind the first."""
        return tuple(sorted({end for size in self.block_sizes for end in range(size, self.alignment, size)}))

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Of the groups that keep the decoder's tokens, each once: a new block is needed behind a multiple of one."""
        return tuple(sorted({group.block_size for group in self.decoder}))

    @cached_property
    def slides(self) -> tuple[tuple[int, int], ...]:
        """Pairs (block size, remainder): a request of n tokens can give up a block only where n leaves one of them."""
        return tuple(sorted({(g.block_size, at) for g in self.decoder for at in g.kind.slides(g.block_size)}))

    def align(self, num_tokens: int) -> int:
        """The last common border at or before."""
        return num_tokens - num_tokens % self.alignment

    @property
    def num_dropped_tokens(self) -> int:
        """What a hit leaves out of what was found."""
        return self.alignment if self.drops_last_block else 0

    @property
    def smallest_hit(self) -> int | None:
        """The fewest tokens that a prompt must share before any can hit; None when none ever can."""
        if any(kind.checkpoints == "none" for kind in self.states):
            return None
        return self.alignment + self.num_dropped_tokens

    def max_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """The most blocks that one request of `num_tokens` tokens holds at any time (invariant 12).

        Holds while no more than `max_in_flight_tokens` of it are in flight.
        """
        return max_blocks(self.kinds, num_tokens, self.max_in_flight_tokens, num_encoder_tokens)

    def max_live_blocks(self, group: Group, num_tokens: int) -> int:
        """The most blocks that one request's table of this group holds at any time."""
        return group.kind.max_live_blocks(num_tokens, group.block_size, self.max_in_flight_tokens)

    def max_tokens(self, num_blocks: int, num_encoder_tokens: int = 0) -> int:
        """The longest request that these blocks hold: `max_blocks` turned round. At most MAX_TOKENS."""
        return longest(lambda num_tokens: self.max_blocks(num_tokens, num_encoder_tokens) <= num_blocks)


def _block_size(kind: LayerKind, default: int) -> int:
    size = whole_number("block_size", default if kind.block_size is None else kind.block_size)
    if size < 1:
        raise ConfigError(f"block_size is {size}: a block holds at least 1 token, 16 is usual")
    kind.validate(size)
    return size


def _bundles(groups: Sequence[Group]) -> tuple[tuple[Group, ...], ...]:
    bundles: dict[LayerKind, list[Group]] = {}
    for group in sorted(groups, key=lambda group: group.is_windowed):
        if not group.is_encoder:
            bundles.setdefault(group.kind, []).append(group)
    return tuple(tuple(bundle) for bundle in bundles.values())
