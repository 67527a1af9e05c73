"""Engine mode: what the clock, the journal and the tallies say of small runs that can be worked out by hand."""

import pytest
from tests.replay.sources import Listed

from kvpool.engine.roofline import StepTime
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.errors import ConfigError
from kvpool.replay.report import ReplayReport, Timing
from kvpool.replay.settings import ReplaySettings
from kvpool.replay.simulator import replay
from kvpool.replay.trace import TraceRequest
from kvpool.replay.workload import Workload

ONE_SECOND_A_STEP = StepTime(base_s=1.0, prefill_token_s=0.0)


def settings(num_blocks: int = 100, **changes: object) -> ReplaySettings:
    defaults = {"block_size": 4, "mode": "engine", "step_time": ONE_SECOND_A_STEP, "check": True, "sample_every_s": 1.0}
    return ReplaySettings(num_blocks, **(defaults | changes))  # type: ignore[arg-type]


def timing_of(report: ReplayReport) -> Timing:
    assert report.timing is not None
    return report.timing


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    source = Listed([TraceRequest("a", 5.0, 10, 3, block_ids=[0, 1])], block_size=4)
    timing = timing_of(replay(source, settings()))
    (life,) = timing.lives
    assert (life.arrival_s, life.admitted_s, life.first_token_s, life.last_token_s) == (0.0, 0.0, 1.0, 3.0)
    assert (timing.num_steps, timing.num_output_tokens, timing.num_finished, timing.duration_s) == (3, 3, 1, 3.0)


def test_time_passes_between_arrivals_and_a_request_waits_for_the_step_that_runs() -> None:
    arrivals = [("a", 0.0), ("b", 0.5), ("c", 10.25)]
    source = Listed([TraceRequest(name, at_s, 4, 1) for name, at_s in arrivals], block_size=None)
    timing = timing_of(replay(source, settings()))
    assert [life.admitted_s for life in timing.lives] == [0.0, 1.0, 10.25]
    assert timing.queueing_s.max == 0.5
    assert [(s.time_s, s.num_running) for s in timing.samples][:3] == [(0.0, 1), (1.0, 1), (2.0, 0)]
    assert len(timing.samples) == 12, "one each second until the end at 11.25 s"


def test_prompts_are_chunked_under_the_token_budget() -> None:
    source = Listed([TraceRequest("a", 0.0, 20, 1)], block_size=None)
    budget = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=8)
    assert timing_of(replay(source, settings(scheduler=budget))).num_steps == 3


def test_prefill_costs_what_the_step_time_says() -> None:
    source = Listed([TraceRequest("a", 0.0, 20, 2)], block_size=None)
    cost = StepTime(base_s=1.0, prefill_token_s=0.1, kv_token_s=0.01, attended_pair_s=0.001)
    life = timing_of(replay(source, settings(step_time=cost))).lives[0]
    assert life.first_token_s == pytest.approx(1 + 20 * 0.1 + 20 * 0.01 + 20 * 10 * 0.001)
    assert life.last_token_s == pytest.approx((life.first_token_s or 0) + 1 + 21 * 0.01)


def test_a_second_turn_hits_the_first_ones_output() -> None:
    prompt, output = [1, 2, 3, 4, 5], [6, 7, 8, 9]
    second = [*prompt, *output, 10, 11]
    source = Listed(
        [
            TraceRequest("1", 0.0, 5, 4, prompt_token_ids=prompt, output_token_ids=output),
            TraceRequest("2", 100.0, len(second), 1, prompt_token_ids=second, output_token_ids=[12]),
        ],
        block_size=None,
    )
    report = replay(source, settings())
    assert report.all.hit_tokens == report.all.ideal_hit_tokens == 8, "4 prompt tokens, and a block half of output"
    in_cache_mode = replay(source, settings(mode="cache"))
    assert in_cache_mode.all.hit_tokens == 4, "cache mode knows prompts only"


def test_a_full_pool_preempts_the_newest_and_every_request_still_ends() -> None:
    source = Listed([TraceRequest(str(n), 0.0, 8, 12) for n in range(4)], block_size=None)
    report = replay(source, settings(num_blocks=12))
    assert report.preemptions > 0
    assert report.preempted_tokens > 0
    assert timing_of(report).num_finished == 4
    assert report.all.num_requests == 4, "a request counts once, however often it comes back"
    assert 0.8 < report.peak_held <= 1.0


def test_what_can_never_fit_is_refused_and_the_rest_runs() -> None:
    source = Listed([TraceRequest("big", 0.0, 100, 1), TraceRequest("small", 0.0, 4, 1)], block_size=None)
    report = replay(source, settings(num_blocks=10))
    assert (report.num_refused, timing_of(report).num_finished) == (1, 1)


def test_the_clock_can_be_stopped() -> None:
    source = Listed([TraceRequest("a", 0.0, 4, 50)], block_size=None)
    timing = timing_of(replay(source, settings(stop_at_s=10.0)))
    assert (timing.duration_s, timing.num_finished, timing.lives[0].last_token_s) == (10.0, 0, None)


@pytest.mark.parametrize("name", ["oneshot", "system", "chat", "agents", "mixed"])
def test_workloads_in_small_pools_with_every_value_checked(name: str, seed: int) -> None:
    workload = Workload(name, seed=seed, num_requests=60, rate=20.0, arrivals="bursty")
    report = replay(workload, ReplaySettings(2_500, mode="engine", check=True))
    assert timing_of(report).num_finished + report.num_refused == 60
    assert report.all.hit_tokens <= report.all.ideal_hit_tokens
    assert 0 < report.mean_held <= report.peak_held <= 1


def test_the_same_source_and_settings_give_the_same_report(seed: int) -> None:
    def once() -> ReplayReport:
        return replay(Workload("mixed", seed=seed, num_requests=150), ReplaySettings(2_000, mode="engine"))

    assert once() == once(), "invariant 11"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "turbo"}, "mode is 'turbo'"),
        ({"raw": True}, "raw counting"),
        ({"stop_at_s": 0.0}, "stop_at_s is 0.0"),
        ({"sample_every_s": 0.0}, "sample_every_s is 0.0"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_impossible_settings_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(100, **changes)
