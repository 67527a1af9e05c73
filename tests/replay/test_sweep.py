"""Many runs at once: the same reports on any executor."""

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

import pytest
from distributed import Client, LocalCluster

from kvpool.replay.settings import ReplaySettings
from kvpool.replay.simulator import Job, replay, replay_many
from kvpool.replay.workload import Workload

WORKLOAD = Workload("chat", seed=5, num_requests=80)
JOBS = [
    Job(WORKLOAD, ReplaySettings(num_blocks, mode=mode)) for num_blocks in (300, 1_000) for mode in ("cache", "engine")
]


@pytest.fixture(params=["threads", "processes", "dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "dask":
        with (
            LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
            Client(cluster) as client,
        ):
            yield client.get_executor()
    else:
        pool = {"threads": ThreadPoolExecutor, "processes": ProcessPoolExecutor}[request.param]
        with pool(2) as executor:
            yield executor


def test_every_executor_gives_the_reports_of_single_runs_in_order(executor: Executor) -> None:
    reports = list(replay_many(JOBS, executor))
    assert reports == [replay(job.source, job.settings) for job in JOBS]
    assert [report.num_blocks for report in reports] == [300, 300, 1_000, 1_000]
    assert reports[0].all.hit_tokens < reports[2].all.hit_tokens
