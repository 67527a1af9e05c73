"""Tiny models of many families with random weights: what a configuration needs to be small."""

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_HEADS = {**_BASE, "head_dim": 16}
_STATES_ONLY = {name: _BASE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_TWO_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

ATTENTION: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen3": _HEADS,
    "mistral": {**_HEADS, "sliding_window": 8},
    "gemma3_text": {
        **_HEADS,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        **_HEADS,
        **_TWO_EXPERTS,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v3": {
        **_BASE,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
STATES: dict[str, dict[str, Any]] = {
    "mamba": {**_STATES_ONLY, "state_size": 8},
    "mamba2": {**_STATES_ONLY, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "jamba": {
        **_BASE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "bamba": {**_BASE, **_MAMBA2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**_HEADS, **_MAMBA2, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_BASE,
        **_MAMBA2,
        **_TWO_EXPERTS,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 64,
    },
    "qwen3_next": {
        **_HEADS,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "lfm2": {**_BASE, "layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 128},
}
FAMILIES = ATTENTION | STATES
