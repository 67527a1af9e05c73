"""What layers of states keep, measured: the tensors that transformers has after a token, and a model with their bytes.

A configuration tells what fast kernels keep. The torch code that runs here keeps recurrent states in fp32, so what is
planned must be what is kept. Of a convolution it has a column more, the oldest, which is never looked at again.

Knows nothing of: blocks, where states are saved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

from kvpool.errors import ConfigError, MissingExtraError
from kvpool.plan.model import Layer, Model
from kvpool.plan.spec import State

try:
    import torch
    from transformers import DynamicCache
except ImportError as error:
    raise MissingExtraError(error.name or "torch", "engine") from error


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a layer's state, of one request: `part` is "conv" or "recurrent", `state_index` transformers'."""

    part: str
    state_index: int
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


States: TypeAlias = Mapping[int, tuple[StateTensor, ...]]
"""By layer, those without states left out. Widest elements first, so that all begin at a whole element."""


def measure_states(model: Any) -> States:
    """Run one token, with transformers' own attention. The model is as it was afterwards."""
    cache = DynamicCache(config=model.config)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device), cache=cache, use_cache=True)
    finally:
        model.set_attn_implementation(before)
    found = {index: _tensors(layer) for index, layer in enumerate(cache.layers)}
    return {index: tensors for index, tensors in found.items() if tensors}


def _tensors(layer: Any) -> tuple[StateTensor, ...]:
    parts = {"recurrent": getattr(layer, "recurrent_states", {}), "conv": getattr(layer, "conv_states", {})}
    tensors = [
        _kept(part, index, state)
        for part, states in parts.items()
        for index, state in states.items()
        if state is not None
    ]
    return tuple(sorted(tensors, key=lambda tensor: -tensor.element_bytes))


def _kept(part: str, index: int, state: torch.Tensor) -> StateTensor:
    *others, last = state.shape[1:]
    shape = (*others, last - 1 if part == "conv" else last)
    return StateTensor(part, index, shape, str(state.dtype).removeprefix("torch."), state.element_size())


def with_states(model: Model, states: States) -> Model:
    """The model with the bytes that were measured. ConfigError where another layer has states than it says."""
    said = {index for index, layer in enumerate(model.layers) if any(isinstance(spec, State) for spec in layer)}
    if said != states.keys():
        odd = min(said ^ states.keys())
        does = "has" if odd in states else "does not have"
        raise ConfigError(f"{model.name}: layer {odd} {does} a state here, and its configuration says otherwise")
    return replace(
        model, layers=tuple(_layer(layer, states.get(index, ())) for index, layer in enumerate(model.layers))
    )


def _layer(layer: Layer, tensors: Sequence[StateTensor]) -> Layer:
    conv, recurrent = (sum(each.num_bytes for each in tensors if each.part == part) for part in ("conv", "recurrent"))
    return tuple(
        State(1, conv_bytes=conv, recurrent_bytes=recurrent, kind=spec.kind) if isinstance(spec, State) else spec
        for spec in layer
    )
