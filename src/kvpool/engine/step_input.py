"""A step of the model as plain arrays: all that goes to whoever computes it, in this process or in another.

Owns: nothing; `StepBuilder` remembers how the rows of the last step sample, since they seldom change.
Knows nothing of: models, texts, why these requests run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.core.request import RequestLike
from kvpool.engine.batch import Batch
from kvpool.engine.generation import Generation
from kvpool.engine.sampling import Logprobs
from kvpool.engine.scheduler import Scheduler
from kvpool.errors import UsageError
from kvpool.types import NULL_BLOCK

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """How each row samples, an item a row; see `SamplingParams`.

    `seeds` are always given; `num_outputs` says which output of its request comes next. -1 in `num_logprobs` and
    `num_prompt_logprobs` for none. `targets` has the prompt's next token behind each token of the step, for rows with
    `num_prompt_logprobs`; -1 elsewhere.
    """

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: Ints
    seeds: Ints
    num_outputs: Ints
    num_logprobs: Ints
    num_prompt_logprobs: Ints
    targets: Ints


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """Rows of one step, one after the other: row i has `counts[i]` tokens, the last of them at `positions`' largest.

    The first `num_decoding` rows have one token each. Keys and values of token t go to slot `slots[g, t]` of group g
    (slot = block id * block_size + offset; below block_size: nowhere, it is the null block's); those of earlier tokens
    stand in the blocks of `block_tables[g][i]`, null blocks where nothing is kept, or behind the end. The state of
    token t, in a group of states, stands in block t // block_size of the row. Rows that `give` have all their tokens
    computed with this step, and want the next. `sampling` None: all take the likeliest token.
    """

    token_ids: Ints
    positions: Ints
    counts: Ints
    num_decoding: int
    slots: Ints
    block_tables: tuple[npt.NDArray[np.int32], ...]
    gives: npt.NDArray[np.bool_]
    sampling: SamplingRows | None = None

    @property
    def num_rows(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """The next token of each row, -1 where there is none; what was asked for of probabilities, by row."""

    token_ids: Ints
    logprobs: Mapping[int, Logprobs]
    prompt_logprobs: Mapping[int, Sequence[Logprobs]]


class Worker(Protocol):
    """Has the model, and the memory that block ids point into."""

    def execute(self, step: StepInput) -> StepAnswer:
        """Compute the step. What it raises ends the step: nothing of it counts as computed."""


class StepBuilder:
    """Makes arrays of the batches of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._sampled: list[RequestLike] = []
        self._sampling: SamplingRows | None = None

    def build(self, batch: Batch) -> StepInput:
        """The batch that was scheduled last. UsageError where it has requests that no model here can compute."""
        decoding, first = self._scheduler.decoding, batch.num_decoding
        chunks = list(batch)[first:]
        tokens, positions = [decoding.last_tokens], [decoding.num_tokens - 1]
        slots, gives = [decoding.slot_mapping()], [True] * first
        for request, start, count in chunks:
            _require_plain(request)
            stop = start + count
            tokens.append(np.array(request.token_ids[start:stop], np.int64))
            positions.append(np.arange(start, stop))
            table = self._cache.table(request)
            assert table is not None, f"request {request.request_id!r} runs without blocks"
            slots.append(
                np.stack([table.slot_mapping(start, stop, group.group_id) for group in self._cache.groups.all])
            )
            gives.append(stop == request.num_tokens)
        at = np.concatenate(positions)
        counts = np.array(batch.counts, np.int64)
        return StepInput(
            np.concatenate(tokens),
            at,
            counts,
            first,
            np.concatenate(slots, axis=1),
            tuple(self._block_tables(group.group_id, chunks) for group in self._cache.groups.all),
            np.array(gives, bool),
            self._sampling_of(batch, at[np.cumsum(counts) - 1]) if len(batch) else None,
        )

    def _block_tables(self, group_id: int, chunks: Sequence[tuple[RequestLike, int, int]]) -> npt.NDArray[np.int32]:
        """Decoding rows, then a row for each chunk."""
        decoding = self._scheduler.decoding.block_tables(group_id)
        if not chunks:
            return decoding
        tables = [self._cache.table(request) for request, _, _ in chunks]
        own = [table.block_ids[group_id] for table in tables if table is not None]
        columns = max(decoding.shape[1], *map(len, own))
        rows = np.full((len(decoding) + len(own), columns), NULL_BLOCK, np.int32)
        rows[: len(decoding), : decoding.shape[1]] = decoding
        for row, ids in enumerate(own, len(decoding)):
            rows[row, : len(ids)] = ids
        return rows

    def _sampling_of(self, batch: Batch, last: Ints) -> SamplingRows | None:
        """`last` is the position of each row's last token."""
        decodes = len(batch) == batch.num_decoding
        if not decodes or batch.requests != self._sampled:
            # Chunks have targets of their own, so only steps that decode alone can follow one another.
            self._sampled, self._sampling = list(batch.requests) if decodes else [], _sampling_rows(batch)
        if self._sampling is None:
            return None
        prompts = np.array([request.num_prompt_tokens for request in batch.requests], np.int64)
        self._sampling.num_outputs[:] = last + 1 - prompts
        return self._sampling


def _require_plain(request: RequestLike) -> None:
    if request.num_encoder_tokens:
        raise UsageError(f"request {request.request_id!r} has an encoder's input, which this engine does not compute")


def _sampling_rows(batch: Batch) -> SamplingRows | None:
    """None where all rows are greedy."""
    requests = [request for request in batch.requests if isinstance(request, Generation)]
    if all(request.sampling.is_greedy for request in requests):
        return None
    assert len(requests) == len(batch), "some requests say how they sample, and some do not"
    sampling = [request.sampling for request in requests]
    return SamplingRows(
        np.array([each.temperature for each in sampling], np.float32),
        np.array([each.top_p for each in sampling], np.float32),
        np.array([each.top_k for each in sampling], np.int64),
        np.array([request.seed for request in requests], np.int64),
        np.zeros(len(batch), np.int64),
        np.array([-1 if each.num_logprobs is None else each.num_logprobs for each in sampling], np.int64),
        np.array([-1 if each.num_prompt_logprobs is None else each.num_prompt_logprobs for each in sampling], np.int64),
        _targets(batch, requests),
    )


def _targets(batch: Batch, requests: Sequence[Generation]) -> Ints:
    targets = []
    for request, start, count in zip(requests, batch.starts, batch.counts, strict=True):
        stop, prompt = start + count, request.num_prompt_tokens
        known = request.token_ids[start + 1 : min(stop + 1, prompt)] if _tells_prompt(request, start) else []
        targets += known + [-1] * (count - len(known))
    return np.array(targets, np.int64)


def _tells_prompt(request: Generation, start: int) -> bool:
    return request.sampling.num_prompt_logprobs is not None and start < request.num_prompt_tokens - 1
