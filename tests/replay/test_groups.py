"""Replays of several groups of layers: every value checked, and what an infinite cache could have hit."""

import random
from typing import Any

import pytest
from tests.replay.sources import Listed

from kvpool import ChunkedLocal, FullAttention, LayerKind, SlidingWindow, StateSpace
from kvpool.core.publication import Setting
from kvpool.engine.scheduler import SchedulerConfig
from kvpool.replay.report import ReplayReport, Tally
from kvpool.replay.settings import ReplaySettings
from kvpool.replay.simulator import replay
from kvpool.replay.trace import TraceRequest
from kvpool.replay.workload import Workload

FULL = FullAttention()
LAYOUTS: dict[str, tuple[LayerKind, ...]] = {
    "full and windows": (FULL, *[SlidingWindow(200)] * 2),
    "sinks": (FULL, SlidingWindow(70, num_sinks=20)),
    "full and states": (FULL, StateSpace(), StateSpace(64, num_scratch_blocks=1)),
    "chunked": (FULL, ChunkedLocal(96)),
    "no full": (SlidingWindow(40), ChunkedLocal(64)),
    "mixed block sizes": (FullAttention(32), SlidingWindow(50), StateSpace(block_size=32)),
    "no common unit but 8": (FullAttention(16), FullAttention(24)),
}
SMALL_STEPS = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=32)


def run(source: Workload | Listed, kinds: tuple[LayerKind, ...], num_blocks: int, **changes: Any) -> ReplayReport:
    options: dict[str, Any] = {"groups": kinds, "scheduler": SMALL_STEPS, "check": True}
    return replay(source, ReplaySettings(num_blocks, **(options | changes)))


def assert_consistent(report: ReplayReport) -> None:
    for tally in (report.all, *report.by_tenant.values(), *report.by_turn.values()):
        assert 0 <= tally.hit_blocks <= tally.ideal_hit_blocks <= tally.total_blocks
        assert tally.ideal_hit_tokens < tally.total_tokens
    assert 0 < report.mean_held <= report.peak_held <= 1
    assert report.all.hit_tokens % report.alignment == report.all.ideal_hit_tokens % report.alignment == 0


@pytest.mark.parametrize("drop_last_block", [False, True])
@pytest.mark.parametrize("publication", ["ranked", "every", 0])
@pytest.mark.parametrize("mode", ["engine", "cache"])
@pytest.mark.parametrize("kinds", LAYOUTS.values(), ids=LAYOUTS)
def test_every_value_is_read_as_it_was_written(
    kinds: tuple[LayerKind, ...], mode: str, publication: Setting, drop_last_block: bool, seed: int
) -> None:
    workload = Workload("mixed", seed=seed, num_requests=10, rate=20.0, arrivals="bursty")
    options = {"publication": publication, "drop_last_block": drop_last_block}
    report = run(workload, kinds, 600 * len(kinds), mode=mode, **options)
    assert_consistent(report)
    assert report.all.num_requests == 10
    if report.timing is not None:
        assert report.timing.num_finished + report.num_refused == 10
    assert len(report.groups) == len(kinds)
    assert (report.publication, report.mode) == (publication, mode)


@pytest.mark.parametrize("publication", ["ranked", 0])
@pytest.mark.parametrize("kinds", LAYOUTS.values(), ids=LAYOUTS)
def test_every_value_is_right_where_requests_are_preempted(
    kinds: tuple[LayerKind, ...], publication: Setting, rng: random.Random
) -> None:
    """Prompts of shared beginnings and long answers, all at once, in a pool that holds a few of them."""
    requests = []
    for n in range(20):
        prompt = [*range(rng.randrange(10) * 24), *rng.choices(range(1_000), k=rng.randint(1, 90))]
        requests.append(TraceRequest(str(n), 0.1 * n, len(prompt), rng.randint(20, 90), prompt_token_ids=prompt))
    num_blocks = 16 * len(kinds) + 12
    report = run(Listed(requests, None), kinds, num_blocks, mode="engine", publication=publication)
    assert_consistent(report)
    assert report.timing is not None
    assert report.timing.num_finished + report.num_refused == 20
    assert report.num_refused < 10


def prompts(*lengths: int, block_size: int = 16) -> Listed:
    """Prompts that begin alike, one after another; each goes its own way behind these lengths."""
    requests = [
        TraceRequest(
            str(n),
            100.0 * n,
            length + 40,
            2,
            block_ids=[*range(length // block_size), *[900 + 9 * n + k for k in range(3)]],
        )
        for n, length in enumerate(lengths)
    ]
    return Listed(requests, block_size)


def hits(tally: Tally) -> tuple[int, int]:
    return tally.hit_tokens, tally.ideal_hit_tokens


@pytest.mark.parametrize("mode", ["engine", "cache"])
@pytest.mark.parametrize(
    ("kinds", "drop_last_block", "hit"),
    [
        ((FULL,), False, 160 + 96),
        ((FULL, SlidingWindow(40)), False, 160 + 96),
        ((FULL, SlidingWindow(40)), True, 144 + 80),
        ((FullAttention(64), SlidingWindow(40)), False, 128 + 64),
        ((FullAttention(64), SlidingWindow(40)), True, 64 + 0),
        ((FULL, ChunkedLocal(64)), False, 160 + 96),
    ],
    ids=str,
)
def test_an_infinite_cache_hits_as_far_as_alignment_lets_it(
    kinds: tuple[LayerKind, ...], drop_last_block: bool, hit: int, mode: str
) -> None:
    """The second prompt shares 160 tokens with the first, the third 96 with both."""
    report = run(prompts(160, 160, 96), kinds, 900, mode=mode, drop_last_block=drop_last_block)
    assert hits(report.all) == (hit, hit)


@pytest.mark.parametrize("mode", ["engine", "cache"])
def test_a_state_is_there_once_a_prompt_left_the_shared_prefix(mode: str) -> None:
    """The second prompt finds 160 tokens and no state there, and leaves one for the third; the fourth is back at 96."""
    report = run(prompts(160, 160, 160, 96), (FULL, StateSpace()), 900, mode=mode, publication=0)
    assert hits(report.all) == (160, 160 + 160 + 96)


@pytest.mark.parametrize("mode", ["engine", "cache"])
def test_an_infinite_cache_hits_nothing_where_no_state_is_kept(mode: str) -> None:
    report = run(prompts(160, 160, 160), (FULL, StateSpace("none")), 900, mode=mode)
    assert hits(report.all) == (0, 0)
    assert report.smallest_hit is None
    assert (report.all.recomputed_tokens, report.all.total_tokens) == (0, 600)


@pytest.mark.parametrize("mode", ["engine", "cache"])
def test_a_report_names_its_layers(mode: str) -> None:
    kinds = (FullAttention(32), SlidingWindow(1_000, num_sinks=4), SlidingWindow(50), ChunkedLocal(64), StateSpace())
    report = run(prompts(160), kinds, 900, mode=mode, publication=64, drop_last_block=True)
    windows = ("sliding window 1,000 with 4 sinks", "sliding window 50")
    assert report.groups == ("full attention in blocks of 32", *windows, "chunks of 64", "state")
    assert (report.alignment, report.smallest_hit, report.publication, report.block_size) == (32, 64, 64, 16)
    plain = report.to_dict()
    assert [plain[name] for name in ("groups", "alignment", "smallest_hit", "publication")] == [
        report.groups,
        32,
        64,
        64,
    ]


def test_what_is_evicted_and_computed_again_is_counted() -> None:
    """A pool that forgets between two equal prompts: an infinite cache would have hit."""
    between = [TraceRequest(f"other {n}", 50.0, 200, 1) for n in range(5)]
    first, second = prompts(160, 160)
    source = Listed([first, *between, second], 16)
    report = run(source, (FULL, SlidingWindow(40)), 40, mode="cache")
    assert hits(report.all) == (0, 160)
    assert report.all.recomputed_tokens == 160


@pytest.mark.parametrize("kinds", LAYOUTS.values(), ids=LAYOUTS)
def test_the_same_settings_give_the_same_report(kinds: tuple[LayerKind, ...], seed: int) -> None:
    def once() -> ReplayReport:
        return run(Workload("chat", seed=seed, num_requests=30), kinds, 800, mode="engine", check=False)

    assert once() == once(), "invariant 11"


@pytest.mark.parametrize("mode", ["engine", "cache"])
@pytest.mark.parametrize("publication", ["ranked", "every"])
def test_windows_hit_what_full_attention_alone_would_where_nothing_is_evicted(
    mode: str, publication: Setting, seed: int
) -> None:
    workload = Workload("chat", seed=seed, num_requests=12)
    plain = run(workload, (FULL,), 20_000, mode=mode)
    windows = run(workload, (FULL, SlidingWindow(100), ChunkedLocal(64)), 60_000, mode=mode, publication=publication)
    assert windows.evictions == plain.evictions == 0
    assert hits(windows.all) == hits(plain.all)
