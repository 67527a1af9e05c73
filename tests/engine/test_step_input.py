"""A step as arrays: that a worker finds in them all that a batch says, and in the blocks what stands there."""

import random

import numpy as np
import pytest

from kvpool import FullAttention, KVCacheManager, SlidingWindow, UsageError
from kvpool.core.request import EncoderInput, RequestLike
from kvpool.engine.engine import Engine
from kvpool.engine.generation import Generation
from kvpool.engine.model_runner import ModelRunner
from kvpool.engine.sampling import SamplingParams
from kvpool.engine.scheduler import Scheduler, SchedulerConfig
from kvpool.engine.step_input import StepAnswer, StepInput

VOCABULARY = 1000


class Remembering:
    """A worker without a model. Each token is written to its slots, the token and its position; each row is read back.

    The next token depends on all that a row looks at, so whoever gets blocks mixed up goes on otherwise.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        sizes = [group.block_size for group in cache.groups.all]
        self._kinds = [group.kind for group in cache.groups.all]
        self._memory = [np.full((cache.num_blocks * size, 2), -1) for size in sizes]
        self._sizes = sizes
        self.steps: list[StepInput] = []

    def execute(self, step: StepInput) -> StepAnswer:
        self.steps.append(step)
        for memory, slots, size in zip(self._memory, step.slots, self._sizes, strict=True):
            assert (slots >= size).all(), "a token of the step is written to the null block"
            memory[slots] = np.stack([step.token_ids, step.positions], axis=1)
        stops = step.positions[np.cumsum(step.counts) - 1] + 1
        tokens = [self._read(step, row, int(stop)) if step.gives[row] else -1 for row, stop in enumerate(stops)]
        return StepAnswer(np.array(tokens), {}, {})

    def _read(self, step: StepInput, row: int, stop: int) -> int:
        seen = 0
        for kind, memory, tables, size in zip(self._kinds, self._memory, step.block_tables, self._sizes, strict=True):
            positions = np.arange(kind.first_live(stop - 1), stop)
            found = memory[tables[row, positions // size] * size + positions % size]
            assert (found[:, 1] == positions).all(), f"row {row} reads foreign places"
            seen = hash((seen, *found[:, 0].tolist()))
        return seen % VOCABULARY


def expected(prompt: list[int], count: int, kinds: list[object]) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        seen = 0
        for kind in kinds:
            seen = hash((seen, *tokens[kind.first_live(len(tokens) - 1) :]))  # type: ignore[attr-defined]
        tokens.append(seen % VOCABULARY)
    return tokens[len(prompt) :]


def made(kinds: list[FullAttention | SlidingWindow], num_blocks: int, budget: int) -> tuple[Engine, Remembering]:
    cache = KVCacheManager(num_blocks, 4, groups=kinds, max_in_flight_tokens=budget)
    scheduler = Scheduler(cache, SchedulerConfig(budget, 8, waits_for_prefix=True))
    worker = Remembering(cache)
    return Engine(scheduler, ModelRunner(scheduler, worker)), worker


@pytest.mark.parametrize("kinds", [[FullAttention()], [FullAttention(), SlidingWindow(6)], [SlidingWindow(9)]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_texts_go_on_as_without_a_cache(kinds: list[FullAttention | SlidingWindow], seed: int) -> None:
    rng = random.Random(seed)
    engine, _ = made(kinds, 13 + 9 * len(kinds), 24)
    prefix = [rng.randrange(VOCABULARY) for _ in range(20)]
    prompts = [
        prefix[: rng.randrange(21)] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))] for _ in range(12)
    ]
    requests = [Generation(str(at), prompt, max_tokens=rng.randint(1, 25)) for at, prompt in enumerate(prompts)]
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_work:
        engine.step()
        engine.scheduler.cache.check()
    assert engine.scheduler.num_preemptions or isinstance(kinds[0], SlidingWindow)
    for request, prompt in zip(requests, prompts, strict=True):
        outputs = request.token_ids[len(prompt) :]
        assert outputs == expected(prompt, len(outputs), list(kinds))


def test_a_token_that_ends_a_request_is_its_last() -> None:
    engine, _ = made([FullAttention()], 50, 64)
    prompt = [1, 2, 3, 4, 5]
    outputs = expected(prompt, 9, [FullAttention()])
    request = Generation("a", prompt, max_tokens=9, stop_token_ids=[outputs[3]])
    engine.scheduler.add(request)
    ended: list[RequestLike] = []
    while engine.scheduler.has_work:
        ended += engine.step().ended
    assert ended == [request]
    assert request.token_ids[5:] == outputs[: outputs.index(outputs[3]) + 1]
    assert engine.scheduler.cache.num_free_blocks == engine.scheduler.cache.num_usable_blocks


def test_greedy_rows_need_no_arrays_and_others_say_how_they_sample() -> None:
    engine, worker = made([FullAttention()], 80, 64)
    engine.scheduler.add(Generation("a", [1, 2, 3], max_tokens=4))
    engine.step()
    assert worker.steps[-1].sampling is None
    warm = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, seed=11, num_logprobs=2)
    engine.scheduler.add(Generation("b", [1, 2, 3, 9], warm, max_tokens=4))
    for step in range(3):
        engine.step()
        rows = worker.steps[-1].sampling
        assert rows is not None
        assert rows.temperature.tolist() == [0.0, 0.5]
        assert (rows.top_k[1], rows.seeds[1], rows.num_logprobs.tolist()) == (7, 11, [-1, 2])
        assert rows.num_outputs.tolist() == [step + 1, step]


def test_targets_are_the_next_tokens_of_the_prompt() -> None:
    engine, worker = made([FullAttention()], 80, 8)
    prompt = list(range(10, 22))
    engine.scheduler.add(Generation("a", prompt, SamplingParams(0.0, num_prompt_logprobs=1), max_tokens=2))
    targets: list[int] = []
    while engine.scheduler.has_work:
        engine.step()
        rows = worker.steps[-1].sampling
        assert rows is not None
        targets += rows.targets.tolist()
    assert [target for target in targets if target >= 0] == prompt[1:]


def test_an_encoder_is_refused() -> None:
    engine, _ = made([FullAttention()], 50, 64)
    engine.scheduler.add(Generation("a", [1, 2], encoder_input=EncoderInput("x", 3)))
    with pytest.raises(UsageError, match="an encoder's input, which this engine does not compute"):
        engine.step()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": -1}, "seed is -1"),
        ({"num_logprobs": 21}, "num_logprobs is 21: 0 to 20"),
    ],
)
def test_values_out_of_range_are_named(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**wrong)  # type: ignore[arg-type]
