"""Where steps have the same shapes, logits are equal to the last bit: whose blocks these are must not matter at all.

Between different shapes kernels add in another order; `test_equal_to_generate.py` says how far apart that may be.
"""

import random
from collections.abc import Callable

import pytest
import torch
from tests.runner.served import Served, prompt_of
from tests.runner.tiny_models import CONFIGS, Tiny, tiny

from kvpool.engine.generation import Generation

MODELS = [*CONFIGS]
NUM_TOKENS, BUDGET = 70, 32
"""Prompts are computed in chunks of 32, 32 and 6 tokens, in blocks of 16; 64 are findable afterwards."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Tiny:
    return tiny(request.param)


def served(model: Tiny, num_blocks: int = 400, shuffled: random.Random | None = None) -> Served:
    return Served(model, block_size=16, budget=BUDGET, num_blocks=num_blocks, shuffled=shuffled)


def require_equal(one: Served, its: Generation, other: Served, others: Generation) -> None:
    """All logits after the prompt, and there are as many of them."""
    a, b = one.logits_of(its), other.logits_of(others)
    assert a.keys() == b.keys()
    assert len(a) == 8
    assert [place for place in a if not torch.equal(a[place], b[place])] == []


def alone(engine: Served, prompt: list[int], name: str) -> Generation:
    [request] = engine.run([prompt], tag=name)
    return request


def test_warm_against_cold(model: Tiny, rng: random.Random) -> None:
    engine, prompt = served(model), prompt_of(rng, NUM_TOKENS)
    cold = alone(engine, prompt, "cold")
    assert engine.cache.match(Generation("asks", prompt)).num_tokens == 2 * BUDGET
    require_equal(engine, cold, engine, alone(engine, prompt, "warm"))


def test_a_prefix_that_another_prompt_left(model: Tiny, rng: random.Random) -> None:
    engine, prompt = served(model), prompt_of(rng, NUM_TOKENS)
    alone(engine, prompt[: 2 * BUDGET] + prompt_of(rng, 6), "other")
    assert engine.cache.match(Generation("asks", prompt)).num_tokens == 2 * BUDGET
    fresh = served(model)
    require_equal(fresh, alone(fresh, prompt, "cold"), engine, alone(engine, prompt, "warm"))


def test_other_blocks(model: Tiny, rng: random.Random) -> None:
    prompt, one, other = prompt_of(rng, NUM_TOKENS), served(model), served(model, shuffled=rng)
    require_equal(one, alone(one, prompt, "a"), other, alone(other, prompt, "b"))


def evict(engine: Served, rng: random.Random) -> None:
    for number in range(8):
        alone(engine, prompt_of(rng, NUM_TOKENS), f"other {number} {rng.random()}")


def clear(engine: Served, _: random.Random) -> None:
    assert engine.cache.clear()


@pytest.mark.parametrize("lose", [evict, clear])
def test_lost_and_computed_again(
    model: Tiny, lose: Callable[[Served, random.Random], None], rng: random.Random
) -> None:
    probe = served(model)
    engine, prompt = served(model, 1 + 2 * probe.cache.max_blocks(NUM_TOKENS + 8)), prompt_of(rng, NUM_TOKENS)
    first = alone(engine, prompt, "first")
    lose(engine, rng)
    assert engine.cache.match(Generation("asks", prompt)).num_tokens == 0
    require_equal(engine, first, engine, alone(engine, prompt, "again"))


def test_the_same_batch_on_other_blocks(model: Tiny, rng: random.Random) -> None:
    """Several requests that share a beginning, in steps of the same shapes."""
    shared = prompt_of(rng, 33)
    prompts = [shared + prompt_of(rng, count) for count in (3, 9, 4)] + [prompt_of(rng, 11)]
    one, other = served(model), served(model, shuffled=rng)
    for its, others in zip(one.run(prompts), other.run(prompts), strict=True):
        require_equal(one, its, other, others)
