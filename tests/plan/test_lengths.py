"""How many requests of many lengths run at a time: against requests that are drawn and placed."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.plan.lengths import Lengths, concurrency
from kvpool.plan.memory import Plan, plan_memory
from kvpool.plan.model import Model
from kvpool.plan.spec import Attention

PLAIN = Model("plain", ((Attention(1, 8),),), 20_000)


def plan_of(num_blocks: int) -> Plan:
    return plan_memory(PLAIN, num_blocks * 16 * 32)


def drawn(plan: Plan, lengths: Lengths, count: int, rng: random.Random) -> int:
    """The blocks of so many requests that are met at a random moment."""
    weights = [max(output, 1) * times for (_, output), times in lengths.counts]
    pairs = rng.choices([pair for pair, _ in lengths.counts], weights, k=count)
    return sum(plan.steady_blocks(max(prompt + int(rng.random() * output), 1)) for prompt, output in pairs)


@pytest.mark.parametrize(
    "lengths",
    [
        [(100, 8_000)],
        [(2_000, 100), (2_000, 100), (500, 4_000)],
        [(8_000, 1), (100, 1), (100, 2_000)],
        [(1_000, 0)],
    ],
)
def test_so_many_fit_99_in_100_times(lengths: list[tuple[int, int]], rng: random.Random) -> None:
    plan, found = plan_of(20_000), Lengths.of(lengths)
    safe = concurrency(plan, found).safe_requests
    fitting = sum(drawn(plan, found, safe, rng) <= plan.num_usable_blocks for _ in range(2_000))
    assert fitting >= 2_000 * 0.98
    many = sum(drawn(plan, found, safe + safe // 4 + 1, rng) <= plan.num_usable_blocks for _ in range(200))
    assert many < 200 * 0.99


def test_the_mean_of_what_is_met(rng: random.Random) -> None:
    plan, found = plan_of(20_000), Lengths.of([(2_000, 100), (500, 4_000)])
    mean = sum(drawn(plan, found, 1_000, rng) for _ in range(20)) / 20_000
    assert concurrency(plan, found).mean_blocks == pytest.approx(mean, rel=0.03)


@given(
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 30_000)), min_size=1, max_size=9), st.integers(2, 5_000)
)
def test_the_three_figures_are_in_order(lengths: list[tuple[int, int]], num_blocks: int) -> None:
    plan = plan_of(num_blocks)
    try:
        found = concurrency(plan, Lengths.of(lengths))
    except ConfigError:
        return
    assert 0 <= found.safe_requests <= found.mean_requests
    assert found.at_full_length <= found.mean_requests
    assert 0 <= found.num_too_long < len(lengths)


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(-1, 3)], [(2**40, 0)]])
def test_no_lengths_at_all(lengths: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError):
        Lengths.of(lengths)
