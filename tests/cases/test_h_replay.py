# ruff: noqa: N802
"""Cases H: what a replay counts, and whose hit rate it is."""

from collections.abc import Sequence

import pytest
from tests.replay.sources import Listed

from kvpool.replay.settings import ReplaySettings, Source
from kvpool.replay.simulator import replay
from kvpool.replay.trace import TraceRequest


def h01() -> Source:
    prompts: Sequence[tuple[list[int], int]] = (([1, 2, 3], 1400), ([1, 2, 4], 1536), ([1, 2, 3], 1400), ([5], 100))
    requests = [TraceRequest(f"r{n}", float(n), length, 1, block_ids=ids) for n, (ids, length) in enumerate(prompts, 1)]
    return Listed(requests, block_size=512)


def test_H01_all_ids() -> None:
    tally = replay(h01(), ReplaySettings(100, raw=True)).all
    assert (tally.hit_blocks, tally.total_blocks) == (5, 10)
    assert tally.block_hit_rate == pytest.approx(0.500)


def test_H01_full_blocks_tokens_and_mean_of_requests() -> None:
    tally = replay(h01(), ReplaySettings(100)).all
    assert (tally.hit_blocks, tally.total_blocks) == (4, 7)
    assert tally.block_hit_rate == pytest.approx(4 / 7)
    assert (tally.hit_tokens, tally.total_tokens) == (2 * 1024, 4436)
    assert tally.token_hit_rate == pytest.approx(0.462, abs=5e-4)
    assert tally.mean_request_hit_rate == pytest.approx(0.3495, abs=5e-5)
