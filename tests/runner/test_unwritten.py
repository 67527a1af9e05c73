"""Nothing is read that was not written: new memory is NaN, and here so is all that a request must not see."""

import random

import pytest
import torch
from tests.runner import stock
from tests.runner.served import Served, prompt_of
from tests.runner.spoiling import spoil
from tests.runner.tiny_models import CONFIGS, OTHERS, Tiny, tiny

from kvpool.engine.generation import Generation
from kvpool.runner import attention

MODELS = [*CONFIGS, *OTHERS]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Tiny:
    return tiny(request.param)


def traffic(served: Served, rng: random.Random) -> list[Generation]:
    """Chunks, decodes, hits, shared beginnings, cancelled neighbours; what ended and what is left both count."""
    stay, shared = list[Generation](), prompt_of(rng, 40)
    for number in range(8):
        beginning = shared if number % 2 else []
        request = served.add(f"{number}", beginning + prompt_of(rng, rng.randrange(1, 30)), rng.randrange(1, 12))
        stay.append(request)
        for _ in range(rng.randrange(4)):
            served.step()
        if number % 4 == 2 and request in served.scheduler.running:
            served.scheduler.abort(request)
            stay.pop()
    served.finish()
    return stay


def test_what_others_left_never_reaches_a_request(model: Tiny, rng: random.Random) -> None:
    served = Served(model, budget=24, num_seqs=5, shuffled=rng)
    spoil(served)
    stock.check(served, traffic(served, rng))


def test_new_memory_is_nan(model: Tiny) -> None:
    served = Served(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        assert served.worker.memory._bytes.view(dtype).float().isnan().all()


def test_a_block_that_was_never_computed_shows(model: Tiny, rng: random.Random) -> None:
    """Its tokens were committed all the same, so that it is found."""
    served, prompt = Served(model, block_size=16), prompt_of(rng, 40)
    served.run([prompt_of(rng, 5)], tag="first")
    never_ran = Generation("never ran", prompt)
    for stop in (16, 32):
        assert served.cache.allocate(never_ran, 16)
        served.cache.commit(never_ran, stop)
    served.cache.free(never_ran)
    [request] = served.run([prompt])
    assert all(logits.isnan().any() for logits in served.logits_of(request).values())
    assert not stock.is_right(served, request)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_without_zeros_for_what_is_masked_it_would(
    name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minus infinity on a score does not help against a NaN: a masked value counts 0 times NaN."""
    read = attention.read
    monkeypatch.setattr(attention, "read", lambda pages, blocks, dtype, *_: read(pages, blocks, dtype))
    served = Served(tiny(name), budget=24, num_seqs=5)
    spoil(served)
    [request] = served.run([prompt_of(rng, 41)])
    assert not stock.is_right(served, request)
