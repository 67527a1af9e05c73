"""Models in 16 bits: states in fp32 beside them, and logits as near to those of fp32 as a model of transformers comes.

Of models whose experts are chosen by a score nothing is said: rounding chooses others.
"""

import random
from copy import deepcopy

import pytest
import torch
from tests.runner import stock
from tests.runner.served import Served, outputs, prompt_of
from tests.runner.tiny_models import Tiny, of_model, tiny

DENSE = ["llama", "qwen3", "mistral", "gemma3_text", "mamba", "mamba2", "bamba", "falcon_h1", "gemma2", "lfm2"]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_in_16_bits(name: str, dtype: torch.dtype) -> None:
    rng, model = random.Random(0), tiny(name)
    served = Served(of_model(name, deepcopy(model.stock).to(dtype)), budget=24, num_seqs=3)
    shared = prompt_of(rng, 33)
    prompts = [shared + prompt_of(rng, count) for count in (3, 9)] + [prompt_of(rng, 20)]
    for request in [*served.run(prompts, 6, "cold"), *served.run(prompts, 6, "warm")]:
        truth = stock.logits(model, tuple(request.token_ids))
        own = float((stock.logits(served.tiny, tuple(request.token_ids)) - truth).abs().max())
        found = served.logits_of(request)
        places = sorted(found)
        ours = float((torch.stack([found[place] for place in places]) - truth[places]).abs().max())
        assert ours < 4 * own
        assert len(outputs(request)) == 6


def test_a_copy_shares_nothing_with_the_original() -> None:
    model = tiny("llama")
    other: Tiny = of_model("llama", deepcopy(model.stock).to(torch.bfloat16))
    assert (model.stock.dtype, other.stock.dtype, other.paged.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
