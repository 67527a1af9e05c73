"""A worker in a process of its own, so that neither its crash nor its GIL is the engine's.

Owns: the process, a pipe to it, and a thread that hands on what it writes to standard error.
Knows nothing of: models. Steps go there and answers come back, and nothing else does.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

from kvpool.engine.step_input import StepAnswer, StepInput, Worker
from kvpool.errors import WorkerDied

Facts = TypeVar("Facts")
Factory: TypeAlias = Callable[[], tuple[Worker, Facts]]
"""Makes the worker, in its process, and what is to be known of it here. Both the factory and the facts are pickled."""

STEP_TIMEOUT_S = 300.0
START_TIMEOUT_S = 1800.0
_END = b""
_GRACE_S = 5.0
_NUM_LAST_LINES = 20
_PROTOCOL = 5


class RemoteWorker(Generic[Facts]):
    """A `Worker` whose steps are computed elsewhere, one at a time. For one thread; `close` it, or use `with`.

    What the worker raises is raised here, with the traceback from there as a note, and it goes on. When its process
    ends, or does not answer for `timeout_s`, WorkerDied says how and what it wrote last; all that it kept is lost, so
    it is not started again before the next `execute` or `restart`. What the factory raises, the constructor raises.
    The process ends with this one, and leaves it to this one what Ctrl-C means.
    """

    def __init__(
        self,
        factory: Factory[Facts],
        *,
        timeout_s: float | None = STEP_TIMEOUT_S,
        start_timeout_s: float | None = START_TIMEOUT_S,
    ) -> None:
        self._factory = pickle.dumps(factory, _PROTOCOL)
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._far: _Far | None = None
        self.facts: Facts
        """What the factory told of the worker that runs now, or ran last."""
        self.restart()

    @property
    def process_id(self) -> int | None:
        """None when it is not running."""
        return None if self._far is None else self._far.process.pid

    def execute(self, step: StepInput) -> StepAnswer:
        if self._far is None:
            try:
                self.restart()
            except Exception as error:
                how = "the worker could not be started again"
                raise WorkerDied(f"{how}: {error}", how=how, at_start=True) from error
        answer: StepAnswer = self._ask(step)
        return answer

    def restart(self) -> None:
        """End what runs, and make the worker anew: with nothing in its memory."""
        self.close()
        self._far = _Far()
        self._far.limit(self._start_timeout_s)
        try:
            self.facts = self._ask(self._factory)
        except BaseException:
            self.close()
            raise
        self._far.limit(self._timeout_s)

    def close(self) -> None:
        """End the process, by force where it does not end by itself. Not while a step runs; twice is fine."""
        far, self._far = self._far, None
        if far is not None:
            far.end()

    def __enter__(self) -> "RemoteWorker[Facts]":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, question: StepInput | bytes) -> Any:
        assert self._far is not None
        try:
            answer = self._far.ask(question)
        except (EOFError, OSError) as error:
            far, self._far = self._far, None
            raise far.death(hangs=isinstance(error, BlockingIOError)) from None
        if isinstance(answer, _Raised):
            raise answer.error
        return answer


@dataclass(frozen=True, slots=True)
class _Raised:
    """An answer that is none."""

    error: Exception


class _Far:
    """One process, from its start to its end."""

    def __init__(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._near, far = spawning.Pipe()
        heard, stderr = spawning.Pipe(duplex=False)
        self.process: BaseProcess = spawning.Process(
            target=_serve, args=(far, stderr), name="kvpool-worker", daemon=True
        )
        with _interrupts_blocked():
            self.process.start()
        far.close()
        stderr.close()
        self._stderr = _Tail(heard)
        self._num_asked = 0

    def limit(self, timeout_s: float | None) -> None:
        """How long one read or write may take: BlockingIOError afterwards."""
        whole, rest = divmod(timeout_s or 0.0, 1)
        limit = struct.pack("@ll", int(whole), int(rest * 1e6))
        with socket.socket(fileno=os.dup(self._near.fileno())) as pipe:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                pipe.setsockopt(socket.SOL_SOCKET, option, limit)

    def ask(self, question: StepInput | bytes) -> Any:
        """The answer. One that was not waited for, since something was raised meanwhile, is passed over."""
        self._num_asked += 1
        self._near.send_bytes(pickle.dumps((self._num_asked, question), _PROTOCOL))
        while True:
            number, answer = pickle.loads(self._near.recv_bytes())
            if number == self._num_asked:
                return answer

    def end(self) -> None:
        """In order, within some seconds; by force afterwards."""
        with suppress(OSError):
            self._near.send_bytes(_END)
        self._near.close()
        self._join()

    def death(self, *, hangs: bool) -> WorkerDied:
        """How the process ended, and what it said last."""
        if hangs:
            self.process.kill()
        self._near.close()
        exit_code, lines = self._join()
        how = "the worker did not answer in time and was killed" if hangs else f"the worker died: {_ending(exit_code)}"
        return WorkerDied("\n".join([f"{how}; the last that it wrote:" if lines else how, *lines]), how=how)

    def _join(self) -> tuple[int | None, Sequence[str]]:
        self.process.join(_GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        exit_code = self.process.exitcode
        self.process.close()
        return exit_code, self._stderr.close()


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"exit code {exit_code}, {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


class _Tail:
    """Hands on what a process writes to standard error, and keeps the last lines."""

    def __init__(self, heard: Connection) -> None:
        self._heard = heard
        self._lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._thread = threading.Thread(target=self._read, name="kvpool-worker-stderr", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with os.fdopen(os.dup(self._heard.fileno()), errors="replace") as stream:
            for line in stream:
                self._lines.append(line.rstrip("\n"))
                with suppress(Exception):
                    sys.stderr.write(line)

    def close(self) -> Sequence[str]:
        """The last lines. Whoever else has the pipe, such as a child of the process, is not waited for."""
        self._thread.join(1)
        self._heard.close()
        return list(self._lines)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A process that is made here is deaf to Ctrl-C from its first moment.

    The tracker that spawning starts beside the first process would unblock them in between, so it comes first.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the process


def _serve(pipe: Connection, stderr: Connection) -> None:
    """Answer until told to end, or until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        worker: Worker | None = None
        while message := pipe.recv_bytes():
            number, question = pickle.loads(message)
            try:
                if worker is None:
                    worker, answer = pickle.loads(question)()
                else:
                    answer = worker.execute(question)
                packed = pickle.dumps((number, answer), _PROTOCOL)
            except Exception as error:
                packed = pickle.dumps((number, _Raised(_portable(error))), _PROTOCOL)
            pipe.send_bytes(packed)
    # An interpreter with a model in it takes seconds to clear up, and somebody waits.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be pickled, with its traceback as a note."""
    where = "".join(traceback.format_exception(error)).rstrip()
    error.add_note(f"In the worker's process:\n{where}")
    try:
        pickle.loads(pickle.dumps(error, _PROTOCOL))
    except Exception:
        error, notes = RuntimeError(f"{type(error).__name__}: {error}"), error.__notes__
        error.add_note(notes[-1])
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
