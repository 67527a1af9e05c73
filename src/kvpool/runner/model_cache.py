"""What a model of transformers takes for its cache: keys, values and states go to pages, and are read from there.

Owns: the pages of every layer, once the model has told their shapes; the states of one call while it runs.
Knows nothing of: which model calls.

A model calls `update` with new keys and values before attention, and then the attention function that is registered
here under `ATTENTION`. Layers with a state call the other methods. Layers are told apart by the number that `update`
gets: a module that serves several layers has only one of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface

from kvpool.errors import ConfigError
from kvpool.plan.kinds import FullAttention, SlidingWindow
from kvpool.runner.attention import Rule, attend_chunk, attend_decode, read
from kvpool.runner.forward import Forward
from kvpool.runner.paged_kernel import find_kernel
from kvpool.runner.pages import KVMemory, Place, Places
from kvpool.runner.states import CONV, RECURRENT, States

ATTENTION = "kvpool"


class PagedCache:
    """Of one model. `begin` says which rows are computed next, `end` that they are.

    `returns_all`: the model wants all earlier keys and values back from `update`, to make others of them (latent
    attention); then the attention function gets those.
    """

    def __init__(self, memory: KVMemory, places: Places, kv_dtype: torch.dtype | None, *, returns_all: bool) -> None:
        for layer, place in places.tokens.items():
            if not isinstance(place.kind, FullAttention | SlidingWindow):
                raise ConfigError(f"layer {layer} keeps {place.kind}, which this engine does not compute")
        self._memory = memory
        self._places = places
        self._kv_dtype = kv_dtype
        self._returns_all = returns_all
        self._pages: dict[int, list[torch.Tensor]] = {}
        self._states = States(memory, places)
        self._kernel = find_kernel(memory.device)
        self._forward: Forward | None = None

    @property
    def forward(self) -> Forward:
        assert self._forward is not None, "the cache is used outside of a call"
        return self._forward

    def begin(self, forward: Forward) -> None:
        self._forward = forward
        self._states.begin(forward)

    def end(self) -> None:
        """All states of the call are written to their blocks."""
        self._states.end()
        self._forward = None

    # -- what a model calls

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values, (batch, heads, tokens, dim), go to their slots."""
        place = self._places.tokens[layer]
        pages = self._pages.get(layer) or self._make_pages(layer, place, (key, value))
        blocks, offsets = self.forward.places(place.group_id, place.block_size)
        for page, new in zip(pages, (key, value), strict=True):
            page[blocks, offsets] = _as(page.dtype, _flat(new, self.forward.is_stacked))
        if self._returns_all or kwargs is None:
            return self._everything(place, pages, key.dtype)
        kwargs["paged_layer"] = layer
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:  # noqa: ARG002
        """Asked for by models that make positions of it; they are given all positions."""
        return 0

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get(layer, f"{CONV}{state_idx}")

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._states.get(layer, f"{RECURRENT}{state_idx}")

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """What was kept and what is new, one behind the other; the last columns of it are kept."""
        return self._states.convolve(layer_idx, f"{CONV}{state_idx}", new, conv_kernel_size or new.shape[-1])

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self._states.set(layer_idx, f"{RECURRENT}{state_idx}", new)
        return new

    def has_previous_state(self, layer: int = 0, state_idx: int = 0) -> bool:  # noqa: ARG002
        return self.forward.chunks[0].start > 0

    def is_recording_past(self, layer: int = 0) -> bool:  # noqa: ARG002
        return False

    # -- attention

    def source(self, layer: int | None) -> int | None:
        """The layer whose keys and values this one reads, where that is another."""
        return None if layer is None else self._places.shared.get(layer)

    def attend(
        self,
        layer: int | None,
        query: torch.Tensor,
        given: tuple[torch.Tensor, torch.Tensor],
        window: int | None,
        rule: Rule,
    ) -> torch.Tensor:
        """Queries (batch, heads, tokens, dim) to (batch, tokens, heads, value dim).

        Without a layer, keys and values of all tokens of all rows are `given`, one row behind the other.
        """
        forward = self.forward
        rows = _flat(query, forward.is_stacked)
        if layer is None:
            out = self._attend_given(rows, given, window, rule)
        else:
            out = self._attend_pages(layer, rows, window, rule)
        return out[:, None] if forward.is_stacked else out[None]

    def _attend_pages(self, layer: int, query: torch.Tensor, window: int | None, rule: Rule) -> torch.Tensor:
        forward, place, pages = self.forward, self._places.tokens[layer], self._pages[layer]
        kept = place.kind.window if isinstance(place.kind, SlidingWindow) else None
        if kept is not None and window != kept:
            raise ConfigError(f"layer {layer} looks back {window} tokens, and the plan keeps {kept}")
        if self._kernel is not None and self._kernel.takes(query, pages, rule):
            count = sum(chunk.count for chunk in forward.chunks)
            out = self._kernel.attend(query[:count], pages, forward.ragged(place.group_id), window, rule)
            return _filled_up([out], len(query))
        size, outs = place.block_size, []
        if forward.num_decoding:
            plan = forward.decode_plan(place.group_id, size, window, query.dtype)
            outs.append(attend_decode(query[: forward.num_decoding], pages, plan, rule))
        for row, chunk in enumerate(forward.chunks[forward.num_decoding :], forward.num_decoding):
            first = max(0, chunk.start - window + 1) // size if window else 0
            blocks = forward.tables[place.group_id][row, first : -(-chunk.stop // size)].to(query.device)
            begin, stop = max(0, chunk.start - window + 1) if window else 0, chunk.stop
            cut = slice(begin - first * size, stop - first * size)
            key, value = (read(each, blocks[None], query.dtype)[0, cut] for each in pages)
            outs.append(attend_chunk(query[chunk.at : chunk.at + chunk.count], key, value, window, rule))
        return _filled_up(outs, len(query))

    def _attend_given(
        self, query: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor], window: int | None, rule: Rule
    ) -> torch.Tensor:
        keys, values = (each[0].transpose(0, 1) for each in given)
        num_keys = sum(chunk.stop for chunk in self.forward.chunks)
        if len(keys) != num_keys:
            raise ConfigError(f"attention gets {len(keys)} keys where there are {num_keys}: its layer is not known")
        outs, first = [], 0
        for chunk in self.forward.chunks:
            begin, stop = first + (max(0, chunk.start - window + 1) if window else 0), first + chunk.stop
            rows = query[chunk.at : chunk.at + chunk.count]
            outs.append(attend_chunk(rows, keys[begin:stop], values[begin:stop], window, rule))
            first = stop
        return _filled_up(outs, len(query))

    def _everything(
        self, place: Place, pages: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens of all rows, one row behind the other: (1, heads, tokens, dim)."""
        rows: list[list[torch.Tensor]] = [[], []]
        for row, chunk in enumerate(self.forward.chunks):
            blocks = self.forward.tables[place.group_id][row, : -(-chunk.stop // place.block_size)]
            for found, page in zip(rows, pages, strict=True):
                found.append(read(page, blocks[None].to(page.device), dtype)[0, : chunk.stop])
        key, value = (torch.cat(found).transpose(0, 1)[None] for found in rows)
        return key, value

    def _make_pages(self, layer: int, place: Place, new: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = [(self._kv_dtype or x.dtype, (place.block_size, x.shape[1], x.shape[3])) for x in new]
        self._pages[layer] = self._memory.pages(place, parts)
        return self._pages[layer]


def _flat(tensor: torch.Tensor, is_stacked: bool) -> torch.Tensor:
    """(batch, heads, tokens, dim) to (tokens, heads, dim)."""
    return tensor[:, :, 0] if is_stacked else tensor[0].transpose(0, 1)


def _filled_up(outs: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
    """One behind the other; zeros for tokens of nobody."""
    missing = num_tokens - sum(map(len, outs))
    if missing:
        outs.append(outs[0].new_zeros(missing, *outs[0].shape[1:]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _as(dtype: torch.dtype, new: torch.Tensor) -> torch.Tensor:
    """What is too large for a smaller dtype becomes its largest number, not NaN."""
    if dtype.itemsize < new.dtype.itemsize:
        largest = torch.finfo(dtype).max
        new = new.clamp(-largest, largest)
    return new.to(dtype)


_UNDERSTOOD = frozenset({"dropout", "position_ids"})


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: PagedCache | None = None,
    paged_layer: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers. ConfigError for what it is told and would not do.

    A layer that does not call `update` reads the pages of another.
    """
    if paged is None:
        raise ConfigError(f"{type(module).__name__} does not hand on what its model is called with")
    wrong = [name for name, told in others.items() if name not in _UNDERSTOOD and not isinstance(told, bool | None)]
    is_causal = others.get("is_causal") is not False and getattr(module, "is_causal", True)
    if wrong or attention_mask is not None or not is_causal:
        raise ConfigError(
            f"{type(module).__name__} asks for {', '.join(wrong) or 'a mask of its own'}, which is not computed here"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if paged_layer is None:
        paged_layer = paged.source(getattr(module, "layer_idx", None))
    return paged.attend(paged_layer, query, (key, value), sliding_window, Rule(scale, softcap, s_aux)), None


AttentionInterface.register(ATTENTION, paged_attention)
