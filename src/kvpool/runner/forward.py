"""One call of the model: some rows of a step, as tensors.

Knows nothing of: the model, where pages are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch.nn.functional import pad

from kvpool.engine.step_input import StepInput
from kvpool.runner.attention import DecodePlan, plan_decode
from kvpool.runner.paged_kernel import Ragged

FULL = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one request, at `at` .. `at` + `count` of the call; its tokens `start` .. `stop` - 1."""

    row: int
    at: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class Forward:
    """Rows of a step that are computed in one call. The first `num_decoding` have one token each.

    All rows lie one after the other, or, with `is_stacked`, each in a row of a batch; then all have one token. Behind
    them there may be tokens of nobody, which go to the null block.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    chunks: Sequence[Chunk]
    """All rows, those that decode too."""
    num_decoding: int
    slots: torch.Tensor
    """int64, shape (groups, tokens)."""
    tables: Sequence[torch.Tensor]
    """Of each group: int64, shape (rows, blocks); on the CPU."""
    device: torch.device
    is_stacked: bool = False
    _plans: dict[tuple[int, int | None], DecodePlan] = field(default_factory=dict)
    _places: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _ragged: dict[int, Ragged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert not self.is_stacked or self.num_decoding == len(self.chunks), "stacked rows have one token each"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def places(self, group_id: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of every token in a group; made once for all layers."""
        places = self._places.get(group_id)
        if places is None:
            slots = self.slots[group_id]
            places = self._places[group_id] = slots // block_size, slots % block_size
        return places

    def decode_plan(self, group_id: int, block_size: int, window: int | None, dtype: torch.dtype) -> DecodePlan:
        """What the rows that decode look at; made once for all layers."""
        plan = self._plans.get((group_id, window))
        if plan is None:
            lengths = torch.tensor([chunk.stop for chunk in self.chunks[: self.num_decoding]])
            plan = plan_decode(self.tables[group_id][: self.num_decoding], lengths, block_size, window, dtype)
            plan = self._plans[group_id, window] = _moved(plan, self.device)
        return plan

    def ragged(self, group_id: int) -> Ragged:
        """All rows, as a kernel that reads pages is told them; made once for all layers."""
        ragged = self._ragged.get(group_id)
        if ragged is None:
            counts = [chunk.count for chunk in self.chunks]
            stops = [chunk.stop for chunk in self.chunks]
            starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, *accumulate(counts)], stops))
            ragged = self._ragged[group_id] = Ragged(
                starts.to(self.device),
                lengths.to(self.device),
                self.tables[group_id].to(self.device, torch.int32),
                max(counts),
                max(stops),
            )
        return ragged


def forwards(
    step: StepInput, device: torch.device, few: frozenset[int], *, has_states: bool, is_gradual: bool
) -> Iterator[Forward]:
    """The calls that make a step: one, unless the model has states. `few`: see `num_filled_up`.

    A state is of one request, and models mix up the states of tokens that lie one after the other: then rows that
    decode are a batch, and every chunk has a call of its own. With `is_gradual` a chunk that goes on from a state has a
    call for every token.
    """
    stops = np.cumsum(step.counts)
    tables = [torch.from_numpy(table.astype(np.int64)) for table in step.block_tables]
    chunks = [
        Chunk(row, int(stop - count), int(step.positions[stop - count]), int(step.positions[stop - 1]) + 1)
        for row, (stop, count) in enumerate(zip(stops, step.counts, strict=True))
    ]
    whole = Forward(
        torch.from_numpy(step.token_ids).to(device),
        torch.from_numpy(step.positions).to(device),
        chunks,
        step.num_decoding,
        torch.from_numpy(np.ascontiguousarray(step.slots)).to(device),
        tables,
        device,
    )
    if not has_states:
        yield _filled_up(whole, few)
        return
    if step.num_decoding:
        decoding = _part(whole, chunks[: step.num_decoding])
        yield _filled_up(replace(decoding, num_decoding=step.num_decoding, is_stacked=True), few)
    for chunk in chunks[step.num_decoding :]:
        if is_gradual and chunk.start and chunk.count > 1:
            for offset in range(chunk.count):
                at = chunk.start + offset
                yield _part(whole, [Chunk(chunk.row, chunk.at + offset, at, at + 1)])
        else:
            yield _part(whole, [chunk])


def num_filled_up(num_tokens: int, few: frozenset[int]) -> int:
    """How many tokens are computed for these: as many as `FULL` for numbers that take longer."""
    return FULL if num_tokens in few else num_tokens


def _filled_up(call: Forward, few: frozenset[int]) -> Forward:
    missing = num_filled_up(call.num_tokens, few) - call.num_tokens
    if not missing:
        return call
    token_ids, positions, slots = (pad(each, (0, missing)) for each in (call.token_ids, call.positions, call.slots))
    return replace(call, token_ids=token_ids, positions=positions, slots=slots, _places={})


def _part(whole: Forward, chunks: Sequence[Chunk]) -> Forward:
    """Some rows that lie side by side."""
    first, stop = chunks[0].at, chunks[-1].at + chunks[-1].count
    rows = slice(chunks[0].row, chunks[-1].row + 1)
    return Forward(
        whole.token_ids[first:stop],
        whole.positions[first:stop],
        [replace(chunk, at=chunk.at - first) for chunk in chunks],
        0,
        whole.slots[:, first:stop],
        [table[rows] for table in whole.tables],
        whole.device,
    )


def _moved(plan: DecodePlan, device: torch.device) -> DecodePlan:
    if device.type == "cpu":
        return plan
    parts = [
        replace(
            part,
            rows=None if part.rows is None else part.rows.to(device),
            block_ids=part.block_ids.to(device),
            mask=part.mask.to(device),
            unseen=part.unseen.to(device),
        )
        for part in plan.parts
    ]
    shared = [replace(each, rows=each.rows.to(device), block_ids=each.block_ids.to(device)) for each in plan.shared]
    return DecodePlan(tuple(parts), tuple(shared))
