"""Engine mode against a real run of vLLM 0.19: half of it fits the step times, the other half judges.

What "within 10 % on average" means here: the sum over seconds of |simulated - real|, over the sum of the real figures.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from kvpool.engine.roofline import ACCELERATORS, MODELS, roofline
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.replay.fit import Observed, fit_step_time
from kvpool.replay.readers import open_trace
from kvpool.replay.report import Sample, Timing
from kvpool.replay.settings import ReplaySettings
from kvpool.replay.simulator import replay

# Seconds of the real run: the first request arrived 0.12 s after its clock started, and half of it had passed at 92.
FIRST_ARRIVAL_S, HALF_S = 0.12, 92.0
SAMPLE_EVERY_S = 0.02
SETTINGS = ReplaySettings(
    num_blocks=2588,
    block_size=16,
    mode="engine",
    scheduler=SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=256),
    sample_every_s=SAMPLE_EVERY_S,
)
Second = Mapping[str, float]


@pytest.fixture(scope="module")
def run(shared: Path) -> Path:
    return shared / "data/traces/vllm_run_rtx4090"


@pytest.fixture(scope="module")
def observed(run: Path) -> dict[str, Observed]:
    """Token times since the first arrival, by the request's line in the trace."""
    records = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    start_s = records[0]["queued_ts"]
    return {
        str(number): Observed(record["first_token_ts"] - start_s, record["last_token_ts"] - start_s)
        for number, record in enumerate(records, 1)
    }


@pytest.fixture(scope="module")
def simulated(run: Path, observed: dict[str, Observed]) -> Timing:
    """The whole run, with step times fitted on its first half."""
    trace = open_trace(run / "workload_tokens.jsonl.gz")
    start = roofline(ACCELERATORS["RTX-4090"], MODELS["Llama-3.1-8B"])
    fitted = fit_step_time(trace, SETTINGS, observed, HALF_S - FIRST_ARRIVAL_S, start)
    print(f"fitted: {fitted}")
    timing = replay(trace, replace(SETTINGS, step_time=fitted)).timing
    assert timing is not None
    return timing


def judged_seconds(run: Path) -> list[Second]:
    with (run / "timeseries.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return [row for row in rows if row["t"] > HALF_S]


def state_at(timing: Timing, time_s: float) -> Sample:
    """The engine at a second of the real run's clock; idle after its end."""
    index = round((time_s - FIRST_ARRIVAL_S) / SAMPLE_EVERY_S)
    return timing.samples[index] if index < len(timing.samples) else Sample(time_s, 0, 0, 0.0)


def test_running_waiting_and_pool_use_are_within_10_percent(run: Path, simulated: Timing) -> None:
    pairs: dict[str, list[tuple[float, float]]] = {"running": [], "waiting": [], "held": []}
    for row in judged_seconds(run):
        state = state_at(simulated, row["t"])
        pairs["running"].append((state.num_running, row["running"]))
        pairs["waiting"].append((state.num_waiting, row["waiting"]))
        pairs["held"].append((100 * state.held, row["kv_cache_pct"]))
    errors = {name: sum(abs(s - r) for s, r in both) / sum(r for _, r in both) for name, both in pairs.items()}
    relative = {name: [abs(s - r) / r for s, r in both if r] for name, both in pairs.items()}
    print("sum of errors / sum:", errors, "mean of each second's:", {n: sum(e) / len(e) for n, e in relative.items()})
    assert max(errors.values()) < 0.10
    assert all(sum(each) / len(each) < 0.10 for each in relative.values())


def test_the_same_requests_finish_in_nearly_the_same_order(simulated: Timing, observed: dict[str, Observed]) -> None:
    ends = {life.request_id: life.last_token_s for life in simulated.lives}
    assert ends.keys() == observed.keys()
    assert None not in ends.values(), "every request ends"
    half_s = HALF_S - FIRST_ARRIVAL_S
    in_first_half = {name for name, end_s in ends.items() if end_s is not None and end_s < half_s}
    really = {name for name, times in observed.items() if times.last_token_s < half_s}
    assert len(in_first_half ^ really) <= 0.02 * len(really)
    order = sorted(observed, key=lambda name: observed[name].last_token_s)
    swapped = sum((ends[before] or 0) > (ends[after] or 0) for before, after in combinations(order, 2))
    print(f"{swapped} of {len(order) * (len(order) - 1) // 2} pairs finish in the other order")
    assert swapped / (len(order) * (len(order) - 1) / 2) < 0.01
