"""Keys and values in fp8: half the bytes of 16 bits, and of the logits what rounding leaves.

The truth here is transformers' own attention with rounded keys and values: what fp8 costs is in `docs/performance.md`.
"""

import random
from typing import Any

import pytest
import torch
from tests.runner.served import Served, outputs, prompt_of
from tests.runner.tiny_models import CONFIGS, tiny
from torch.nn import functional
from transformers import AttentionInterface

from kvpool.models.description import describe
from kvpool.models.sizing import Host, size_model
from kvpool.plan.deployment import Deployment
from kvpool.plan.memory import Plan
from kvpool.runner.forward import Chunk, Forward
from kvpool.runner.model_cache import PagedCache
from kvpool.runner.pages import KVMemory, Places

FP8 = torch.float8_e4m3fn
WITH_EXPERTS = {"gpt_oss", "deepseek_v3", "jamba", "qwen3_next"}
ATTENTION_ONLY = ["llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3"]


def planned(name: str, kv_dtype: str) -> Plan:
    description = describe(tiny(name).stock.config.to_dict(), name=name, kv_dtype=kv_dtype, dtype="bfloat16")
    sizing = size_model(description, Host(kv_bytes=1 << 22, weights_bytes=0), deployment=Deployment(), max_model_len=64)
    return sizing.plan


@pytest.mark.parametrize("name", ATTENTION_ONLY)
def test_the_pool_holds_twice_the_tokens_of_16_bits(name: str) -> None:
    """At equal bytes: blocks of as many tokens, and twice as many of them."""
    half, whole = planned(name, "fp8"), planned(name, "auto")
    assert [kind.block_size for kind in half.kinds] == [kind.block_size for kind in whole.kinds]
    assert half.layout.block_bytes * 2 == whole.layout.block_bytes
    assert half.num_blocks in {2 * whole.num_blocks, 2 * whole.num_blocks + 1}


@pytest.mark.parametrize("name", ATTENTION_ONLY)
def test_memory_is_what_the_plan_says(name: str) -> None:
    half, whole = Served(tiny(name), kv_dtype="fp8"), Served(tiny(name))
    sizes = [each.worker.memory._bytes.numel() for each in (half, whole)]
    assert sizes[0] * 4 == sizes[1], "tiny models keep fp32 otherwise"


def cache_of_one_token(dtype: torch.dtype | None) -> PagedCache:
    layout = tiny("llama").layout(4, "fp8")
    cache = PagedCache(KVMemory(3, layout.block_bytes, torch.device("cpu")), Places.of(layout), dtype, returns_all=True)
    at = torch.tensor([0])
    cache.begin(Forward(at, at, [Chunk(0, 0, 0, 1)], 0, torch.tensor([[4]]), [torch.tensor([[1]])], at.device))
    return cache


def test_what_is_too_large_becomes_the_largest() -> None:
    given = torch.tensor([1.0, 449.0, 500.0, 1e9, torch.inf, -449.0, -1e9, -torch.inf]).repeat(4)
    new = given.view(1, 2, 1, 16)
    key, value = cache_of_one_token(FP8).update(new, -new, 0)
    wanted = given.clamp(-448, 448).view(1, 2, 1, 16)
    assert torch.equal(key, wanted)
    assert torch.equal(value, -wanted)


def test_nan_stays_nan() -> None:
    key, _ = cache_of_one_token(FP8).update(torch.full((1, 2, 1, 16), torch.nan), torch.zeros(1, 2, 1, 16), 0)
    assert key.isnan().all()


# -- logits


def rounded_attention(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Plain causal attention to what fp8 leaves of keys and values."""
    key, value = (each.to(FP8).to(each.dtype) for each in (key, value))
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register("rounded", rounded_attention)


@pytest.fixture
def rounded() -> Any:
    model = tiny("llama").stock
    model.set_attn_implementation("rounded")
    yield model
    model.set_attn_implementation("eager")


def test_logits_are_those_of_rounded_keys_and_values(rounded: Any) -> None:
    """Cold, in chunks, warm, in a batch. A number that lies between two of fp8's may go to either side in a rare case,
    so that this is not as sharp as without."""
    rng = random.Random(1)
    prompts = [prompt_of(rng, count) for count in (40, 17, 30)]
    served = Served(tiny("llama"), budget=24, kv_dtype="fp8")
    for request in [*served.run(prompts, tag="cold"), *served.run(prompts, tag="warm")]:
        with torch.inference_mode():
            truth = rounded(torch.tensor([request.token_ids]), use_cache=False).logits[0]
        found = served.logits_of(request)
        places = sorted(found)
        assert float((torch.stack([found[place] for place in places]) - truth[places]).abs().max()) < 2e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_runs(name: str, rng: random.Random) -> None:
    """States stay as they are; all logits are numbers, and near those of the model's own dtype.

    Unless experts are chosen by a score: rounding chooses others.
    """
    prompts = [prompt_of(rng, count) for count in (40, 17, 1)]
    half, whole = Served(tiny(name), budget=24, kv_dtype="fp8"), Served(tiny(name), budget=24)
    for its, others in zip(half.run(prompts, 1), whole.run(prompts, 1), strict=True):
        [found], [truth] = half.logits_of(its).values(), whole.logits_of(others).values()
        if name not in WITH_EXPERTS:
            assert float((found - truth).norm()) < 0.4 * float(truth.norm())
    for request in [*half.run(prompts, tag="cold"), *half.run(prompts, tag="warm")]:
        assert not any(logits.isnan().any() for logits in half.logits_of(request).values())
        assert len(outputs(request)) == 8
