"""The runner of a model: batches as arrays to a worker, tokens back.

Owns: nothing but what the worker said last.
Knows nothing of: where the worker is.
"""

from collections.abc import Sequence

from kvpool.engine.batch import Batch
from kvpool.engine.scheduler import Scheduler
from kvpool.engine.step_input import StepAnswer, StepBuilder, Worker


class ModelRunner:
    """A `Runner` for the batches of one scheduler. `answer` is what its worker gave for the last of them."""

    def __init__(self, scheduler: Scheduler, worker: Worker) -> None:
        self._builder = StepBuilder(scheduler)
        self._worker = worker
        self.answer: StepAnswer | None = None

    def run(self, batch: Batch) -> Sequence[int | None]:
        self.answer = None
        if not len(batch):
            return []
        self.answer = self._worker.execute(self._builder.build(batch))
        tokens: list[int | None] = self.answer.token_ids.tolist()
        for row in range(batch.num_decoding, len(batch)):
            if tokens[row] == -1:
                tokens[row] = None
        return tokens
