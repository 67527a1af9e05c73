"""Random histories: whatever comes, goes and is lost, every request gets the logits of one cold forward."""

import random
from collections.abc import Sequence

import pytest
from tests.runner import stock
from tests.runner.served import Served, prompt_of
from tests.runner.spoiling import spoil
from tests.runner.tiny_models import CONFIGS, tiny

from kvpool.engine.generation import Generation
from kvpool.engine.sampling import GREEDY, SamplingParams
from kvpool.errors import RefusedError

NUM_STEPS, DEEP_STEPS = 250, 2500


class History:
    """One engine under random traffic, in a pool that is now and then too small."""

    def __init__(self, name: str, rng: random.Random) -> None:
        budget, block_size = rng.choice([6, 16, 40]), rng.choice([1, 2, 4, 16])
        probe = Served(tiny(name), block_size=block_size, budget=budget, num_seqs=1)
        num_blocks = int(probe.cache.max_blocks(100) * rng.choice([1.2, 2, 5])) + 1
        self.served = Served(
            tiny(name),
            block_size=block_size,
            num_blocks=num_blocks,
            budget=budget,
            num_seqs=rng.randrange(1, 7),
            waits=rng.random() < 0.5,
            shuffled=rng,
        )
        spoil(self.served)
        self._rng = rng
        self._texts = [prompt_of(rng, 24) for _ in range(3)]
        self._added = list[Generation]()
        self._gone = set[Generation]()

    def step(self) -> None:
        rng, served = self._rng, self.served
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            if len(served.scheduler.waiting) < 6:
                self._add(self._prompt(), rng.choice([1, 1, 1, 3]))
        alive = [request for request in self._added if request not in self._gone and self._is_there(request)]
        if alive and rng.random() < 0.08:
            victim = rng.choice(alive)
            self._gone.add(victim)
            served.scheduler.abort(victim)
        if rng.random() < 0.03:
            served.scheduler.reset_prefix_cache(preempt_running=rng.random() < 0.7)
        if served.scheduler.has_work:
            if rng.random() < 0.03:
                self._fail()
            else:
                served.step()
        served.cache.check()

    def _fail(self) -> None:
        """A step that ends in the middle: some values and states are written. Its requests end, as in a server."""
        calls = iter(range(self._rng.randrange(3)))

        def fail(*_: object) -> None:
            if next(calls, None) is None:
                raise ArithmeticError

        hook = self.served.tiny.paged.get_output_embeddings().register_forward_pre_hook(fail)
        try:
            self.served.step()
        except ArithmeticError:
            for request in self.served.notes.batch.requests:
                assert isinstance(request, Generation)
                self._gone.add(request)
                self.served.scheduler.abort(request)
        finally:
            hook.remove()

    def end(self) -> int:
        """All that still run come to their ends; how many requests were right."""
        self.served.finish()
        stay = [request for request in self._added if request not in self._gone]
        stock.check_logits(self.served, stay)
        for request in self._gone:
            if self.served.logits_of(request):
                stock.check_logits(self.served, [request])
        assert self.served.cache.num_live_requests == 0
        return len(stay)

    def _is_there(self, request: Generation) -> bool:
        return request in self.served.scheduler.waiting or request in self.served.scheduler.running

    def _prompt(self) -> list[int]:
        rng = self._rng
        text = rng.choice(self._texts)
        prompt = text[: rng.randrange(1, len(text) + 1)] + prompt_of(rng, rng.randrange(1, 12))
        if rng.random() < 0.3 and self._added:
            prompt = list(rng.choice(self._added).token_ids)[:50] + prompt_of(rng, 2)
        return prompt

    def _add(self, prompt: Sequence[int], num_siblings: int) -> None:
        rng = self._rng
        for sibling in range(num_siblings):
            params = rng.choice([GREEDY, SamplingParams(temperature=1.0, top_p=0.9, seed=sibling)])
            try:
                request = self.served.add(f"{len(self._added)}", prompt, rng.randrange(1, 20), params)
            except RefusedError:
                return
            self._added.append(request)


@pytest.mark.parametrize("name", ["gemma3_text", "bamba", "llama"])
def test_a_random_history(name: str, rng: random.Random) -> None:
    history = History(name, rng)
    for _ in range(NUM_STEPS):
        history.step()
    assert history.end() > 10


@pytest.mark.deep
@pytest.mark.parametrize("name", CONFIGS)
def test_long_random_histories(name: str, rng: random.Random) -> None:
    for _ in range(4):
        history = History(name, rng)
        for _ in range(DEEP_STEPS // 4):
            history.step()
        history.end()
