"""Workers without a model for a process of their own: each does what its test is about."""

import os
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np

from kvpool.engine.step_input import StepAnswer, StepInput, Worker
from kvpool.errors import ConfigError

DIE, KILL, HANG, RAISE, RAISE_ODD, SAY, STOP, LARGE = range(100, 108)
"""First tokens that mean something."""
LARGE_COUNT = 4_000_000


def step(*token_ids: int, num_columns: int = 4) -> StepInput:
    """A row for each token."""
    count = len(token_ids)
    return StepInput(
        np.array(token_ids, np.int64),
        np.arange(count),
        np.ones(count, np.int64),
        count,
        np.arange(count, dtype=np.int64)[None],
        (np.zeros((count, num_columns), np.int32),),
        np.ones(count, bool),
    )


class OddError(Exception):
    """Cannot be unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class Doubling:
    """Answers twice each token; `num_steps` of its life as the last one's."""

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, step: StepInput) -> StepAnswer:
        self.num_steps += 1
        first = int(step.token_ids[0])
        if first == DIE:
            os._exit(3)
        if first == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if first in (HANG, STOP):
            if first == STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        if first == RAISE:
            raise KeyError("no such block")
        if first == RAISE_ODD:
            raise OddError(1, 2)
        if first == SAY:
            for line in range(50):
                print(f"line {line}", file=sys.stderr)
            os._exit(4)
        answer = np.full(LARGE_COUNT, 7, np.int64) if first == LARGE else step.token_ids * 2
        answer[-1] = self.num_steps
        return StepAnswer(answer, {}, {})


@dataclass(frozen=True)
class Making:
    """A factory. `fails`: the error that it raises, or a number to exit with."""

    fails: str | int | None = None

    def __call__(self) -> tuple[Worker, dict[str, int]]:
        if isinstance(self.fails, str):
            raise ConfigError(self.fails)
        if self.fails is not None:
            os._exit(self.fails)
        return Doubling(), {"process_id": os.getpid()}


class Unpacked:
    """Cannot be unpickled in the process."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _refuse, ("gone",)


def _refuse(what: str) -> None:
    if os.environ.get("KVPOOL_TEST_PARENT") != str(os.getpid()):
        raise ImportError(what)


def hold_and_report(path: str) -> None:
    """A parent that is killed: it tells its worker's process id, and waits in a step."""
    from kvpool.serving.worker_process import RemoteWorker

    worker = RemoteWorker(Making())
    with open(path, "w") as file:
        file.write(str(worker.process_id))
    worker.execute(step(HANG))
