"""Runs: the requests of a source through a cache of one size, or of many sizes at once.

By the code that a real engine runs; see `cache_mode` and `engine_mode` for what each mode does.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from kvpool.replay.cache_mode import CacheRun
from kvpool.replay.engine_mode import EngineRun
from kvpool.replay.report import ReplayReport
from kvpool.replay.settings import ReplaySettings, Source
from kvpool.replay.trace import TraceRequest

OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One run to be made. Can be pickled, and so made in another process or on another machine."""

    source: Source
    settings: ReplaySettings


def replay(source: Source, settings: ReplaySettings, on_progress: OnProgress | None = None) -> ReplayReport:
    """Run all of `source` through a new cache. `on_progress` is told now and then how many requests were read."""
    run = CacheRun(source, settings) if settings.mode == "cache" else EngineRun(source, settings)
    run.run(_counted(source, on_progress) if on_progress else source)
    return run.report()


def replay_many(jobs: Iterable[Job], executor: Executor) -> Iterator[ReplayReport]:
    """The reports of many runs, in the order of `jobs`, each as soon as it and those before it are done.

    `executor` is any of `concurrent.futures`, or what gives its face (a Dask client's `get_executor()`).
    """
    return executor.map(_replay_job, jobs)


def _replay_job(job: Job) -> ReplayReport:
    return replay(job.source, job.settings)


def _counted(source: Source, on_progress: OnProgress) -> Iterator[TraceRequest]:
    number = 0
    for number, request in enumerate(source, 1):
        if number % 64 == 0:
            on_progress(number)
        yield request
    on_progress(number)
