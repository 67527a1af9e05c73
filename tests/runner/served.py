"""A model behind a scheduler and a cache, with all that it said: tokens, logits, log-probabilities."""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tests.runner.tiny_models import Tiny

from kvpool import KVCacheManager
from kvpool.engine.batch import Batch
from kvpool.engine.engine import Engine, StepOutput
from kvpool.engine.generation import Generation
from kvpool.engine.model_runner import ModelRunner
from kvpool.engine.sampling import GREEDY, Logprobs, SamplingParams
from kvpool.engine.scheduler import Scheduler, SchedulerConfig
from kvpool.runner.torch_worker import TorchWorker


class Notes:
    """The runner of one engine: notes what the worker says, by request."""

    def __init__(self) -> None:
        self.logits: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        """By the position of the last token that they are computed from."""
        self.logprobs: dict[str, list[Logprobs]] = defaultdict(list)
        self.prompt_logprobs: dict[str, dict[int, list[Logprobs]]] = defaultdict(lambda: defaultdict(list))
        """By the position of the token that they are of: all that was ever told of it."""
        self.runner: ModelRunner | None = None
        self.batch = Batch()

    def run(self, batch: Batch) -> Sequence[int | None]:
        assert self.runner is not None
        self.batch = batch
        tokens = self.runner.run(batch)
        if self.runner.answer is not None:
            for row, found in self.runner.answer.logprobs.items():
                self.logprobs[self._name(row)].append(found)
            for row, told in self.runner.answer.prompt_logprobs.items():
                for position, each in enumerate(told, batch.starts[row] + 1):
                    self.prompt_logprobs[self._name(row)][position].append(each)
        return tokens

    def watch(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        for row, found in zip(rows, logits, strict=True):
            last = self.batch.starts[row] + self.batch.counts[row] - 1
            self.logits[self._name(row)][last] = found.clone()

    def _name(self, row: int) -> str:
        return str(self.batch.requests[row].request_id)


class Served:
    """A model on a pool of its own. `waits`: a request is held back while another computes what it could share."""

    def __init__(
        self,
        tiny: Tiny,
        *,
        block_size: int = 4,
        num_blocks: int = 400,
        budget: int = 64,
        num_seqs: int = 8,
        waits: bool = False,
        shuffled: random.Random | None = None,
        kv_dtype: str = "auto",
    ) -> None:
        layout = tiny.layout(block_size, kv_dtype)
        self.tiny = tiny
        self.cache = KVCacheManager(num_blocks, block_size, layout.kinds, max_in_flight_tokens=budget)
        if shuffled is not None:
            shuffle_free_queue(self.cache, shuffled)
        config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=num_seqs, waits_for_prefix=waits)
        self.scheduler = Scheduler(self.cache, config)
        self.notes = Notes()
        dtype = None if kv_dtype == "auto" else torch.float8_e4m3fn
        self.worker = TorchWorker(tiny.paged, layout, num_blocks, kv_dtype=dtype, watch=self.notes.watch)
        self.notes.runner = ModelRunner(self.scheduler, self.worker)
        self._engine = Engine(self.scheduler, self.notes)

    @property
    def unit(self) -> int:
        """Hits are multiples of so many tokens."""
        return self.cache.groups.alignment

    def add(
        self, name: str, prompt: Sequence[int], max_tokens: int = 8, sampling: SamplingParams = GREEDY, **keywords: Any
    ) -> Generation:
        request = Generation(name, prompt, sampling, max_tokens=max_tokens, **keywords)
        self.scheduler.add(request)
        return request

    def step(self) -> StepOutput:
        return self._engine.step()

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.cache.check()

    def run(self, prompts: Iterable[Sequence[int]], max_tokens: int = 8, tag: str = "") -> list[Generation]:
        """All at once, to their ends."""
        requests = [self.add(f"{tag}{number}", prompt, max_tokens) for number, prompt in enumerate(prompts)]
        self.finish()
        return requests

    def logits_of(self, request: Generation) -> dict[int, torch.Tensor]:
        return self.notes.logits[str(request.request_id)]


def shuffle_free_queue(cache: KVCacheManager, rng: random.Random) -> None:
    """All blocks are taken, and come back in any order."""
    pool = cache._pool
    taken = pool.allocate(pool.num_free)
    assert taken is not None
    rng.shuffle(taken)
    for block in taken:
        pool.free([block])


def outputs(request: Generation) -> list[int]:
    return list(request.token_ids[request.num_prompt_tokens :])


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(2, 128) for _ in range(num_tokens)]
