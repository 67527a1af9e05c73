"""How large the page of every layer is, when layers of several kinds share one pool.

All groups draw from one pool, so a block of any group must fit where a block of another was. Pages are made equal: a
page that divides the largest gets a larger block size, as many times; a page that does not is padded. A state has a
page of fixed size, usually a large one: it raises the block size of the attention layers until their page holds it.

Knows nothing of: groups, how many layers there are of a kind.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, isqrt
from typing import TypeAlias

from kvpool.errors import ConfigError
from kvpool.plan.kinds import ChunkedLocal, LayerKind, cdiv
from kvpool.plan.spec import CachedSpec, State

LayerName: TypeAlias = int | str

BLOCK_STEP = 16
"""A block size that a state raises is a multiple of this many tokens: attention kernels ask for it."""


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """A layer that keeps something, on one of `tp` ranks."""

    name: LayerName
    spec: CachedSpec
    tp: int
    sizes: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    """Its pages by block size, once asked for. Layers of equal specs share them: models have many layers, few specs."""

    @property
    def kind(self) -> LayerKind:
        return self.spec.kind

    @property
    def is_state(self) -> bool:
        """Whether its page is the same at every block size."""
        return isinstance(self.spec, State)

    def page_bytes(self, block_size: int) -> int:
        found = self.sizes.get(block_size)
        if found is None:
            found = self.sizes[block_size] = self.spec.page_bytes(block_size, self.tp)
        return found


@dataclass(frozen=True, slots=True)
class LayerPage:
    """The page that a layer gets: `page_bytes`, of which `kept_bytes` are used. The kind carries the block size."""

    layer: LayerName
    kind: LayerKind
    page_bytes: int
    kept_bytes: int


def own_pages(layers: Sequence[CachedLayer], block_size: int) -> list[LayerPage]:
    """Every layer's page as it is: right where all are of one kind, and each has memory of its own."""
    return [_page(layer, block_size) for layer in layers]


def padded_pages(layers: Sequence[CachedLayer], block_size: int) -> list[LayerPage]:
    """All pages as large as the largest, at one block size. ConfigError when a page cannot be padded."""
    block_size = _block_size_of_layers(layers, block_size)
    largest = max(layer.page_bytes(block_size) for layer in layers)
    return [_padded(layer, block_size, largest) for layer in layers]


def raised_pages(layers: Sequence[CachedLayer], block_size: int, step: int = BLOCK_STEP) -> list[LayerPage]:
    """All pages equally large: by a larger block size where that gives exactly the largest page, by padding elsewhere.

    A state raises block sizes in multiples of `step`. ConfigError when a page can be neither raised nor padded.
    """
    block_size = _block_size_of_layers(layers, block_size, step)
    largest = max(layer.page_bytes(block_size) for layer in layers)
    return [_raised(layer, block_size, largest) for layer in layers]


def stacked_pages(kinds: Sequence[Sequence[Sequence[CachedLayer]]], block_size: int) -> list[list[LayerPage]]:
    """The pages of every group, given the groups of every kind: pages differ, and a group's pages lie one on another.

    A kind gets a larger block size where as many more tokens still fit into the largest group's block: as many times as
    there is room when that fills it exactly, otherwise a power of two, so that hits keep a common border.
    """
    groups = [group for kind in kinds for group in kind]
    _require_padding(layer for group in groups for layer in group)
    tokens = max((_sum(group, 1) for group in groups if not group[0].is_state), default=0)
    state = max((_sum(group, 1) for group in groups if group[0].is_state), default=0)
    block_size = block_size_for(state, tokens, [group[0].kind for group in groups], block_size)
    block_bytes = max(_sum(group, block_size) for group in groups)
    return [
        [_page(layer, block_size * times) for layer in group]
        for kind in kinds
        for times in [_times(kind, block_size, block_bytes)]
        for group in kind
    ]


def block_size_for(
    state_bytes: int, token_bytes: int, kinds: Iterable[LayerKind], block_size: int, step: int = BLOCK_STEP
) -> int:
    """The block size at which `token_bytes` a token hold `state_bytes`: the given one, or a multiple of `step`.

    ConfigError when chunks do not end on the borders of any block that large.
    """
    if not token_bytes or token_bytes * block_size >= state_bytes:
        return block_size
    least = step * cdiv(state_bytes, step * token_bytes)
    chunk = gcd(*(kind.chunk_size for kind in kinds if isinstance(kind, ChunkedLocal)))
    fitting = [size for size in _divisors(chunk) if size >= least and size % step == 0]
    if chunk and not fitting:
        raise ConfigError(
            f"a state of {state_bytes:,} B and attention of {token_bytes:,} B a token cannot share a page: that takes "
            f"blocks of {least:,} tokens, and chunks of {chunk:,} do not end on their borders; "
            f"chunks of {cdiv(chunk, least) * least:,} do"
        )
    return min(fitting, default=least)


def fits(kind: LayerKind, block_size: int) -> bool:
    """Whether layers of this kind can have blocks of so many tokens."""
    try:
        kind.validate(block_size)
    except ConfigError:
        return False
    return True


def _page(layer: CachedLayer, block_size: int) -> LayerPage:
    kept = layer.page_bytes(block_size)
    return LayerPage(layer.name, _sized(layer.kind, block_size), kept, kept)


@lru_cache(maxsize=4096)
def _sized(kind: LayerKind, block_size: int) -> LayerKind:
    return replace(kind, block_size=block_size)


def _block_size_of_layers(layers: Sequence[CachedLayer], block_size: int, step: int = BLOCK_STEP) -> int:
    """The smallest at which the widest attention layer holds the largest state."""
    tokens = max((layer.page_bytes(1) for layer in layers if not layer.is_state), default=0)
    state = max((layer.page_bytes(1) for layer in layers if layer.is_state), default=0)
    return block_size_for(state, tokens, [layer.kind for layer in layers], block_size, step)


def _raised(layer: CachedLayer, block_size: int, largest: int) -> LayerPage:
    times, rest = divmod(largest, layer.page_bytes(block_size))
    if layer.is_state or rest or not fits(layer.kind, times * block_size):
        return _padded(layer, block_size, largest)
    return _page(layer, times * block_size)


def _times(groups: Sequence[Sequence[CachedLayer]], block_size: int, block_bytes: int) -> int:
    """How many times the block size these groups of one kind get."""
    layer = groups[0][0]
    times, rest = divmod(block_bytes, max(_sum(group, block_size) for group in groups))
    if rest:
        times = 1 << (times.bit_length() - 1)
    return 1 if layer.is_state or not fits(layer.kind, times * block_size) else times


def _sum(group: Sequence[CachedLayer], block_size: int) -> int:
    return sum(layer.page_bytes(block_size) for layer in group)


def _require_padding(layers: Iterable[CachedLayer]) -> None:
    for layer in layers:
        if not layer.spec.can_pad:
            raise ConfigError(f"layer {layer.name!r} has latent pages, which have to follow one another")


def _padded(layer: CachedLayer, block_size: int, largest: int) -> LayerPage:
    page = _page(layer, block_size)
    if page.kept_bytes < largest and not layer.spec.can_pad:
        below = largest // page.kept_bytes * page.kept_bytes
        raise ConfigError(
            f"layer {layer.name!r} cannot share a page with the others: its latent page of {page.kept_bytes:,} B is "
            f"not padded, and the largest page of {largest:,} B is no multiple of it; "
            f"{below:,} and {below + page.kept_bytes:,} B are the nearest that are"
        )
    return replace(page, page_bytes=largest)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return [*small, *(number // divisor for divisor in small)]
