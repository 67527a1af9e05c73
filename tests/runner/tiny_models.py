"""Tiny models with random weights: one of each kind of layers that an engine meets.

Weights are larger than usual, so that attention is not almost even: what is wrong then shows in the logits. Larger
ones yet make qwen3_next, zamba2 and nemotron_h noisy: transformers' own answers for chunks differ by 3e-5 then. Tokens
go to all experts, weighted: which of two nearly equal ones a token goes to would be a matter of rounding.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvpool.models.huggingface import read_model
from kvpool.plan.grouping import group_layers
from kvpool.plan.layout import Layout
from kvpool.plan.spec import State
from kvpool.runner.state_shapes import States, measure_states, with_states

VOCABULARY = 128
WINDOW = 8

_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_DENSE = {
    **_IDS,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
}
_HEADS = {**_DENSE, "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_MAMBA2_ALONE = {"n_groups": 1, "chunk_size": 8, "expand": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen3": _HEADS,
    "mistral": {**_HEADS, "sliding_window": WINDOW},
    "gemma3_text": {
        **_HEADS,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        **_HEADS,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
    },
    "deepseek_v3": {
        **_DENSE,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "mamba": {**_IDS, "hidden_size": 64, "num_hidden_layers": 4, "state_size": 8, "initializer_range": 0.05},
    "mamba2": {
        **_IDS,
        **_MAMBA2_ALONE,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 16,
        "initializer_range": 0.05,
    },
    "jamba": {
        **_DENSE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {**_DENSE, **_MAMBA2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_HEADS, **_MAMBA2, "mamba_d_ssm": 128},
    "qwen3_next": {
        **_HEADS,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
}
"""The models that every test of equality runs."""

OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_HEADS,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
    },
    "gemma3n_text": {
        **_HEADS,
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [96] * 6,
    },
    "gpt_neox": {key: value for key, value in _DENSE.items() if key != "num_key_value_heads"},
    "lfm2": {**_DENSE, "layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 128},
    "granitemoehybrid": {
        **_DENSE,
        **_MAMBA2,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "zamba2": {
        **_DENSE,
        "num_key_value_heads": 4,
        "attention_head_dim": 32,
        "mamba_d_state": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "chunk_size": 8,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        **_HEADS,
        **_MAMBA2_ALONE,
        "hybrid_override_pattern": "M*M-",
        "ssm_state_size": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
    },
}
"""Models that do a thing in a way of their own: softcaps, shared blocks, shared keys, `update` without keywords."""

WITH_STATES = frozenset({"mamba", "mamba2", "jamba", "bamba", "falcon_h1", "qwen3_next"})


@dataclass(frozen=True, eq=False)
class Tiny:
    """A model of transformers as it is, and a copy of it to run on pages."""

    name: str
    stock: Any
    paged: Any

    def layout(self, block_size: int, kv_dtype: str = "auto") -> Layout:
        """ConfigError where its layers cannot have blocks of that size."""
        return layout_of(self.stock, block_size, kv_dtype)


@cache
def tiny(name: str) -> Tiny:
    """The same weights whenever it is asked for."""
    settings = {**CONFIGS, **OTHERS}[name]
    return of_config(name, CONFIG_MAPPING[name](**deepcopy(settings)))


def of_config(name: str, config: Any) -> Tiny:
    """Random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stock = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    return of_model(name, stock)


def of_model(name: str, stock: Any) -> Tiny:
    """The copy has the same weights, not others that are equal."""
    stock.generation_config.eos_token_id = None
    return Tiny(name, stock, deepcopy(stock, {id(weight): weight for weight in stock.parameters()}))


def layout_of(model: Any, block_size: int, kv_dtype: str = "auto") -> Layout:
    dtype = str(model.dtype).removeprefix("torch.")
    read = read_model(model.config.to_dict(), name="a model", dtype=dtype, kv_dtype=kv_dtype)
    if any(isinstance(spec, State) for layer in read.layers for spec in layer):
        read = with_states(read, _states(model))
    return group_layers(read.caches(), block_size)


@cache
def _states(model: Any) -> States:
    return measure_states(model)
