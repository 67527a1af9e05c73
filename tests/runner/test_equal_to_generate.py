"""However a request is served, its tokens are those of plain `generate`, and its logits those of one cold forward."""

import random

import pytest
from tests.runner import stock
from tests.runner.served import Served, prompt_of
from tests.runner.tiny_models import CONFIGS, OTHERS, WITH_STATES, Tiny, tiny

from kvpool.engine.generation import Generation

MODELS = [*CONFIGS]
BLOCK_SIZES = (1, 2, 3, 4, 8, 16, 32, 64)
HYBRIDS = WITH_STATES - {"mamba", "mamba2"}


def family(rng: random.Random, num_shared: int = 37) -> list[list[int]]:
    """Prompts with a common beginning, one without, and the shortest."""
    shared = prompt_of(rng, num_shared)
    return [*(shared + prompt_of(rng, count) for count in (1, 5, 14, 14)), prompt_of(rng, 30), prompt_of(rng, 1)]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Tiny:
    return tiny(request.param)


def test_cold_then_warm(model: Tiny, rng: random.Random) -> None:
    """One after another, then all again: hits are found, and nothing else changes."""
    served, prompts = Served(model), family(rng)
    for number, prompt in enumerate(prompts):
        stock.check(served, served.run([prompt], tag=f"cold{number}-"))
    before = served.cache.stats.num_hit_tokens
    stock.check(served, served.run(prompts, tag="warm"))
    assert served.cache.stats.num_hit_tokens - before >= 4 * (37 // served.unit * served.unit)


def test_a_prompt_in_chunks_of_every_size(model: Tiny, rng: random.Random) -> None:
    prompt = prompt_of(rng, 21)
    for budget in range(1, len(prompt) + 1):
        served = Served(model, budget=budget, num_seqs=1)
        stock.check(served, served.run([prompt], 3))


def test_several_in_one_batch(model: Tiny, rng: random.Random) -> None:
    """They come at different times: chunks and decodes share steps."""
    served, requests = Served(model, budget=24, num_seqs=5), list[Generation]()
    for number in range(9):
        prompt = prompt_of(rng, rng.randrange(1, 40))
        requests.append(served.add(f"{number}", prompt, rng.randrange(1, 9)))
        for _ in range(rng.randrange(3)):
            served.step()
    served.finish()
    stock.check(served, requests)


def test_siblings_wait_for_their_prefix(model: Tiny, rng: random.Random) -> None:
    """A prompt that many ask for at once is computed once; so are four copies of one prompt."""
    served = Served(model, waits=True, budget=40)
    prompt = prompt_of(rng, 50)
    prompts = [prompt] * 4 + [prompt + prompt_of(rng, 3) for _ in range(3)]
    stock.check(served, served.run(prompts))
    assert served.cache.stats.num_hit_tokens >= 5 * (49 // served.unit * served.unit)


def test_siblings_in_one_step(model: Tiny, rng: random.Random) -> None:
    """Without waiting, equal prompts are computed side by side."""
    served = Served(model, budget=128)
    stock.check(served, served.run([prompt_of(rng, 20)] * 4))


def test_cancelled_neighbours(model: Tiny, rng: random.Random) -> None:
    """Some go in the middle of their prompts, some while decoding; others get their blocks at once."""
    served = Served(model, budget=16, num_seqs=6, num_blocks=blocks_for(model, 6, 60))
    stay, go = list[Generation](), list[Generation]()
    for number in range(6):
        kind = go if number % 2 else stay
        kind.append(served.add(f"{number}", prompt_of(rng, rng.randrange(20, 45)), 10))
    for number, request in enumerate(go):
        for _ in range(2 + 2 * number):
            served.step()
        served.scheduler.abort(request)
        stay.append(served.add(f"after {number}", prompt_of(rng, 30), 6))
    served.finish()
    stock.check(served, stay)
    assert served.cache.num_live_requests == 0


def test_preempted_for_want_of_room(model: Tiny, rng: random.Random) -> None:
    """A pool with room for one request at its end, for five. Windows and states let go of what they do not need."""
    served = Served(model, budget=32, num_seqs=5, num_blocks=blocks_for(model, 1, 48))
    requests = served.run([prompt_of(rng, count) for count in (12, 14, 20, 17)], 28)
    assert served.scheduler.num_preemptions > 0 or not served.cache.groups.keep_all
    stock.check(served, requests)


def test_preempted_at_any_time(model: Tiny, rng: random.Random) -> None:
    stock.check(*preempted_often(model, rng))


def preempted_often(model: Tiny, rng: random.Random) -> tuple[Served, list[Generation]]:
    """Every few steps the newest request goes back to the queue; now and then all do, and the cache is emptied."""
    served = Served(model, budget=24, num_seqs=4)
    prompts = [prompt_of(rng, count) for count in (30, 33, 1, 17, 45)]
    requests = [served.add(f"{number}", prompt, 12) for number, prompt in enumerate(prompts)]
    for step in range(10_000):
        if not served.scheduler.has_work:
            break
        served.step()
        if step % 3 == 2 and step < 40 and served.scheduler.running:
            served.scheduler._preempt_newest()
        if step % 9 == 8 and step < 40:
            assert served.scheduler.reset_prefix_cache(preempt_running=True)
    assert sum(request.num_preemptions for request in requests) > 4
    served.cache.check()
    return served, requests


def test_a_full_pool(model: Tiny, rng: random.Random) -> None:
    """Room for one request: every other one evicts what the last left."""
    served = Served(model, budget=32, num_blocks=blocks_for(model, 1, 60))
    for _ in range(2):
        stock.check(served, served.run([prompt_of(rng, count) for count in (50, 40, 55)], 5, tag=f"{rng.random()}"))
    assert served.cache.num_evictions > 0


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_of_every_size_in_random_order(model: Tiny, block_size: int, rng: random.Random) -> None:
    """Where states stand beside keys, blocks have 16 tokens or more: the layout finds how many."""
    if model.name in HYBRIDS and block_size not in (1, 16, 64):
        pytest.skip("the same layout as for blocks of 1 or 16")
    prompts = family(rng, 64 if block_size == 64 else 37)
    served = Served(model, block_size=block_size, budget=32, shuffled=rng)
    assert served.cache.block_size == block_size or model.name in HYBRIDS
    stock.check(served, served.run(prompts, 4, "cold"))
    stock.check(served, served.run(prompts, 4, "warm"))
    hit = served.cache.stats.num_hit_tokens
    assert hit >= 4 * (len(prompts[0]) - 1) // served.unit * served.unit


@pytest.mark.parametrize("name", OTHERS)
def test_models_with_ways_of_their_own(name: str, rng: random.Random) -> None:
    model, prompts = tiny(name), family(rng)
    served = Served(model, budget=20, num_seqs=3, shuffled=rng)
    stock.check(served, served.run(prompts, tag="cold"))
    stock.check(served, served.run(prompts, tag="warm"))
    stock.check(*preempted_often(model, rng))


def blocks_for(model: Tiny, num_requests: int, num_tokens: int) -> int:
    """A pool with room for so many requests of so many tokens."""
    return 1 + num_requests * Served(model, budget=32).cache.max_blocks(num_tokens)
