"""What a replay counts: the figures that are known of real traces, and small ones worked out by hand."""

from pathlib import Path

import pytest
from tests.replay.sources import Listed

from kvpool.replay.readers import open_trace
from kvpool.replay.report import ReplayReport
from kvpool.replay.settings import ReplaySettings
from kvpool.replay.simulator import replay
from kvpool.replay.trace import TraceRequest

INFINITE = 300_000


def rates(report: ReplayReport) -> tuple[float, float, float]:
    return report.all.block_hit_rate, report.all.ideal_block_hit_rate, report.all.token_hit_rate


@pytest.mark.parametrize(
    ("num_blocks", "rate"),
    [(1_000, 0.0445), (3_000, 0.0653), (10_000, 0.2116), (30_000, 0.3257), (100_000, 0.3637), (INFINITE, 0.3664)],
)
def test_mooncake_counted_raw(shared: Path, num_blocks: int, rate: float) -> None:
    trace = open_trace(shared / "data/traces/mooncake_conversation.jsonl")
    report = replay(trace, ReplaySettings(num_blocks, raw=True))
    hit, ideal, _ = rates(report)
    assert report.all.total_blocks == 288_500
    assert hit == pytest.approx(rate, abs=5e-4)
    assert ideal == pytest.approx(0.3664, abs=5e-5)


def test_mooncake_counted_as_an_engine_would(shared: Path) -> None:
    trace = open_trace(shared / "data/traces/mooncake_conversation.jsonl")
    report = replay(trace, ReplaySettings(INFINITE, check=True))
    assert report.all.token_hit_rate == pytest.approx(0.3734, abs=5e-5)
    assert report.all.hit_tokens == report.all.ideal_hit_tokens
    assert report.evictions == report.all.recomputed_tokens == 0


@pytest.mark.parametrize(("num_blocks", "rate"), [(1_000, 0.7112), (3_000, 0.9228), (INFINITE, 0.9272)])
def test_tau_airline_counted_raw(shared: Path, num_blocks: int, rate: float) -> None:
    trace = open_trace(shared / "data/traces/tau_airline_blk16.jsonl.gz")
    hit, ideal, _ = rates(replay(trace, ReplaySettings(num_blocks, raw=True)))
    assert hit == pytest.approx(rate, abs=5e-4)
    assert ideal == pytest.approx(0.9272, abs=5e-5)


def test_tau_airline_counted_as_an_engine_would(shared: Path) -> None:
    trace = open_trace(shared / "data/traces/tau_airline_blk16.jsonl.gz")
    assert rates(replay(trace, ReplaySettings(INFINITE)))[2] == pytest.approx(0.9251, abs=5e-5)


def test_a_request_larger_than_the_pool_is_refused_and_counts_as_a_miss() -> None:
    requests = [TraceRequest(str(n), 0.0, 64, 1, block_ids=[0, 1, 2, 3]) for n in range(2)]
    report = replay(Listed(requests, block_size=16), ReplaySettings(num_blocks=4))
    assert (report.num_refused, report.all.total_tokens, report.all.hit_tokens) == (2, 128, 0)
    assert report.all.ideal_hit_tokens == 48, "the last block is always computed"


def test_prompts_shorter_than_a_block_have_no_full_block() -> None:
    requests = [TraceRequest(str(n), 0.0, 5, 1, block_ids=[]) for n in range(3)]
    for raw in (False, True):
        tally = replay(Listed(requests, block_size=16), ReplaySettings(8, raw=raw)).all
        assert (tally.num_requests, tally.total_blocks, tally.hit_tokens) == (3, 0, 0)


def test_smaller_and_larger_blocks_than_the_trace_names() -> None:
    requests = [TraceRequest(str(n), 0.0, 8 * 16 + 1, 1, block_ids=[*range(6), 6 + n * 3, 7 + n * 3]) for n in range(2)]
    hit_tokens = {
        block_size: replay(Listed(requests, block_size=16), ReplaySettings(100, block_size)).all.hit_tokens
        for block_size in (4, 8, 16, 32, 64)
    }
    assert hit_tokens == {4: 96, 8: 96, 16: 96, 32: 96, 64: 64}


def test_tenants_and_turns_have_tables_of_their_own() -> None:
    requests = [
        TraceRequest(str(n), float(n), 33, 1, block_ids=[0, 1], tenant=tenant, turn=n // 2)
        for n, tenant in enumerate(("a", "b", "a", "b"))
    ]
    source = Listed(requests, block_size=16)
    shared = replay(source, ReplaySettings(100))
    assert {name: tally.hit_tokens for name, tally in shared.by_tenant.items()} == {"a": 32, "b": 64}
    assert {turn: tally.hit_tokens for turn, tally in shared.by_turn.items()} == {0: 32, 1: 64}
    apart = replay(source, ReplaySettings(100, separate_tenants=True))
    assert {name: tally.hit_tokens for name, tally in apart.by_tenant.items()} == {"a": 32, "b": 32}
    assert sum(tally.ideal_hit_tokens for tally in apart.by_tenant.values()) == apart.all.ideal_hit_tokens == 64


def test_tenants_are_apart_however_large_the_ids() -> None:
    requests = [
        TraceRequest("a", 0.0, 33, 1, block_ids=[2**64, 2**64 + 1], tenant="a"),
        TraceRequest("b", 1.0, 33, 1, block_ids=[0, 1], tenant="b"),
    ]
    assert replay(Listed(requests, block_size=16), ReplaySettings(100, separate_tenants=True)).all.ideal_hit_tokens == 0


@pytest.mark.parametrize("start", [2**63 - 2, 2**64, 2**127])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_ids_count_alike_however_large(start: int, block_size: int) -> None:
    def counted(first: int) -> object:
        requests = [
            TraceRequest(str(n), 0.0, 16 * 6 + 1, 40, block_ids=[*range(first, first + 5), first + 5 + n])
            for n in range(3)
        ]
        return replay(Listed(requests, block_size=16), ReplaySettings(60, block_size)).all

    assert counted(start) == counted(0)


def test_prompts_of_lengths_alone_share_nothing_however_long() -> None:
    requests = [TraceRequest(str(n), float(n), 20_000_000, 1) for n in range(2)]
    tally = replay(Listed(requests, block_size=None), ReplaySettings(100, block_size=1_000)).all
    assert (tally.total_blocks, tally.ideal_hit_blocks) == (40_000, 0)
