"""The weights of a model: tensor by tensor, layer by layer, and what is counted over them.

A weight says what tensor parallelism can divide it by: its units, which are heads, channels or rows of the vocabulary.
A rank has at least one unit, so a weight of one unit is on all ranks, and eight KV heads on sixteen ranks are there
twice. Weights with several copies are the experts of a layer.

Knows nothing of: configuration files, bytes, ranks.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TypeAlias


class Part(StrEnum):
    """What a weight belongs to."""

    EMBEDDINGS = "embeddings"
    HEAD = "head"
    ATTENTION = "attention"
    STATE = "state"
    """The projections of a recurrence, of whichever kind."""
    MLP = "mlp"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared experts"
    NORMS = "norms"
    TOWER = "tower"
    """Another model beside the language model: of images, or an encoder."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor, or one of each of `num_copies` experts. A vector has `num_inputs` 1."""

    part: Part
    name: str
    """The module within its layer, as checkpoints call it: `self_attn.q_proj`."""
    num_outputs: int
    num_inputs: int = 1
    num_units: int = 1
    """How many equal pieces it has, for ranks to share out; 1: every rank has all of it."""
    num_copies: int = 1
    num_active: int | None = None
    """How many of the copies a token goes through; None: all."""
    is_absorbed: bool = False
    """Engines keep it once more in the model's own elements, for queries and outputs to be multiplied by (MLA)."""

    @property
    def num_elements(self) -> int:
        return self.num_outputs * self.num_inputs * self.num_copies

    @property
    def num_active_elements(self) -> int:
        """Those that a token goes through."""
        copies = self.num_copies if self.num_active is None else self.num_active
        return self.num_outputs * self.num_inputs * copies


Weights: TypeAlias = tuple[Weight, ...]


@dataclass(frozen=True, slots=True)
class Parameters:
    """All weights of a model. `first` stand before the layers, `last` after them.

    A tied head is not among `last`: it is the embeddings. `draft` are the model's own draft layers (MTP), in no total.
    """

    first: Weights
    layers: tuple[Weights, ...]
    last: Weights
    is_tied: bool = False
    draft: tuple[Weights, ...] = ()

    @property
    def total(self) -> int:
        """All parameters, without draft layers; a tied head counts once."""
        return sum(times * weight.num_elements for weight, times in self._counted())

    @property
    def active(self) -> int:
        """Those that a token of text goes through, embeddings and head included: no towers, and its own experts."""
        return sum(times * weight.num_active_elements for weight, times in self._counted() if weight.part != Part.TOWER)

    @property
    def in_draft(self) -> int:
        """The parameters of the draft layers."""
        return num_elements(chain.from_iterable(self.draft))

    def of(self, *parts: Part) -> int:
        """The parameters of some parts; 0 for the head of a model whose head is tied."""
        return num_elements(weight for weight in self if weight.part in parts)

    def of_layer(self, index: int, *parts: Part) -> int:
        """The parameters of layer `index`, or of some parts of it."""
        return num_elements(weight for weight in self.layers[index] if not parts or weight.part in parts)

    def _counted(self) -> Iterator[tuple[Weight, int]]:
        """Every weight once, and how many layers have it."""
        alike = {id(layer): layer for layer in self.layers}
        for layer, times in Counter(map(id, self.layers)).items():
            yield from ((weight, times) for weight in alike[layer])
        yield from ((weight, 1) for weight in chain(self.first, self.last))

    def __iter__(self) -> Iterator[Weight]:
        yield from chain(self.first, *self.layers, self.last)


def num_elements(weights: Iterable[Weight]) -> int:
    """Of all of them."""
    return sum(weight.num_elements for weight in weights)


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection, and its bias where it has one. `is_row`: ranks divide its inputs, so each has all of the bias."""

    part: Part
    name: str
    num_outputs: int
    num_inputs: int
    num_units: int = 1
    has_bias: bool = False
    is_row: bool = False
    num_copies: int = 1
    num_active: int | None = None

    def __iter__(self) -> Iterator[Weight]:
        copies = (self.num_copies, self.num_active)
        yield Weight(self.part, self.name, self.num_outputs, self.num_inputs, self.num_units, *copies)
        if self.has_bias:
            units = 1 if self.is_row else self.num_units
            yield Weight(self.part, f"{self.name}.bias", self.num_outputs, 1, units, *copies)


def norm(name: str, size: int, *, has_bias: bool = False, num_units: int = 1) -> Weight:
    """The scale of a norm, and its bias."""
    return Weight(Part.NORMS, name, size * (2 if has_bias else 1), num_units=num_units)
