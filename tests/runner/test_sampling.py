"""Draws depend on logits, seed and the number of the output alone; they have the probabilities that were asked for."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.runner import stock
from tests.runner.served import Served, outputs, prompt_of
from tests.runner.tiny_models import Tiny, tiny

from kvpool.engine.generation import Generation
from kvpool.engine.sampling import Logprobs, SamplingParams
from kvpool.engine.step_input import SamplingRows
from kvpool.errors import UsageError
from kvpool.runner.sampler import sample

WARM = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=7)


@pytest.fixture(params=["llama", "gemma3_text", "mamba", "bamba"])
def model(request: pytest.FixtureRequest) -> Tiny:
    return tiny(request.param)


# -- the same draws, however a request is served


def draws(served: Served, prompt: list[int], name: str, params: SamplingParams = WARM) -> list[int]:
    request = served.add(name, prompt, 12, params)
    served.finish()
    return outputs(request)


def test_alone_in_a_batch_in_chunks_and_warm(model: Tiny) -> None:
    rng = random.Random(0)
    prompt = prompt_of(rng, 40)
    alone = draws(Served(model), prompt, "a")
    assert draws(Served(model, budget=7, num_seqs=1), prompt, "a") == alone
    served = Served(model, num_seqs=6)
    for number in range(5):
        params = SamplingParams(temperature=0.2 * number, seed=number)
        served.add(f"other {number}", prompt_of(rng, 9 * number + 1), 5, params)
    assert draws(served, prompt, "in a batch") == alone
    assert draws(served, prompt, "warm") == alone
    assert len(set(alone)) > 3


def test_preempted(model: Tiny) -> None:
    prompt = prompt_of(random.Random(0), 40)
    alone = draws(Served(model), prompt, "a")
    served = Served(model)
    request = served.add("a", prompt, 12, WARM)
    while served.scheduler.has_work:
        served.step()
        if len(outputs(request)) % 3 == 2 and served.scheduler.running and request.num_preemptions < 3:
            served.scheduler._preempt_newest()
    assert request.num_preemptions == 3
    assert outputs(request) == alone


def test_other_seeds_give_other_tokens() -> None:
    prompt, served = prompt_of(random.Random(0), 20), Served(tiny("llama"))
    found = {tuple(draws(served, prompt, f"{seed}", SamplingParams(seed=seed))) for seed in range(5)}
    assert len(found) == 5


def test_without_a_seed_every_request_has_one_of_its_own() -> None:
    prompt, served = prompt_of(random.Random(0), 20), Served(tiny("llama"))
    assert draws(served, prompt, "a", SamplingParams()) != draws(served, prompt, "b", SamplingParams())


def test_a_stop_token_ends_a_request() -> None:
    prompt = prompt_of(random.Random(0), 20)
    said = stock.greedy(tiny("llama"), prompt, 8)
    served = Served(tiny("llama"))
    request = served.add("a", prompt, 8, stop_token_ids=[said[4]])
    served.finish()
    assert outputs(request) == said[: said.index(said[4]) + 1]


# -- probabilities


def rows_of(params: SamplingParams, seeds: np.ndarray) -> SamplingRows:
    """Rows that differ in their seeds alone; every one draws its third output."""
    count = len(seeds)

    def all_of(value: float, dtype: type) -> np.ndarray:
        return np.full(count, value, dtype)

    return SamplingRows(
        all_of(params.temperature, np.float32), all_of(params.top_p, np.float32), all_of(params.top_k, np.int64),
        seeds, all_of(2, np.int64), all_of(-1, np.int64), all_of(-1, np.int64), all_of(-1, np.int64),
    )  # fmt: skip


def frequencies(logits: torch.Tensor, params: SamplingParams, count: int = 20_000) -> torch.Tensor:
    sampling = rows_of(params, np.arange(count, dtype=np.int64))
    tokens = sample(logits.expand(count, -1), range(count), sampling)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double()


def wanted(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities by the book: the likeliest tokens up to top_k, up to the one that fills top_p, made to sum to 1."""
    chances = torch.softmax(logits.double() / params.temperature, -1)
    order, kept, total = chances.argsort(descending=True).tolist(), torch.zeros_like(chances), 0.0
    for token in order[: params.top_k or None]:
        kept[token] = chances[token]
        total += float(chances[token])
        if total >= params.top_p:
            break
    return kept / kept.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=5),
        SamplingParams(temperature=1.3, top_p=0.6, top_k=12),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_k=1),
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(params: SamplingParams) -> None:
    """Chi-square, with seeds that are the same in every run; far less than one in 1,000 others would be above this."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    found, expected = frequencies(logits, params), wanted(logits, params)
    assert found[expected == 0].sum() == 0
    kept = expected > 0
    counts = expected[kept] * found.sum()
    chi_square = float(((found[kept] - counts) ** 2 / counts).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square <= freedom + 3.8 * (2 * freedom) ** 0.5 + 10


def test_a_wrong_temperature_is_seen_by_that() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    found = frequencies(logits, SamplingParams(temperature=1.05))
    counts = wanted(logits, SamplingParams()) * found.sum()
    assert float(((found - counts) ** 2 / counts).sum()) > 39 + 3.8 * 78**0.5 + 10


def test_draws_of_one_seed_are_independent() -> None:
    """Pairs of outputs that follow one another, over seeds that follow one another."""
    logits, pairs = torch.zeros(4), Counter[tuple[int, int]]()
    for seed in range(100):
        count = 41
        sampling = rows_of(SamplingParams(), np.full(count, seed, np.int64))
        sampling.num_outputs[:] = np.arange(count)
        tokens = sample(logits.expand(count, -1), range(count), sampling).tolist()
        pairs.update(pairwise(tokens))
    assert len(pairs) == 16
    assert sum((seen - 250) ** 2 / 250 for seen in pairs.values()) <= 15 + 3.8 * 30**0.5 + 10


def test_zero_temperature_takes_the_likeliest_beside_others() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(64, -1)
    sampling = rows_of(SamplingParams(), np.arange(64, dtype=np.int64))
    sampling.temperature[::2] = 0
    tokens = sample(logits, range(64), sampling)
    assert (tokens[::2] == 1).all()
    assert (tokens[1::2] != 1).any()


def test_the_likeliest_stays_however_small_the_share() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]]).expand(64, -1)
    sampling = rows_of(SamplingParams(top_p=1e-300), np.arange(64, dtype=np.int64))
    assert (sample(logits, range(64), sampling) == 1).all()


def test_equal_logits_take_the_first() -> None:
    assert sample(torch.zeros(2, 9), [0, 1], None).tolist() == [0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": 0.0},
        {"top_p": 1.1}, {"top_k": -1}, {"top_k": 2**31}, {"seed": -1}, {"num_logprobs": 21},
        {"num_prompt_logprobs": -1},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


# -- log-probabilities


def require_logprobs(served: Served, request: Generation, found: Logprobs, position: int, num_top: int) -> None:
    """Of the token at this position."""
    logits = stock.logits(served.tiny, tuple(request.token_ids))[position - 1]
    truth = torch.log_softmax(logits, -1)
    assert found.token_id == request.token_ids[position]
    assert found.logprob == pytest.approx(float(truth[found.token_id]), abs=2 * stock.tolerance(logits))
    assert len(found.top) == num_top
    assert [logprob for _, logprob in found.top] == sorted((logprob for _, logprob in found.top), reverse=True)
    for token, logprob in found.top:
        assert logprob == pytest.approx(float(truth[token]), abs=2 * stock.tolerance(logits))
    best = truth.topk(max(num_top, 1)).values[:num_top].tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(best, abs=2 * stock.tolerance(logits))


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_of_outputs(model: Tiny, num_top: int, temperature: float, rng: random.Random) -> None:
    """Before temperature and top_k."""
    served = Served(model)
    params = SamplingParams(temperature=temperature, top_k=30, seed=3, num_logprobs=num_top)
    request = served.add("a", prompt_of(rng, 25), 8, params)
    served.add("b", prompt_of(rng, 12), 4)
    served.finish()
    told = served.notes.logprobs["a"]
    assert len(told) == 8
    assert "b" not in served.notes.logprobs
    for position, found in enumerate(told, 25):
        require_logprobs(served, request, found, position, num_top)


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_logprobs_of_the_prompt(model: Tiny, budget: int, rng: random.Random) -> None:
    """Of every token but the first, each told once, across chunks; a cached prefix is computed again for it."""
    served = Served(model, budget=budget, num_seqs=min(budget, 3))
    prompt = prompt_of(rng, 26)
    served.run([prompt], tag="before")
    request = served.add("a", prompt, 6, SamplingParams(temperature=0, num_prompt_logprobs=2))
    served.add("b", prompt_of(rng, 20), 4)
    served.finish()
    told = served.notes.prompt_logprobs["a"]
    assert sorted(told) == list(range(1, 26))
    for position, found in told.items():
        assert len(found) == 1, f"position {position} was told {len(found)} times"
        require_logprobs(served, request, found[0], position, 2)
    assert set(served.notes.prompt_logprobs) == {"a"}
    assert "a" not in served.notes.logprobs


@pytest.mark.parametrize("after", [1, 2, 6])
def test_logprobs_of_the_prompt_after_a_preemption(model: Tiny, after: int, rng: random.Random) -> None:
    """What is computed again is told again, the same; outputs are no part of the prompt."""
    served = Served(model, budget=8, num_seqs=2)
    request = served.add("a", prompt_of(rng, 26), 9, SamplingParams(temperature=0, num_prompt_logprobs=2))
    for _ in range(after):
        served.step()
    served.scheduler._preempt_newest()
    served.finish()
    told = served.notes.prompt_logprobs["a"]
    assert sorted(told) == list(range(1, 26))
    for position, found in told.items():
        for each in found:
            require_logprobs(served, request, each, position, 2)
    stock.check(served, [request])


def test_a_prompt_of_one_token_has_none() -> None:
    served = Served(tiny("llama"))
    served.add("a", [5], 3, SamplingParams(temperature=0, num_prompt_logprobs=2))
    served.finish()
    assert not served.notes.prompt_logprobs
