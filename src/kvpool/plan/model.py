"""A model as the planner sees it: what each layer keeps, and how many weights it has.

Knows nothing of: configuration files, memory, devices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvpool.plan.pages import LayerName
from kvpool.plan.spec import LayerSpec

Specs: TypeAlias = Mapping[LayerName, LayerSpec]
"""What layers keep, by their names."""

Layer: TypeAlias = tuple[LayerSpec, ...]
"""What one layer of the model keeps: usually one thing; two where it has two paths, such as attention and a state."""


@dataclass(frozen=True, slots=True)
class Model:
    """Layers in the order of the model. `draft` are those of its own draft heads (MTP), in use with speculation."""

    name: str
    layers: tuple[Layer, ...]
    max_model_len: int | None = None
    """The longest request that it was made for, in tokens; None where its configuration has none."""
    kv_dtype: str = "auto"
    """What keys and values are kept in."""
    num_encoder_tokens: int = 0
    """What cross attention looks at, for a request that uses all of it."""
    draft: tuple[Layer, ...] = ()
    assumed: tuple[str, ...] = ()
    """What the configuration does not say and these figures stand on, a sentence each."""

    def caches(self, *, with_draft: bool = False) -> dict[LayerName, LayerSpec]:
        """The specs by layer, for `group_layers`: 0, 1, ...; "3.0", "3.1" where a layer keeps two things."""
        drafts = self.draft if with_draft else ()
        return dict((*named(self.layers), *named(drafts, "draft.")))


def named(layers: Sequence[Layer], prefix: str = "", first: int = 0) -> Iterator[tuple[LayerName, LayerSpec]]:
    """The specs of layers with their names, the first of them layer `first`."""
    for index, layer in enumerate(layers, first):
        for part, spec in enumerate(layer):
            yield name_of(index, part if len(layer) > 1 else None, prefix), spec


def name_of(index: int, part: int | None = None, prefix: str = "") -> LayerName:
    """What a cache of layer `index` is called."""
    if part is None:
        return f"{prefix}{index}" if prefix else index
    return f"{prefix}{index}.{part}"


def layer_and_part(name: LayerName) -> tuple[int, int]:
    """The layer of a cache, and which of the things that it keeps: 3 is (3, 0), "3.1" is (3, 1). Not of drafts."""
    index, _, part = str(name).partition(".")
    return int(index), int(part or 0)
