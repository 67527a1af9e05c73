"""What would be computed wrongly is refused instead, with the reason."""

import random
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.runner import stock
from tests.runner.served import Served, prompt_of
from tests.runner.tiny_models import CONFIGS, Tiny, layout_of, of_config, tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kvpool.errors import ConfigError
from kvpool.plan.grouping import group_layers
from kvpool.plan.spec import Attention
from kvpool.runner.model_cache import paged_attention
from kvpool.runner.refused import longest_alike, why_refused
from kvpool.runner.torch_worker import TorchWorker

ANY_LAYOUT = group_layers({0: Attention(2, 16)}, 4)
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def made(name: str, **settings: Any) -> Any:
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**settings)).eval()


def test_an_encoder() -> None:
    config = CONFIG_MAPPING["t5"](vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ConfigError, match="a t5 model has an encoder, which this engine does not run"):
        TorchWorker(AutoModelForSeq2SeqLM.from_config(config), ANY_LAYOUT, 4)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "electra"])
def test_what_reads_in_both_directions(name: str) -> None:
    assert why_refused(CONFIG_MAPPING[name]()) == "looks at texts in both directions, and does not continue them"
    assert why_refused(CONFIG_MAPPING["gpt_neox"]()) is None


def test_a_state_on_modules() -> None:
    model = made("recurrent_gemma", **SIZES, lru_width=32, num_key_value_heads=1, head_dim=16)
    with pytest.raises(ConfigError, match="a recurrent_gemma model keeps its recurrent state on its own modules"):
        TorchWorker(model, ANY_LAYOUT, 4)


def test_a_cache_of_its_own() -> None:
    kinds = ["linear_attention", "full_attention"]
    model = made("minimax", **SIZES, layer_types=kinds, num_local_experts=2, num_key_value_heads=1, block_size=16)
    with pytest.raises(ConfigError, match="a minimax model has a cache of its own kind"):
        TorchWorker(model, ANY_LAYOUT, 4)


@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
def test_attention_that_cannot_be_replaced(name: str) -> None:
    """Its own code would look at all keys that it gets, without a mask."""
    own: dict[str, dict[str, Any]] = {
        "bloom": {"n_layer": 1, "n_head": 2},
        "gpt_neo": {"num_layers": 1, "attention_types": [[["global"], 1]]},
    }
    settings: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_heads": 2, **own[name]}
    with pytest.raises(ConfigError, match=f"a {name} model computes its attention itself"):
        TorchWorker(made(name, **settings), ANY_LAYOUT, 4)


@pytest.mark.parametrize("name", ["stablelm", "nemotron"])
def test_attention_that_is_not_told_of_the_cache(name: str) -> None:
    """Its module hands on no keywords."""
    model = of_config(name, CONFIG_MAPPING[name](**SIZES, num_key_value_heads=2))
    with pytest.raises(ConfigError, match="Attention does not hand on what its model is called with"):
        Served(model).run([[1, 2, 3]])


def test_attention_to_chosen_tokens() -> None:
    config = CONFIG_MAPPING["deepseek_v32"](index_topk=4)
    assert why_refused(config) == "looks at tokens that an index chooses, which this engine does not compute"


def test_keys_of_a_layer_that_is_not_known(rng: random.Random) -> None:
    """The last layers read those of another one; were the plan not to say so, they would see the new tokens alone."""
    model = tiny("gemma3n_text")
    served = Served(model)
    served.worker._cache._places.shared.clear()
    with pytest.raises(ConfigError, match="attention gets 1 keys where there are 6: its layer is not known"):
        served.run([prompt_of(rng, 5)])


def test_chunked_local_attention() -> None:
    settings = {**CONFIGS["llama"], "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    model = made("llama4_text", **settings, attention_chunk_size=8, no_rope_layers=[1, 1, 1, 0])
    with pytest.raises(ConfigError, match=r"layer 0 keeps ChunkedLocal.*, which this engine does not compute"):
        TorchWorker(model, layout_of(model, 4), 20)


def test_attention_that_looks_ahead() -> None:
    settings = {**deepcopy(CONFIGS["gemma3_text"]), "use_bidirectional_attention": True}
    model = of_config("gemma3_text", CONFIG_MAPPING["gemma3_text"](**settings))
    with pytest.raises(ConfigError, match="Gemma3Attention asks for a mask of its own, which is not computed here"):
        Served(model).run([[1, 2, 3]])


def test_a_window_that_the_plan_does_not_know() -> None:
    model = tiny("mistral")
    layout = model.layout(4)
    other = Tiny("mistral", model.stock, deepcopy(model.paged))
    other.paged.config.sliding_window = 9
    served = Served(Tiny("mistral", model.stock, other.paged))
    assert layout == model.layout(4)
    with pytest.raises(ConfigError, match="layer 0 looks back 9 tokens, and the plan keeps 8"):
        served.run([[1, 2, 3]])


def test_pages_that_the_plan_did_not_count() -> None:
    model = tiny("llama")
    narrow = group_layers({layer: Attention(1, 16, element_bytes=4) for layer in range(4)}, 4)
    worker = TorchWorker(deepcopy(model.paged), narrow, 20)
    served = Served(model)
    assert served.notes.runner is not None
    served.notes.runner._worker = worker
    with pytest.raises(ConfigError, match="a page of the model takes 1,024 bytes, and the plan counts 512"):
        served.run([[1, 2, 3]])


# -- what an attention function is told


def attend(**keywords: Any) -> None:
    module = SimpleNamespace(is_causal=True)
    query = torch.zeros(1, 2, 3, 4)
    paged_attention(module, query, query, query, None, paged=Paged(), **keywords)  # type: ignore[arg-type]


class Paged:
    """Stands for a `PagedCache` that computes nothing."""

    def source(self, layer: int | None) -> int | None:
        return layer

    def attend(self, *_: Any) -> torch.Tensor:
        return torch.zeros(1, 3, 2, 4)


@pytest.mark.parametrize("name", ["position_bias", "head_mask", "block_mask", "cu_seq_lens_q", "anything_new"])
def test_an_unknown_keyword_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"SimpleNamespace asks for {name}, which is not computed here"):
        attend(**{name: torch.zeros(1)})


@pytest.mark.parametrize("wrong", [{"is_causal": False}, {"chunk_size": 4}, {"attention_chunk": 1.5}, {"mode": "x"}])
def test_other_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="which is not computed here"):
        attend(**wrong)


def test_a_mask_is_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ConfigError, match="asks for a mask of its own"):
        paged_attention(SimpleNamespace(), query, query, query, torch.zeros(1), paged=Paged())  # type: ignore[arg-type]


def test_what_changes_nothing_is_not() -> None:
    attend(dropout=0.0, position_ids=torch.arange(3), use_cache=False, output_attentions=None, position_bias=None)


_LONG = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "original_max_position_embeddings": 32}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_type": "longrope", "rope_theta": 10_000.0, **_LONG},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
}


def rotated(kind: str) -> Tiny:
    """A llama whose rotation changes for all requests of a call when one is longer than 32 tokens."""
    longest = 128 if kind == "longrope" else 32
    settings = {**CONFIGS["llama"], "max_position_embeddings": longest, "rope_parameters": ROPES[kind]}
    return of_config(kind, CONFIG_MAPPING["llama"](**settings))


@pytest.mark.parametrize("kind", ROPES)
def test_lengths_at_which_requests_would_change_each_other(kind: str, rng: random.Random) -> None:
    """Below, all is as it should be; beyond, nothing is computed."""
    served = Served(rotated(kind))
    stock.check(served, served.run([prompt_of(rng, 20), prompt_of(rng, 31), prompt_of(rng, 3)], 1))
    served.add("long", prompt_of(rng, 33))
    with pytest.raises(ConfigError, match="more than 32 tokens"):
        served.finish()


def test_where_rotation_never_depends_on_lengths() -> None:
    for rope in (
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "linear", "factor": 2.0},
    ):
        config = CONFIG_MAPPING["llama"](**{**CONFIGS["llama"], "rope_parameters": {"rope_theta": 1e4, **rope}})
        assert longest_alike(config) is None
    assert longest_alike(CONFIG_MAPPING["gpt2"]()) is None
    kinds = {"full_attention": {"rope_theta": 1e4, **ROPES["dynamic"]}, "sliding_attention": {"rope_type": "default"}}
    config = CONFIG_MAPPING["gemma3_text"](**CONFIGS["gemma3_text"])
    config.rope_parameters = kinds
    assert longest_alike(config) == 256
