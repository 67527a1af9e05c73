"""The memory that block ids point into.

Owns: one piece of memory for all layers, a row for each block; every layer's pages are a part of each row.
Knows nothing of: requests, models. What a page of a layer holds is told by its first user, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpool.errors import ConfigError
from kvpool.plan.kinds import LayerKind, StateSpace
from kvpool.plan.layout import Layout
from kvpool.plan.model import layer_and_part


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's pages are: in blocks of this group, so many bytes of each from `offset` on."""

    group_id: int
    kind: LayerKind
    offset: int
    num_bytes: int

    @property
    def block_size(self) -> int:
        assert self.kind.block_size is not None, "a layout gives every group a block size"
        return self.kind.block_size


@dataclass(frozen=True, slots=True)
class Places:
    """Of every layer that keeps something, by its number: its tokens' keys and values, its state, or both.

    `shared`: layers that keep nothing and read another's, and that layer.
    """

    tokens: dict[int, Place]
    states: dict[int, Place]
    shared: dict[int, int]

    @staticmethod
    def of(layout: Layout) -> "Places":
        """Pages of a group lie one behind the other."""
        tokens: dict[int, Place] = {}
        states: dict[int, Place] = {}
        for group_id, group in enumerate(layout.groups):
            offset = 0
            for page in group.pages:
                place = Place(group_id, group.kind, offset, page.kept_bytes)
                (states if isinstance(group.kind, StateSpace) else tokens)[layer_and_part(page.layer)[0]] = place
                offset += page.page_bytes
        shared = {layer_and_part(name)[0]: layer_and_part(source)[0] for name, source in layout.shared}
        return Places(tokens, states, shared)


class KVMemory:
    """`num_blocks` blocks of `block_bytes` bytes.

    On a CPU new memory is all NaN, so that what was never written shows. Elsewhere it is zeros: kernels may multiply by
    nothing what they do not look at.
    """

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device) -> None:
        fill = 0xFF if device.type == "cpu" else 0
        self._bytes = torch.full((num_blocks, block_bytes), fill, dtype=torch.uint8, device=device)

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    def pages(self, place: Place, parts: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
        """The pages of a layer, a view for each part: (num_blocks, *shape). ConfigError when they are larger than that.

        A part is what a page has in one piece: its dtype and shape.
        """
        start, views = place.offset, []
        for dtype, shape in parts:
            size = dtype.itemsize * _product(shape)
            views.append(self._bytes[:, start : start + size].view(dtype).unflatten(1, tuple(shape)))
            start += size
        if start - place.offset > place.num_bytes:
            raise ConfigError(
                f"a page of the model takes {start - place.offset:,} bytes, and the plan counts {place.num_bytes:,}: "
                "its configuration says something else than its code"
            )
        return views


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
