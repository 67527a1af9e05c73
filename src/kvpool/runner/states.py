"""States of requests: read from the block that a call begins in, written to the one that it ends in.

Owns: the states of one call while it runs.
Knows nothing of: attention.

A model changes some of these tensors in place, so whatever it was given last is what is written at the end.
"""

import torch
from torch.nn.functional import pad

from kvpool.runner.forward import Forward
from kvpool.runner.pages import KVMemory, Place, Places

CONV, RECURRENT = "conv", "recurrent"
"""How the parts of a state are called, with a number behind."""


class States:
    """All layers that have a state. A page holds a request's states of one layer, one part behind the other."""

    def __init__(self, memory: KVMemory, places: Places) -> None:
        self._memory = memory
        self._places = places.states
        self._pages: dict[int, dict[str, torch.Tensor]] = {}
        self._now: dict[int, dict[str, torch.Tensor]] = {}
        self._forward: Forward | None = None

    def begin(self, forward: Forward) -> None:
        self._forward, self._now = forward, {}

    def get(self, layer: int, part: str) -> torch.Tensor | None:
        """(rows, ...); None where the rows have nothing yet."""
        forward = self._of_call()
        found = self._now.setdefault(layer, {})
        if part not in found:
            if not forward.chunks[0].start:
                return None
            kept = self._pages[layer][part][self._blocks(layer, [chunk.start - 1 for chunk in forward.chunks])]
            kept = pad(kept, (1, 0)) if part.startswith(CONV) else kept
            found[part] = _with_rows(kept, forward.num_tokens if forward.is_stacked else 1)
        return found[part]

    def set(self, layer: int, part: str, state: torch.Tensor) -> None:
        self._now.setdefault(layer, {})[part] = state

    def convolve(self, layer: int, part: str, new: torch.Tensor, num_columns: int) -> torch.Tensor:
        """What was there and what is new along the last axis, of which the last columns are kept."""
        before = self.get(layer, part)
        if before is not None:
            whole = torch.cat([before, new], -1)
        else:
            whole = pad(new, (max(num_columns - new.shape[-1], 0), 0))
        self.set(layer, part, whole[..., -num_columns:])
        return whole

    def end(self) -> None:
        for layer, parts in self._now.items():
            pages = self._pages.get(layer) or self._make_pages(layer, parts)
            blocks = self._blocks(layer, [chunk.stop - 1 for chunk in self._of_call().chunks])
            for part, state in parts.items():
                pages[part][blocks] = _kept(part, state)[: len(blocks)]
        self._forward, self._now = None, {}

    def _of_call(self) -> Forward:
        assert self._forward is not None, "states are used outside of a call"
        return self._forward

    def _blocks(self, layer: int, positions: list[int]) -> torch.Tensor:
        """The block of each row in which the state after the token at its position stands."""
        place, forward = self._places[layer], self._of_call()
        columns = torch.tensor(positions) // place.block_size
        return forward.tables[place.group_id][torch.arange(len(columns)), columns].to(forward.device)

    def _make_pages(self, layer: int, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        place: Place = self._places[layer]
        # Widest elements first, so that all begin at a whole element.
        names = sorted(parts, key=lambda name: (-parts[name].element_size(), name))
        kept = [_kept(name, parts[name]) for name in names]
        views = self._memory.pages(place, [(state.dtype, state.shape[1:]) for state in kept])
        self._pages[layer] = dict(zip(names, views, strict=True))
        return self._pages[layer]


def _with_rows(states: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Zeros behind, for the tokens of nobody."""
    missing = num_rows - states.shape[0]
    return torch.cat([states, states.new_zeros(missing, *states.shape[1:])]) if missing else states


def _kept(part: str, state: torch.Tensor) -> torch.Tensor:
    """Of a convolution all columns but the oldest, which falls out before it is looked at again."""
    return state[..., 1:] if part.startswith(CONV) else state
