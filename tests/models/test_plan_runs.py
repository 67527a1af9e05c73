"""A plan, and the cache made from it: what was promised is what is admitted and what is held (invariant 12)."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.configs import model

from kvpool import ConfigError, EncoderInput, KVCacheManager, Request
from kvpool.models.huggingface import read_model
from kvpool.plan.deployment import Deployment
from kvpool.plan.kinds import ChunkedLocal, FullAttention, SlidingWindow
from kvpool.plan.memory import GIB, Plan, plan_memory
from kvpool.plan.model import Model
from kvpool.plan.spec import Attention, State, TokenKind

REAL = [
    "meta-llama__Llama-3.1-8B-Instruct",
    "google__gemma-3-27b-it",
    "openai__gpt-oss-120b",
    "Qwen__Qwen3.5-35B-A3B",
    "meta-llama__Llama-4-Scout-17B-16E-Instruct",
    "tiiuae__Falcon-H1-7B-Instruct",
    "deepseek-ai__DeepSeek-V3.2",
    "openai__whisper-large-v3-turbo",
    "moonshotai__Kimi-Linear-48B-A3B-Instruct",
    "google__gemma-3n-E4B-it",
]


def request_of(plan: Plan, name: str, num_tokens: int) -> Request:
    """One that shares nothing with another."""
    first = sum(map(ord, name)) * 1_000_003
    encoder = EncoderInput(name, plan.model.num_encoder_tokens) if plan.model.num_encoder_tokens else None
    return Request(name, list(range(first, first + num_tokens)), encoder_input=encoder)


def run(cache: KVCacheManager, requests: Sequence[Request], chunk: int) -> int:
    """Compute all prompts, chunk by chunk, side by side; the most blocks that one request held."""
    most = 0
    done = 0
    while done < requests[0].num_tokens:
        step = min(chunk, requests[0].num_tokens - done)
        for request in requests:
            assert cache.allocate(request, step) is not None, "what was promised is admitted"
            most = max(most, cache.num_held_blocks(request))
        for request in requests:
            cache.commit(request, done + step)
        done += step
    return most


@pytest.mark.parametrize("name", REAL)
def test_as_many_requests_as_promised_run_and_hold_what_was_promised(shared: Path, name: str) -> None:
    length, chunk = 6_000, 2_048
    found = model(shared, name)
    length = min(length, found.max_model_len or length)
    how = Deployment(max_num_batched_tokens=chunk)
    one = plan_memory(found, GIB, max_model_len=length, deployment=how)
    plan = plan_memory(
        found, one.block_bytes * (3 * one.admitted_blocks(length) + 2), max_model_len=length, deployment=how
    )
    assert plan.num_requests() == 3
    cache = KVCacheManager.from_plan(plan, publication="dense")
    assert cache.num_usable_blocks == plan.num_usable_blocks
    assert cache.max_blocks(length, plan.model.num_encoder_tokens) == plan.admitted_blocks(length)
    assert cache.num_usable_blocks // cache.max_blocks(length, plan.model.num_encoder_tokens) == plan.num_requests()
    assert cache.max_tokens(plan.model.num_encoder_tokens) == (plan.longest or 2**31 - 1)
    assert cache.smallest_hit == plan.smallest_hit
    held = run(cache, [request_of(plan, f"{name} {index}", length) for index in range(3)], chunk)
    assert held <= plan.admitted_blocks(length)
    if all(isinstance(kind, FullAttention) for kind in plan.kinds):
        assert held == plan.admitted_blocks(length)
    cache.check()


def test_one_request_more_than_promised_does_not_fit(shared: Path) -> None:
    length = 8_192
    plan = plan_memory(model(shared, REAL[0]), 4 * GIB, max_model_len=length)
    assert (plan.num_blocks, plan.num_requests()) == (2_048, 3)
    cache = KVCacheManager.from_plan(plan)
    run(cache, [request_of(plan, f"promised {index}", length) for index in range(3)], length)
    assert cache.allocate(request_of(plan, "one more", length), length) is None
    assert f"{plan.max_concurrency():.2f}" == "4.00", "the log line counts the null block in"


def test_a_window_holds_as_much_as_promised_where_chunks_fall_that_way() -> None:
    window = Model("window", ((Attention(1, 8, kind=SlidingWindow(100)),),), 4_000)
    plan = plan_memory(window, 500 * 16 * 32, deployment=Deployment(max_num_batched_tokens=64))
    cache = KVCacheManager.from_plan(plan)
    held = max(run(cache, [request_of(plan, f"w{chunk}", 4_000)], chunk) for chunk in (61, 62, 63, 64))
    assert plan.admitted_blocks(4_000) - 1 <= held <= plan.admitted_blocks(4_000)


_KINDS: st.SearchStrategy[TokenKind] = st.one_of(
    st.just(FullAttention()),
    st.builds(SlidingWindow, st.integers(1, 300)),
    st.builds(ChunkedLocal, st.sampled_from([64, 128, 256])),
)
_LAYERS = st.lists(
    st.one_of(
        st.builds(Attention, st.sampled_from([1, 2, 4]), st.sampled_from([8, 16]), kind=_KINDS),
        st.just(State(1, recurrent_bytes=700)),
    ),
    min_size=1,
    max_size=8,
)


@given(_LAYERS, st.integers(1, 700), st.integers(1, 200), st.integers(1, 4))
def test_whatever_is_promised_runs(layers: list[Attention | State], length: int, chunk: int, num_requests: int) -> None:
    """Random layouts: so many requests are admitted chunk by chunk, and none holds more than its part."""
    described = Model("random", tuple((layer,) for layer in layers), length)
    how = Deployment(max_num_batched_tokens=chunk)
    try:
        one = plan_memory(described, GIB, deployment=how)
    except ConfigError:
        return
    plan = plan_memory(described, one.kv_bytes_for(num_requests, length), deployment=how)
    assert plan.num_requests() == num_requests
    cache = KVCacheManager.from_plan(plan)
    held = run(cache, [request_of(plan, chr(97 + index), length) for index in range(num_requests)], chunk)
    assert held <= plan.admitted_blocks(length)
    assert plan.least_bytes(length) <= plan.steady_blocks(length) * plan.block_bytes
    assert plan.steady_blocks(length) <= plan.admitted_blocks(length)
    cache.check()


@given(_LAYERS, st.integers(1, 10**6), st.integers(0, 10**9), st.integers(1, 10**5))
def test_no_figure_is_negative_or_more_than_there_is(
    layers: list[Attention | State], length: int, kv_bytes: int, chunk: int
) -> None:
    described = Model("random", tuple((layer,) for layer in layers), length)
    try:
        plan = plan_memory(described, kv_bytes, deployment=Deployment(max_num_batched_tokens=chunk))
    except ConfigError:
        return
    assert 0 <= plan.num_blocks * plan.block_bytes <= kv_bytes
    assert kv_bytes < (plan.num_blocks + 1) * plan.block_bytes
    assert 0 <= plan.num_requests() <= plan.max_concurrency() * (1 + 1e-9)
    assert plan.constant_bytes(length) >= 0
    assert plan.fits == (plan.refusal() is None)
    longest = plan.longest
    assert plan.fits == (longest is None or longest >= length)
    if longest:
        assert plan.admitted_blocks(longest) <= plan.num_usable_blocks < plan.admitted_blocks(longest + 1)
    (needed,) = plan.kv_bytes_for(2, length)
    assert plan_memory(described, needed, deployment=plan.deployment).num_requests() >= 2


def test_a_plan_without_a_block_makes_no_cache() -> None:
    small = plan_memory(Model("small", ((Attention(1, 8),),), 100), 16 * 32)
    assert small.num_blocks == 1
    with pytest.raises(ConfigError, match="the plan has 1 blocks"):
        KVCacheManager.from_plan(small)
    nothing = plan_memory(
        read_model({"model_type": "bert", "num_hidden_layers": 2, "max_position_embeddings": 512}), GIB
    )
    assert nothing.keeps_nothing
    assert nothing.fits
    with pytest.raises(ConfigError, match="the plan has 0 blocks"):
        KVCacheManager.from_plan(nothing)
