"""Workers that stand before the real one and see to it that nothing is read that was not written for it."""

from collections.abc import Callable

import numpy as np
from tests.runner.served import Served

from kvpool.engine.batch import Batch
from kvpool.engine.step_input import StepAnswer, StepInput, Worker
from kvpool.plan.kinds import SlidingWindow, StateSpace
from kvpool.types import NULL_BLOCK

NAN = 0xFF
"""As bytes of any floating point number."""


class Spoiling:
    """Before a step, all that it must not read becomes NaN.

    That is the null block, every block that is free and has no name, and every block whose first token is computed now:
    as if whoever had it before had left NaN there.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._worker = served.worker

    def execute(self, step: StepInput) -> StepAnswer:
        cache, memory = self._served.cache, self._worker.memory._bytes
        pool = cache._pool
        memory[NULL_BLOCK] = NAN
        memory[[block for block in cache.free_block_ids() if pool.name(block) is None]] = NAN
        for slots, group in zip(step.slots, cache.groups.all, strict=True):
            size = group.block_size
            memory[np.unique(slots[slots % size == 0] // size)] = NAN
        return self._worker.execute(step)


class TableCheck:
    """Notes what every step writes where, and compares with what its tables point to.

    Content is named by all tokens up to its own. Attention that keeps everything cannot tell that two blocks of earlier
    tokens are swapped, since keys carry their positions: this can. AssertionError with request and position.
    """

    def __init__(self, served: Served, worker: Worker, batch: Callable[[], Batch]) -> None:
        self._served = served
        self._worker = worker
        self._batch = batch
        self._written: list[dict[int, int]] = [{} for _ in served.cache.groups.all]

    def execute(self, step: StepInput) -> StepAnswer:
        named = [_names(request.token_ids) for request in self._batch().requests]
        ends = np.cumsum(step.counts).tolist()
        for row, (end, count) in enumerate(zip(ends, step.counts.tolist(), strict=True)):
            for token in range(end - count, end):
                for group, slots in enumerate(step.slots):
                    self._written[group][int(slots[token])] = named[row][step.positions[token]]
        for row, (end, count) in enumerate(zip(ends, step.counts.tolist(), strict=True)):
            self._check(step, row, int(step.positions[end - count]), int(step.positions[end - 1]) + 1, named[row])
        return self._worker.execute(step)

    def _check(self, step: StepInput, row: int, start: int, stop: int, names: list[int]) -> None:
        who = self._batch().requests[row].request_id
        for group in self._served.cache.groups.all:
            kind, size = group.kind, group.block_size
            table = step.block_tables[group.group_id][row]
            looks = range(max(0, start - kind.window + 1) if isinstance(kind, SlidingWindow) else 0, stop)
            if isinstance(kind, StateSpace):
                looks = range(max(0, start - 1), start)
            for position in looks:
                slot = int(table[position // size]) * size + position % size
                found = self._written[group.group_id].get(slot)
                assert found == names[position], f"request {who!r}, group {group.group_id}, position {position}"


def _names(token_ids: list[int]) -> list[int]:
    names, name = [], 0
    for token in token_ids:
        name = hash((name, token))
        names.append(name)
    return names


def spoil(served: Served) -> None:
    """From now on its worker gets steps with all else spoilt, and with their tables checked."""
    assert served.notes.runner is not None
    served.notes.runner._worker = TableCheck(served, Spoiling(served), lambda: served.notes.batch)
