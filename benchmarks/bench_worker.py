"""What does it cost that a worker is in another process?

A step of so many decoding rows goes there and its answer comes back; the worker itself does next to nothing. Block
tables have 64 columns: rows of 1,024 tokens. Beside: the bytes that go, and what it takes to pickle and unpickle them
here. Medians of 300.
"""

import pickle
from functools import partial

import numpy as np
from medians import median_s, print_table

from kvpool.engine.step_input import SamplingRows, StepAnswer, StepInput, Worker
from kvpool.serving.worker_process import RemoteWorker

ROWS = (1, 16, 64, 256, 1024)
NUM_COLUMNS = 64
NUM_RUNS = 300


class Echo:
    def execute(self, step: StepInput) -> StepAnswer:
        return StepAnswer(step.token_ids, {}, {})


def make() -> tuple[Worker, None]:
    return Echo(), None


def decoding(num_rows: int, *, samples: bool) -> StepInput:
    ones = np.ones(num_rows, np.int64)
    shares = np.ones(num_rows, np.float32)
    return StepInput(
        ones,
        1023 * ones,
        ones,
        num_rows,
        ones[None],
        (np.ones((num_rows, NUM_COLUMNS), np.int32),),
        ones.astype(bool),
        SamplingRows(shares, shares, ones, ones, ones, ones, ones, ones) if samples else None,
    )


def there_and_back(step: StepInput) -> StepInput:
    copied: StepInput = pickle.loads(pickle.dumps(step, 5))
    return copied


def main() -> None:
    rows = []
    with RemoteWorker(make) as worker:
        for num_rows in ROWS:
            greedy, sampled = (decoding(num_rows, samples=samples) for samples in (False, True))
            calls = (partial(worker.execute, greedy), partial(worker.execute, sampled), partial(there_and_back, greedy))
            times = [f"{1e6 * median_s(call, NUM_RUNS):.0f}" for call in calls]
            rows.append((f"{num_rows:,}", f"{len(pickle.dumps(greedy, 5)):,}", *times))
    columns = ("rows", "bytes", "greedy\nus", "sampled\nus", "pickling\nus")
    print_table("A step there and its answer back", columns, rows)


if __name__ == "__main__":
    main()
