"""A step of the model as plain arrays: all that goes to whoever computes it, in this process or in another.

Owns: nothing; `StepBuilder` remembers how the rows of the last step sample, since they seldom change.
Knows nothing of: models, texts, why these requests run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.core.request import RequestLike
from kvpool.engine.batch import Batch
from kvpool.engine.generation import Generation
from kvpool.engine.sampling import GREEDY, Logprobs
from kvpool.engine.scheduler import Scheduler
from kvpool.errors import UsageError
from kvpool.types import NULL_BLOCK

Ints = npt.NDArray[np.int64]
_MANY = 256


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
        """Compute the step. What it raises ends the step: nothing of it counts as computed.

        States are moved on in place, so that after a step that failed its requests have to begin anew: end or preempt
        them, do not run the step again.
        """


class StepBuilder:
    """Makes arrays of the batches of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._ways = _Ways()
        self._sampled: list[RequestLike] = []
        self._sampling: SamplingRows | None = None
        self._num_prompt_tokens = np.zeros(0, np.int64)

    def build(self, batch: Batch) -> StepInput:
        """The batch that was scheduled last. UsageError where it has requests that no model here can compute."""
        decoding, first = self._scheduler.decoding, batch.num_decoding
        chunks = list(islice(batch, first, None))
        tokens, positions = [decoding.last_tokens], [decoding.num_tokens - 1]
        slots, gives = [decoding.slot_mapping()], np.ones(len(batch), bool)
        for row, (request, start, count) in enumerate(chunks, first):
            _require_plain(request)
            stop = start + count
            tokens.append(np.array(request.token_ids[start:stop], np.int64))
            positions.append(np.arange(start, stop))
            table = self._cache.table(request)
            assert table is not None, f"request {request.request_id!r} runs without blocks"
            slots.append(
                np.stack([table.slot_mapping(start, stop, group.group_id) for group in self._cache.groups.all])
            )
            gives[row] = stop == request.num_tokens
        at = np.concatenate(positions)
        counts = np.ones(len(batch), np.int64)
        counts[first:] = batch.counts[first:]
        return StepInput(
            np.concatenate(tokens),
            at,
            counts,
            first,
            np.concatenate(slots, axis=1),
            tuple(self._block_tables(group.group_id, chunks) for group in self._cache.groups.all),
            gives,
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
            self._sampled = list(batch.requests) if decodes else []
            ways = self._ways.of(batch)
            self._sampling = None if ways["is_greedy"].all() else _sampling_rows(batch, ways)
            self._num_prompt_tokens = ways["num_prompt_tokens"]
        if self._sampling is not None:
            self._sampling.num_outputs[:] = last + 1 - self._num_prompt_tokens
        return self._sampling


def _require_plain(request: RequestLike) -> None:
    if request.num_encoder_tokens:
        raise UsageError(f"request {request.request_id!r} has an encoder's input, which this engine does not compute")


_WAY = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("num_logprobs", np.int64),
        ("num_prompt_logprobs", np.int64),
        ("num_prompt_tokens", np.int64),
        ("is_greedy", np.bool_),
    ]
)

_SAMPLED = ("temperature", "top_p", "top_k", "seed", "num_logprobs", "num_prompt_logprobs")


class _Ways:
    """How requests sample: a record each, of those that had a chunk. Those that ended are forgotten some time later."""

    def __init__(self) -> None:
        self._records = np.zeros(0, _WAY)
        self._num_records = 0
        self._places: dict[int, int] = {}
        """By the identity of the request. One that ended is not kept alive, and who comes in its place is new."""

    def of(self, batch: Batch) -> npt.NDArray[np.void]:
        """A record a row. Every request has a chunk before it decodes."""
        new = batch.requests[batch.num_decoding :]
        stop = self._num_records + len(new)
        if stop > len(self._records):
            running = batch.requests[: batch.num_decoding]
            self._records = np.append(self._of(running), np.zeros(len(batch) + _MANY, _WAY))
            self._places = {id(request): at for at, request in enumerate(running)}
            self._num_records, stop = len(running), len(batch)
        self._records[self._num_records : stop] = [_way(request) for request in new]
        self._places |= {id(request): at for at, request in enumerate(new, self._num_records)}
        self._num_records = stop
        return self._of(batch.requests)

    def _of(self, requests: Sequence[RequestLike]) -> npt.NDArray[np.void]:
        rows = np.fromiter(map(self._places.__getitem__, map(id, requests)), np.int64, len(requests))
        return self._records.take(rows)


def _way(request: RequestLike) -> tuple[float | int, ...]:
    """Whoever does not say how it samples is greedy."""
    its, seed = (request.sampling, request.seed) if isinstance(request, Generation) else (GREEDY, 0)
    logprobs = [-1 if each is None else each for each in (its.num_logprobs, its.num_prompt_logprobs)]
    return its.temperature, its.top_p, its.top_k, seed, *logprobs, request.num_prompt_tokens, its.is_greedy


def _sampling_rows(batch: Batch, ways: npt.NDArray[np.void]) -> SamplingRows:
    temperature, top_p, top_k, seeds, num_logprobs, num_prompt_logprobs = (ways[name].copy() for name in _SAMPLED)
    return SamplingRows(
        temperature, top_p, top_k, seeds, np.zeros(len(batch), np.int64), num_logprobs, num_prompt_logprobs,
        _targets(batch, num_prompt_logprobs),
    )  # fmt: skip


def _targets(batch: Batch, num_told: Ints) -> Ints:
    """-1 but for chunks of prompts of which something is told."""
    targets = np.full(sum(batch.counts), -1, np.int64)
    for row in (num_told[batch.num_decoding :] >= 0).nonzero()[0].tolist():
        row += batch.num_decoding
        request, start, stop = batch.requests[row], batch.starts[row], batch.starts[row] + batch.counts[row]
        known = request.token_ids[start + 1 : min(stop + 1, request.num_prompt_tokens)]
        at = sum(batch.counts[:row])
        targets[at : at + len(known)] = known
    return targets
