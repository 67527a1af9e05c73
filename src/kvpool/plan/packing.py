"""How vLLM lays out caches of compressed latents (DeepSeek V4): pages of a few sizes, and groups that share them.

All that keeps everything is one group; windows and the states of compressors are dealt to groups of about as many
layers. A block of the pool has, by release, as many of each page as the largest group has layers ("tuples"), as many
of each page as any group has ("slots"), or what the largest group needs ("groups"). Source: vLLM's planning code, 0.20
to 0.33, and the start-ups in vllm issue 51041, which come out to the token.

Knows nothing of: memory, requests.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvpool.errors import ConfigError
from kvpool.plan.kinds import FullAttention, LayerKind, SlidingWindow, cdiv
from kvpool.plan.layout import Group, Layout
from kvpool.plan.pages import LayerName, LayerPage
from kvpool.plan.spec import Latent, LayerSpec

_ENTRIES = 64
"""Latents in a page."""


def is_compressed(layers: Mapping[LayerName, LayerSpec]) -> bool:
    """Whether several tokens share a latent anywhere."""
    return any(isinstance(spec, Latent) and spec.compression > 1 for spec in layers.values())


def packed_layout(layers: Mapping[LayerName, LayerSpec], packing: str) -> Layout:
    """The layout of a model with compressed latents. ConfigError where that release has none."""
    if packing == "none":
        raise ConfigError("compressed latents came with vLLM 0.20.0: that rule or a later one counts them")
    pages = {name: _page(name, spec) for name, spec in layers.items() if isinstance(spec, Latent)}
    sizes = sorted({page.page_bytes for page in pages.values() if isinstance(page.kind, FullAttention)})
    if packing != "groups":
        pages = {name: replace(page, page_bytes=_class_of(page.page_bytes, sizes)) for name, page in pages.items()}
    full, *others = _by_kind(pages.values())
    size = _group_size([full, *others])
    groups = [full, *(part for kind in others for part in _deal(kind, size))]
    return Layout(
        tuple(Group(group[0].kind, tuple(group)) for group in groups),
        _block_bytes(groups, sizes, packing),
        f"{len(groups)} groups, compressed latents packed by {packing}",
    )


def _page(name: LayerName, spec: Latent) -> LayerPage:
    block_size = _block_size(spec)
    return LayerPage(
        name,
        replace(spec.kind, block_size=block_size),
        spec.page_bytes(block_size),
        spec.content_bytes(block_size),
    )


def _block_size(spec: Latent) -> int:
    """64 latents, of 4 tokens each in what keeps everything; 4 or 8 tokens of compressors' fp32 states."""
    if isinstance(spec.kind, FullAttention):
        return _ENTRIES * 4
    if spec.element_bytes < 4:
        return _ENTRIES
    return 4 if isinstance(spec.kind, SlidingWindow) and spec.kind.window <= 8 else 8


def _class_of(page_bytes: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size >= page_bytes), page_bytes)


def _by_kind(pages: Iterable[LayerPage]) -> list[list[LayerPage]]:
    """What keeps everything first; then as the layers come."""
    kinds: dict[LayerKind, list[LayerPage]] = {}
    for page in pages:
        kinds.setdefault(page.kind, []).append(page)
    return sorted(kinds.values(), key=lambda kind: not isinstance(kind[0].kind, FullAttention))


def _group_size(kinds: Sequence[Sequence[LayerPage]]) -> int:
    """The number of layers that leaves fewest places empty, the larger of two that leave equally many."""
    counts = [_num_tuples(kind) for kind in kinds]
    sizes = range(counts[0], max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _num_tuples(pages: Sequence[LayerPage]) -> int:
    """Of the page that most layers of the kind have."""
    by_size: dict[int, int] = {}
    for page in pages:
        by_size[page.page_bytes] = by_size.get(page.page_bytes, 0) + 1
    return max(by_size.values())


def _deal(pages: Sequence[LayerPage], size: int) -> list[list[LayerPage]]:
    """As cards are dealt, to as few groups as have room; layers of several pages keep theirs together."""
    num_groups = cdiv(_num_tuples(pages), size)
    return [list(pages[index::num_groups]) for index in range(num_groups)]


def _block_bytes(groups: Sequence[Sequence[LayerPage]], sizes: Sequence[int], packing: str) -> int:
    if packing == "groups":
        return max(sum(page.page_bytes for page in group) for group in groups)
    counts = [{size: sum(page.page_bytes == size for page in group) for size in sizes} for group in groups]
    if packing == "tuples":
        return max(max(count.values()) for count in counts) * sum(sizes)
    return sum(size * max(count[size] for count in counts) for size in sizes)
