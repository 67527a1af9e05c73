"""A worker in a process of its own: what comes back, what a death looks like, and that nothing is left behind."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.serving import remote
from tests.serving.remote import Making, step

from kvpool.errors import ConfigError, WorkerDied
from kvpool.serving.worker_process import RemoteWorker

Facts = dict[str, int]


@pytest.fixture(scope="module")
def kept() -> Iterator[RemoteWorker[Facts]]:
    """For tests after which it still runs."""
    with RemoteWorker(Making(), timeout_s=30) as worker:
        yield worker


@pytest.fixture
def worker() -> Iterator[RemoteWorker[Facts]]:
    with RemoteWorker(Making(), timeout_s=30) as worker:
        yield worker


def is_running(process_id: int) -> bool:
    """Also False for what nobody has waited for."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def num_zombies() -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        count += fields[0] == "Z" and int(fields[1]) == os.getpid()
    return count


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_steps_are_computed_elsewhere(kept: RemoteWorker[Facts]) -> None:
    assert kept.facts["process_id"] == kept.process_id != os.getpid()
    answer = kept.execute(step(3, 4, 5))
    assert answer.token_ids[:2].tolist() == [6, 8]
    assert (answer.logprobs, answer.prompt_logprobs) == ({}, {})


def test_what_is_raised_there_is_raised_here_and_it_goes_on(kept: RemoteWorker[Facts]) -> None:
    before = kept.process_id
    with pytest.raises(KeyError, match="no such block") as raised:
        kept.execute(step(remote.RAISE))
    [note] = raised.value.__notes__
    assert "In the worker's process:\nTraceback" in note
    assert "in execute" in note
    with pytest.raises(RuntimeError, match="OddError: 1 and 2") as odd:
        kept.execute(step(remote.RAISE_ODD))
    assert "in execute" in odd.value.__notes__[0]
    assert kept.execute(step(1, 1)).token_ids[0] == 2
    assert kept.process_id == before


def test_large_steps_and_answers(kept: RemoteWorker[Facts]) -> None:
    assert len(kept.execute(step(remote.LARGE)).token_ids) == remote.LARGE_COUNT
    wide = step(*[5] * 2000, num_columns=4000)
    assert kept.execute(wide).token_ids[0] == 10


def test_an_answer_that_nobody_waited_for_is_passed_over(kept: RemoteWorker[Facts]) -> None:
    class AlarmError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise AlarmError

    before = signal.signal(signal.SIGALRM, interrupt)
    far = kept._far
    assert far is not None
    os.kill(far.process.pid or 0, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(AlarmError):
            kept.execute(step(8, 8))
    finally:
        os.kill(far.process.pid or 0, signal.SIGCONT)
        signal.signal(signal.SIGALRM, before)
    assert kept.execute(step(9, 9)).token_ids[0] == 18


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (remote.DIE, "the worker died: exit code 3$"),
        (remote.KILL, "the worker died: exit code -9, SIGKILL$"),
        (remote.SAY, r"exit code 4; the last that it wrote:\nline 30\n(.*\n)+line 49$"),
    ],
)
def test_a_death_is_told_and_the_next_step_starts_it_anew(
    token: int, message: str, worker: RemoteWorker[Facts]
) -> None:
    before = worker.process_id
    worker.execute(step(1))
    with pytest.raises(WorkerDied, match=message) as died:
        worker.execute(step(token))
    assert str(pickle.loads(pickle.dumps(died.value))) == str(died.value)
    assert died.value.how == str(died.value).partition("; the last that it wrote:")[0]
    assert worker.process_id is None
    # Its first step: nothing of the one before is left.
    assert worker.execute(step(2)).token_ids.tolist() == [1]
    assert worker.process_id not in (None, before)
    assert worker.facts["process_id"] == worker.process_id


def test_one_that_cannot_be_started_again(worker: RemoteWorker[Facts], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried with every step. What the factory raises is told as a death, since nothing computes."""
    with pytest.raises(WorkerDied) as died:
        worker.execute(step(remote.KILL))
    assert not died.value.at_start
    for fails, words in ((7, "exit code 7"), ("3 GiB are needed", "3 GiB are needed")):
        monkeypatch.setattr(worker, "_factory", pickle.dumps(Making(fails)))
        with pytest.raises(WorkerDied, match=f"could not be started again: .*{words}") as died:
            worker.execute(step(1))
        assert died.value.at_start
        assert pickle.loads(pickle.dumps(died.value)).at_start
    monkeypatch.setattr(worker, "_factory", pickle.dumps(Making()))
    assert worker.execute(step(2)).token_ids.tolist() == [1]


def test_a_death_between_two_steps_is_told_by_the_next(worker: RemoteWorker[Facts]) -> None:
    process_id = worker.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        worker.execute(step(1))
    assert worker.execute(step(1)).token_ids.tolist() == [1]


@pytest.mark.parametrize("token", [remote.HANG, remote.STOP])
def test_a_worker_that_does_not_answer(token: int) -> None:
    with RemoteWorker(Making(), timeout_s=0.5) as worker:
        process_id = worker.process_id
        assert process_id is not None
        began = time.monotonic()
        with pytest.raises(WorkerDied, match="did not answer in time and was killed"):
            worker.execute(step(token))
        assert 0.4 < time.monotonic() - began < 5
        assert not is_running(process_id)


def test_a_worker_that_does_not_even_read() -> None:
    with RemoteWorker(Making(), timeout_s=0.5) as worker:
        os.kill(worker.process_id or 0, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="did not answer in time"):
            worker.execute(step(*[1] * 2000, num_columns=4000))


def test_restart_forgets(worker: RemoteWorker[Facts]) -> None:
    before = worker.process_id
    assert [worker.execute(step(1)).token_ids[0] for _ in range(2)] == [1, 2]
    worker.restart()
    assert worker.process_id != before
    assert before is not None
    assert not is_running(before)
    assert worker.execute(step(1)).token_ids.tolist() == [1]


def test_what_the_factory_raises_the_constructor_raises() -> None:
    before = open_files(), threading.active_count(), multiprocessing.active_children()
    with pytest.raises(ConfigError, match="a request of 8,192 tokens needs 3 GiB"):
        RemoteWorker(Making("a request of 8,192 tokens needs 3 GiB"))
    with pytest.raises(WorkerDied, match="exit code 7"):
        RemoteWorker(Making(7))
    with pytest.raises(ImportError, match="gone"):
        RemoteWorker(remote.Unpacked())  # type: ignore[arg-type]
    assert (open_files(), threading.active_count(), multiprocessing.active_children()) == before


def test_nothing_is_left_behind() -> None:
    RemoteWorker(Making()).close()
    before = open_files(), threading.active_count(), num_zombies()
    for token in (1, remote.DIE, remote.KILL):
        worker = RemoteWorker(Making())
        process_id = worker.process_id
        assert process_id is not None
        if token == 1:
            worker.execute(step(token))
        else:
            with pytest.raises(WorkerDied):
                worker.execute(step(token))
        worker.close()
        worker.close()
        assert not is_running(process_id)
    assert (open_files(), threading.active_count(), num_zombies()) == before


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Even in the middle of a step, and even when the parent cannot say a word."""
    told = tmp_path / "process_id"
    parent = multiprocessing.get_context("spawn").Process(target=remote.hold_and_report, args=(str(told),))
    parent.start()
    worker_id = int(wait_for(lambda: told.exists() and told.read_text()))
    time.sleep(0.2)
    assert is_running(worker_id)
    parent.kill()
    parent.join()
    wait_for(lambda: not is_running(worker_id))


def test_ctrl_c_is_left_to_the_parent(worker: RemoteWorker[Facts]) -> None:
    os.kill(worker.process_id or 0, signal.SIGINT)
    assert worker.execute(step(1)).token_ids.tolist() == [1]
    # From its first moment on: it was born with the signal blocked.
    status = Path(f"/proc/{worker.process_id}/status").read_text()
    [blocked] = [line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")]
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1


def test_it_can_be_made_and_used_on_another_thread() -> None:
    answers: list[int] = []

    def use() -> None:
        with RemoteWorker(Making()) as worker:
            answers.extend(worker.execute(step(4, 0)).token_ids.tolist())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert answers == [8, 1]


def test_a_thousand_steps_take_no_memory(worker: RemoteWorker[Facts]) -> None:
    wide = step(*range(64), num_columns=512)

    def sizes() -> np.ndarray:
        return np.array([resident_bytes(os.getpid()), resident_bytes(worker.process_id or 0)])

    for _ in range(100):
        worker.execute(wide)
    before = sizes()
    for _ in range(1000):
        worker.execute(wide)
    assert (sizes() - before < 4 * 2**20).all()


def wait_for(condition: object, seconds: float = 20) -> str:
    """Until it holds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()  # type: ignore[operator]
        if found:
            return str(found)
        time.sleep(0.02)
    raise AssertionError("it did not come to hold")
