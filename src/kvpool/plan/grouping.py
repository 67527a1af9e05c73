"""Layers to groups that share one pool: every way that could work, and the one that wastes least.

One kind of layer is one group. With several kinds, groups have equally many layers, padding layers among them: as many
as there are of the rarest kind, or of the commonest. Layer i of a kind goes to group i mod n, so that a pipeline stage,
whose layers follow one another, has its part of every group.

Layers of one kind that keep different amounts of a token stand in one group with pages of their own, or in groups of
their own with equal pages: whatever wastes less, unless the latter needs more than twice as many groups, since every
group is one more block table for every request.

With two kinds the commonest wastes less exactly when it is under 1.5 times the rarest, which is the rule that vLLM has:
a of one and b of the other, a < b < 2a, take 3a places in groups of a and 2b in groups of b.

Windows are never widened to full attention to make things fit: that would change, silently, what a cache holds.

Knows nothing of: how many blocks there are, how long requests are.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import TypeAlias, TypeVar

from kvpool.errors import ConfigError
from kvpool.plan.kinds import cdiv
from kvpool.plan.layout import Alternative, Group, Layout
from kvpool.plan.pages import (
    BLOCK_STEP,
    CachedLayer,
    LayerName,
    LayerPage,
    own_pages,
    padded_pages,
    raised_pages,
    stacked_pages,
)
from kvpool.plan.rules import Rule
from kvpool.plan.spec import CachedSpec, EncoderOnly, Latent, LayerSpec, SharedKV, require_whole

Layers: TypeAlias = (
    Mapping[LayerName, LayerSpec] | Mapping[int, LayerSpec] | Mapping[str, LayerSpec] | Sequence[LayerSpec]
)
"""Specs by name, in the order of the model. Layers without names are called 0, 1, 2, ..."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_layers(layers: Layers, block_size: int = 16, tp: int = 1) -> Layout:
    """The layout that wastes least, with the others in `rejected`.

    `block_size` is the smallest that a group may have; pages are those of one of `tp` ranks. Where two ways waste
    equally much, groups of the rarest kind win, and raised block sizes over padding. ConfigError when there are no
    layers, when a kind cannot have blocks of that size, and when two kinds cannot share a page.
    """
    best, *others = layouts(layers, block_size, tp)
    rejected = (Alternative(other.way, len(other.groups), other.waste.share) for other in others)
    return replace(best, rejected=tuple(rejected))


def layouts(layers: Layers, block_size: int = 16, tp: int = 1) -> tuple[Layout, ...]:
    """Every layout that works, least waste first. `group_layers` takes the first."""
    cached, shared, uncached = _sorted_out(_named(layers), block_size, tp)
    whole = lcm(block_size, *(layer.spec.compression for layer in cached if isinstance(layer.spec, Latent)))
    found = sorted(_candidates(cached, whole), key=lambda layout: layout.waste.share)
    return tuple(replace(layout, shared=shared, uncached=uncached) for layout in found)


def layout_of_vllm(layers: Layers, block_size: int, tp: int, rule: Rule) -> Layout:
    """The layout that a release of vLLM makes: block sizes raised until pages are equal, states padded, and by release
    other pages too. Layers of unequal heads are kept apart, unless all are of one kind.

    Groups have the layers of the rarest kind; those of the commonest while these are few enough more. ConfigError where
    that release has no layout.
    """
    cached, shared, uncached = _sorted_out(_named(layers), block_size, tp)
    kinds = _buckets(cached, lambda layer: layer.kind)
    for kind in kinds:
        kind.validate(block_size)
    if len(kinds) < 2:
        (layout,) = _candidates(cached, block_size)
    else:
        has_latents = any(isinstance(layer.spec, Latent) for layer in cached)
        pages = raised_pages(cached, block_size, rule.state_step_of_latents if has_latents else BLOCK_STEP)
        pairs = list(zip(cached, pages, strict=True))
        if not rule.pads_pages:
            _require_equal_pages(pairs, rule)
        by_spec = _buckets(pairs, lambda pair: (pair[1].kind, pair[0].spec)).values()
        buckets = [[page for _, page in bucket] for bucket in by_spec]
        rarest, *_, commonest = sorted(map(len, buckets))
        layout = _padded_groups(buckets, commonest if commonest < rule.most_uneven * rarest else rarest)
    return replace(layout, shared=shared, uncached=uncached)


def _require_equal_pages(pairs: Iterable[tuple[CachedLayer, LayerPage]], rule: Rule) -> None:
    """ConfigError where a page of attention would have to be padded."""
    for layer, page in pairs:
        if not layer.is_state and page.page_bytes > page.kept_bytes:
            raise ConfigError(
                f"{rule.name} has no layout for these layers: the page of layer {layer.name!r}, {page.kept_bytes:,} B, "
                f"does not divide the largest, {page.page_bytes:,} B; 0.24.0 and later pad it, and so does kvpool"
            )


def _sorted_out(
    specs: Mapping[LayerName, LayerSpec], block_size: int, tp: int
) -> tuple[list[CachedLayer], tuple[tuple[LayerName, LayerName], ...], tuple[LayerName, ...]]:
    """Layers that keep something, those that read another's, and those that keep nothing."""
    require_whole("block_size", block_size, 1)
    require_whole("tp", tp, 1)
    sizes: dict[CachedSpec, dict[int, int]] = {}
    cached = [
        CachedLayer(name, spec, tp, sizes.setdefault(spec, {}))
        for name, spec in specs.items()
        if isinstance(spec, CachedSpec)
    ]
    shared = tuple((name, spec.source) for name, spec in specs.items() if isinstance(spec, SharedKV))
    return cached, shared, tuple(name for name, spec in specs.items() if isinstance(spec, EncoderOnly))


def _candidates(layers: Sequence[CachedLayer], block_size: int) -> list[Layout]:
    """In the order in which they are preferred."""
    if not layers:
        return [Layout((), 0, "no layer keeps anything")]
    kinds = _buckets(layers, lambda layer: layer.kind)
    for kind in kinds:
        kind.validate(block_size)
    if len(kinds) == 1:
        return [_one_group(own_pages(layers, block_size))]
    found = _those_that_work(
        lambda: _of_equal_pages(raised_pages(layers, block_size)),
        lambda: _of_stacked_pages(kinds.values(), block_size),
        lambda: _of_equal_pages(padded_pages(layers, block_size)),
    )
    return [layout for layout in found if len(layout.groups) <= _most_groups(kinds.values())] or found


def _most_groups(kinds: Collection[Sequence[CachedLayer]]) -> int:
    """Twice as many as there are when only kinds are kept apart."""
    rarest = min(map(len, kinds))
    return 2 * sum(cdiv(len(kind), rarest) for kind in kinds)


def _those_that_work(*ways: Callable[[], list[Layout]]) -> list[Layout]:
    """Without repetitions. The first ConfigError when there are none."""
    found: dict[tuple[Group, ...], Layout] = {}
    errors: list[ConfigError] = []
    for way in ways:
        try:
            for layout in way():
                found.setdefault(layout.groups, layout)
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return list(found.values())


def _one_group(pages: Sequence[LayerPage]) -> Layout:
    """No two groups, no two pages that have to be equal: nothing is wasted."""
    block_bytes = sum(page.page_bytes for page in pages)
    return Layout((Group(pages[0].kind, tuple(pages)),), block_bytes, "one kind of layer, one group")


def _of_equal_pages(pages: Sequence[LayerPage]) -> list[Layout]:
    """Groups of equally many equal pages, for both group sizes."""
    buckets = _buckets(pages, lambda page: page.kind).values()
    return [_padded_groups(buckets, size) for size in _group_sizes(buckets)]


def _padded_groups(buckets: Collection[Sequence[LayerPage]], size: int) -> Layout:
    groups = tuple(
        Group(pages[0].kind, tuple(pages), size - len(pages)) for bucket in buckets for pages in _deal(bucket, size)
    )
    way = f"{len(groups)} groups of {size} layers, blocks of {_block_sizes(groups)} tokens"
    return Layout(groups, size * groups[0].page_bytes, way)


def _of_stacked_pages(kinds: Collection[Sequence[CachedLayer]], block_size: int) -> list[Layout]:
    """Where layers of a kind differ in their pages: groups whose pages only together are equally large."""
    if all(len({layer.page_bytes(1) for layer in kind}) == 1 for kind in kinds):
        return []
    return [_stacked_groups(kinds, size, block_size) for size in _group_sizes(kinds)]


def _stacked_groups(kinds: Collection[Sequence[CachedLayer]], size: int, block_size: int) -> Layout:
    pages = stacked_pages([_deal(kind, size) for kind in kinds], block_size)
    groups = tuple(Group(group[0].kind, tuple(group)) for group in pages)
    block_bytes = max(sum(page.page_bytes for page in group) for group in pages)
    way = f"{len(groups)} groups of up to {size} unequal layers, blocks of {_block_sizes(groups)} tokens"
    return Layout(groups, block_bytes, way)


def _group_sizes(buckets: Collection[Sequence[object]]) -> list[int]:
    """As many as there are of the rarest, and of the commonest."""
    counts = [len(bucket) for bucket in buckets]
    return list(dict.fromkeys((min(counts), max(counts))))


def _deal(bucket: Sequence[T], size: int) -> list[Sequence[T]]:
    """As cards are dealt, to as few groups as have room for all."""
    num_groups = cdiv(len(bucket), size)
    return [bucket[index::num_groups] for index in range(num_groups)]


def _buckets(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items of equal keys together, in the order in which they first come."""
    buckets: dict[K, list[T]] = {}
    for item in items:
        buckets.setdefault(key(item), []).append(item)
    return buckets


def _block_sizes(groups: Iterable[Group]) -> str:
    *sizes, last = sorted({group.kind.block_size or 0 for group in groups})
    return f"{', '.join(f'{size:,}' for size in sizes)} and {last:,}" if sizes else f"{last:,}"


def _named(layers: Layers) -> dict[LayerName, LayerSpec]:
    """ConfigError for what is no name or no spec, and for a source that keeps nothing itself."""
    specs: dict[LayerName, LayerSpec] = dict(layers.items() if isinstance(layers, Mapping) else enumerate(layers))
    if not specs:
        raise ConfigError("no layers are given: 1 or more")
    for name, spec in specs.items():
        if isinstance(name, bool) or not isinstance(name, int | str):
            raise ConfigError(f"a layer is called {name!r}: a text or a whole number")
        if not isinstance(spec, LayerSpec):
            raise ConfigError(f"layer {name!r} is {spec!r}: Attention, Latent, State, SharedKV or EncoderOnly")
        if isinstance(spec, SharedKV):
            _require_source(name, spec.source, specs)
    return specs


def _require_source(name: LayerName, source: LayerName, specs: Mapping[LayerName, LayerSpec]) -> None:
    its_spec = specs.get(source)
    if its_spec is None:
        raise ConfigError(f"layer {name!r} reads the cache of {source!r}, which is none of the {len(specs)} layers")
    if isinstance(its_spec, SharedKV):
        raise ConfigError(f"layer {name!r} reads the cache of {source!r}, which reads that of {its_spec.source!r}")
    if isinstance(its_spec, EncoderOnly):
        raise ConfigError(f"layer {name!r} reads the cache of {source!r}, which keeps nothing")
