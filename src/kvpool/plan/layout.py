"""A layout: the groups of layers that share one pool of blocks, how large a block is, and what of it holds nothing.

Knows nothing of: how a layout was found, how many blocks there are.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from kvpool.plan.kinds import LayerKind, kind_in_words
from kvpool.plan.pages import LayerName, LayerPage


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table: one kind, one block size. A block of it is one page of each, and the padding."""

    kind: LayerKind
    """With its block size."""
    pages: tuple[LayerPage, ...]
    num_padding_layers: int = 0

    @property
    def layers(self) -> tuple[LayerName, ...]:
        return tuple(page.layer for page in self.pages)

    @property
    def page_bytes(self) -> int:
        """The largest page. All of a group's are equal, unless its layers differ in what they keep of a token."""
        return max(page.page_bytes for page in self.pages)

    @property
    def kept_bytes(self) -> int:
        """What of a block is used, padding of pages left out."""
        return sum(page.kept_bytes for page in self.pages)


@dataclass(frozen=True, slots=True)
class Waste:
    """What of the pool can hold nothing.

    `share` decides between layouts: of the bytes of one block of every group, those that no layer uses, whether they
    belong to a padding layer, to the padding of a page, or to a group that is smaller than the largest.

    The other two are what vLLM prints at start. `padding_layers_share`, "may waste at most": padding layers through
    layers of the same kind and block size, the largest of all kinds; it is reached when every block in use belongs to
    that kind. `page_share`, "padding page size by": the padding of a page through what the page keeps, the largest.
    """

    num_padding_layers: int
    padding_layers_share: Fraction
    page_share: Fraction
    share: Fraction

    def __str__(self) -> str:
        text = "no padding layers"
        if self.num_padding_layers:
            text = f"{_counted(self.num_padding_layers, 'padding layer')}, at most {percent(self.padding_layers_share)}"
        return f"{text}, pages padded by at most {percent(self.page_share)}" if self.page_share else text


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout that was not taken."""

    way: str
    num_groups: int
    share: Fraction
    """Its `Waste.share`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups over one pool. `KVCacheManager(num_blocks, groups=layout.kinds)` is the cache of it."""

    groups: tuple[Group, ...]
    block_bytes: int
    """Of one block of the pool on one rank, whichever group takes it: memory through this is the number of blocks."""
    way: str
    """How it was laid out, in words."""
    shared: tuple[tuple[LayerName, LayerName], ...] = ()
    """Layers that keep nothing since they read another layer's, and that layer."""
    uncached: tuple[LayerName, ...] = ()
    """Layers that keep nothing at all."""
    rejected: tuple[Alternative, ...] = ()
    """The other ways, least waste first."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every group, with its block size."""
        return tuple(group.kind for group in self.groups)

    @property
    def waste(self) -> Waste:
        kept = sum(group.kept_bytes for group in self.groups)
        padding = [_padding(groups) for groups in self._groups_by_kind()]
        pages = {(page.page_bytes, page.kept_bytes) for group in self.groups for page in group.pages}
        return Waste(
            num_padding_layers=sum(group.num_padding_layers for group in self.groups),
            padding_layers_share=max(padding, default=Fraction(0)),
            page_share=max((Fraction(size, kept) - 1 for size, kept in pages), default=Fraction(0)),
            share=1 - Fraction(kept, len(self.groups) * self.block_bytes) if self.groups else Fraction(0),
        )

    @property
    def why(self) -> str:
        """Why this layout and no other, in one sentence with numbers: its waste, and that of the next two."""
        if not self.groups:
            return self.way
        taken = f"{self.way}: {self.waste}, {percent(self.waste.share)} of the bytes hold nothing"
        others = [f"{percent(other.share)} with {other.way}" for other in self.rejected[:2]]
        return f"{taken}; it would be " + ", ".join(others) if others else taken

    def stage_block_bytes(self, layers: Collection[LayerName]) -> int:
        """The bytes of a block on a pipeline stage that has only these layers: its largest group decides."""
        here = frozenset(layers)
        own = ((page.page_bytes for page in group.pages if page.layer in here) for group in self.groups)
        return max(map(sum, own), default=0)

    def report(self) -> str:
        """Some lines of text for people."""
        lines = [f"{_counted(len(self.groups), 'group')}, blocks of {self.block_bytes:,} B"]
        lines += [f"  {_line(groups)}" for groups in self._groups_by_kind()]
        if self.shared:
            sources = len({source for _, source in self.shared})
            lines.append(f"  {_counted(len(self.shared), 'layer')} that read the cache of {sources} others")
        if self.uncached:
            lines.append(f"  {_counted(len(self.uncached), 'layer')} with nothing to keep")
        return "\n".join([*lines, self.why])

    def _groups_by_kind(self) -> Iterator[list[Group]]:
        """Groups of one kind and block size stand side by side."""
        return (list(groups) for _, groups in groupby(self.groups, key=lambda group: group.kind))


def percent(share: Fraction) -> str:
    """15.38 %"""
    return f"{100 * float(share):.2f} %"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _padding(groups: list[Group]) -> Fraction:
    layers = sum(len(group.pages) for group in groups)
    return Fraction(sum(group.num_padding_layers for group in groups), layers)


def _line(groups: list[Group]) -> str:
    layers = sum(len(group.pages) for group in groups)
    padding = sum(group.num_padding_layers for group in groups)
    pages = sorted({page.page_bytes for group in groups for page in group.pages})
    sizes = f"{pages[0]:,}" if len(pages) == 1 else f"{pages[0]:,} to {pages[-1]:,}"
    padded = f" + {padding} padding" if padding else ""
    kind = groups[0].kind
    what = f"{len(groups)} x {kind_in_words(kind)}: {_counted(layers, 'layer')}{padded}"
    return f"{what}, {kind.block_size:,} tokens a block, pages of {sizes} B"
