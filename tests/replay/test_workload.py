"""The workload generator: seeded, in order, and in the shapes that it promises."""

from itertools import islice

import pytest

from kvpool.errors import ConfigError
from kvpool.replay.settings import ReplaySettings
from kvpool.replay.simulator import replay
from kvpool.replay.workload import ARRIVALS, KINDS, Workload

KNOWN_TOKENS, KNOWN_SUM, KNOWN_END_S = 185686, 11908970141, 35.719450776154886


@pytest.mark.parametrize("arrivals", ARRIVALS)
@pytest.mark.parametrize("name", KINDS)
def test_requests_come_in_order_and_are_whole(name: str, arrivals: str, seed: int) -> None:
    requests = list(Workload(name, seed=seed, num_requests=200, arrivals=arrivals))
    assert len({request.request_id for request in requests}) == 200
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert times[0] == 0
    for request in requests:
        assert request.prompt_token_ids is not None
        assert request.output_token_ids is not None
        assert len(request.prompt_token_ids) == request.num_prompt_tokens > 0
        assert len(request.output_token_ids) == request.num_output_tokens > 0


def test_the_seed_decides_everything(seed: int) -> None:
    def first(number: int, seed: int) -> list[object]:
        return list(islice(Workload("mixed", seed=seed), number))

    assert first(50, seed) == first(50, seed)
    assert first(50, seed) != first(50, seed + 1)


def test_a_known_seed_gives_known_traffic() -> None:
    """The same on every machine (invariant 11): these figures were written down once."""
    requests = list(Workload("mixed", seed=7, num_requests=100))
    prompts = [request.prompt_token_ids or [] for request in requests]
    assert sum(map(len, prompts)) == KNOWN_TOKENS
    assert sum(map(sum, prompts)) == KNOWN_SUM
    assert requests[-1].arrival_s == pytest.approx(KNOWN_END_S, rel=1e-12)


def test_turns_repeat_all_that_was_said(seed: int) -> None:
    sessions: dict[str, list[int]] = {}
    for request in Workload("chat", seed=seed, num_requests=300):
        assert request.session is not None
        assert request.prompt_token_ids is not None
        assert request.output_token_ids is not None
        said = sessions.get(request.session, [])
        assert request.prompt_token_ids[: len(said)] == said
        sessions[request.session] = [*request.prompt_token_ids, *request.output_token_ids]


def test_rates_are_kept_on_average() -> None:
    for arrivals in ARRIVALS:
        requests = list(Workload("oneshot", seed=3, num_requests=4000, rate=5.0, arrivals=arrivals))
        assert 4000 / requests[-1].arrival_s == pytest.approx(5.0, rel=0.15)


def test_oneshot_prompts_share_nothing_and_system_prompts_are_shared(seed: int) -> None:
    alone = replay(Workload("oneshot", seed=seed, num_requests=200), ReplaySettings(50_000)).all
    assert alone.ideal_hit_tokens == 0
    shared = replay(Workload("system", seed=seed, num_requests=200), ReplaySettings(50_000)).all
    assert shared.ideal_token_hit_rate > 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "nope"}, "workload 'nope'"),
        ({"arrivals": "nope"}, "arrivals 'nope'"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": float("nan")}, "rate is nan"),
    ],
)
def test_impossible_workloads_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(**changes)  # type: ignore[arg-type]
