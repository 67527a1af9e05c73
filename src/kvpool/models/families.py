"""The families of models: a row for each, with what its configuration files mean and what they leave unsaid.

A row says how the file tells the kinds of layers apart, which recurrence its states have, which names differ from the
usual ones, and the defaults of its configuration class where real files leave fields out. What a row does not say is
as everywhere: heads and dimensions under their usual names, a latent where there is a `kv_lora_rank`, a head's
dimension hidden size through heads. A `model_type` without a row is refused, since nobody knows what its layers keep.

Knows nothing of: how a row is applied.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvpool.models import compressed, rewrites, states
from kvpool.models.fields import Config, Fields
from kvpool.models.patterns import AtIndices, AtOffset, Every, EveryNth, FirstOf, FromOn, Listed, Pattern, Repeated
from kvpool.plan.spec import CachedSpec

Names: TypeAlias = Mapping[str, tuple[str, ...]]
"""Canonical name to the names in the file."""


Part: TypeAlias = Callable[[Fields], Sequence[CachedSpec]]
"""What a layer keeps, by the fields."""


@dataclass(frozen=True, slots=True)
class Family:
    """A row."""

    model_types: tuple[str, ...]
    """The values of `model_type` that it stands for."""
    pattern: Pattern
    parts: Mapping[str, Part] = field(default_factory=dict)
    """What layers keep for words of the pattern that are no ordinary attention: states above all."""
    aliases: Names = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """By canonical name."""
    own_names: Mapping[str, Names] = field(default_factory=dict)
    """For a word of the pattern: names that come before the usual ones in layers of that word."""
    draft: str = "full"
    """The word of its own draft heads' layers (MTP)."""
    rewrite: Callable[[Config], Config] | None = None
    """To the usual fields, where the file has a shape of its own."""


_MEANING = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "deepseek_sparse_attention": "full",
    "sparse_attention": "full",
    "indexed_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "linear_attention": "state",
    "mamba": "state",
    "conv": "state",
    "hybrid": "full+state",
    "moe": "none",
    "mlp": "none",
}
"""What lists of layers call a layer."""
_TYPES = Listed("layer_types", _MEANING)
_BLOCKS = Listed("layers_block_type", _MEANING)
_LETTERS = Listed("hybrid_override_pattern", {"M": "state", "*": "full", "-": "none", "E": "none"})
_EXAONE = Repeated("sliding_window_pattern", {"L": "window", "G": "full"})
_ALIKE = FirstOf((_TYPES, Every("window")))
"""Windows where the file has one in use, else full attention."""


def _nth(name: str, other: str = "window") -> Pattern:
    """A list, or else one full layer in so many, the last."""
    return FirstOf((_TYPES, EveryNth(name, "full", other)))


_MAMBA2 = {"state_groups": 1, "state_expand": 2, "conv_kernel": 4}
_LATER = FirstOf((_TYPES, FromOn("max_window_layers", "window", "full")))
_WINDOWS_OFF = {"use_sliding_window": False, "max_window_layers": 28}
_QWEN_HYBRID = {"full_attention_interval": 4, "head_dim": 256, "conv_kernel": 4}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}

FAMILIES: tuple[Family, ...] = (
    Family(
        (
            *("ministral", "ministral3", "phi", "phi-msft", "phi3", "phi3_v", "phi4mm", "phimoe"),
            *("phi3small", "stablelm", "stablelm_epoch", "gptj", "gpt_neox", "gpt2", "gpt_neox_japanese"),
            *("codegen", "opt", "bloom", "mpt", "baichuan", "internlm", "internlm2", "exaone", "qwen"),
            *("olmo", "olmo2", "olmoe", "cohere", "granite", "granitemoe", "granitemoeshared", "dbrx", "persimmon"),
            *("glm4_moe", "minicpm", "nemotron", "xverse", "aquila", "orion", "arctic", "jais", "llava"),
            *("hunyuan_v1_dense", "hunyuan_v1_moe", "arcee", "deepseek"),
            *("bitnet", "biogpt", "qwen3_vl_text", "qwen3_vl_moe_text", "helium", "apertus", "dots1"),
            *("RefinedWeb", "RefinedWebModel", "bailing_moe", "solar", "openelm"),
        ),
        _ALIKE,
    ),
    Family(("mistral",), _ALIKE, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    Family(("mixtral", "seed_oss"), _ALIKE, defaults={"num_key_value_heads": 8}),
    Family(("internlm3", "starcoder2", "glm", "glm4"), _ALIKE, defaults={"num_key_value_heads": 2}),
    Family(("falcon", "gpt_bigcode"), _ALIKE, defaults={"multi_query": True}),
    Family(("ernie4_5", "ernie4_5_moe"), _ALIKE, defaults={"head_dim": 128, "num_key_value_heads": 4}),
    Family(("llama", "text_llama"), _ALIKE, defaults=_LLAMA | {"max_model_len": 2048}),
    Family(("nemotron-nas",), Every("full"), rewrite=rewrites.block_configs),
    Family(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _ALIKE, defaults=_LATENT),
    Family(("mistral4",), _ALIKE, defaults={"kv_lora_rank": 256, "qk_rope_head_dim": 64}),
    Family(("minicpm3",), _ALIKE, defaults={"kv_lora_rank": 256, "qk_rope_head_dim": 32}),
    Family(("longcat_flash",), _ALIKE, defaults=_LATENT, rewrite=rewrites.two_halves),
    Family(("deepseek_v32", "glm_moe_dsa"), _ALIKE, defaults=_LATENT),
    Family(
        ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "mimo", "smollm3"),
        _LATER,
        defaults=_WINDOWS_OFF,
    ),
    Family(("qwen3",), _LATER, defaults={"head_dim": 128, **_WINDOWS_OFF}),
    Family(("qwen3_moe",), _ALIKE, defaults={"num_key_value_heads": 4, "use_sliding_window": False}),
    Family(("chatglm",), Every("full"), aliases={"num_hidden_layers": ("num_layers",), "head_dim": ("kv_channels",)}),
    Family(("gemma",), Every("full"), defaults={"head_dim": 256, "num_key_value_heads": 16}),
    Family(
        ("gemma2",),
        _nth("sliding_window_pattern"),
        defaults={"sliding_window_pattern": 2, "sliding_window": 4096, "head_dim": 256, "num_key_value_heads": 4},
    ),
    Family(
        ("gemma3_text",),
        _nth("sliding_window_pattern"),
        aliases={"sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern")},
        defaults={
            "sliding_window_pattern": 6,
            "sliding_window": 4096,
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_model_len": 131072,
            "vocab_size": 262208,
        },
    ),
    Family(
        ("gemma3n_text",),
        _nth("sliding_window_pattern"),
        defaults={
            "sliding_window_pattern": 5,
            "sliding_window": 512,
            "head_dim": 256,
            "num_shared_layers": 15,
            "num_key_value_heads": 2,
        },
    ),
    Family(
        ("gemma4_text",),
        _nth("sliding_window_pattern"),
        defaults={
            "sliding_window_pattern": 6,
            "sliding_window": 512,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_key_value_heads": 4,
        },
        rewrite=rewrites.own_global_heads,
        own_names={"full": {"num_key_value_heads": ("num_global_key_value_heads",), "head_dim": ("global_head_dim",)}},
    ),
    Family(
        ("cohere2",),
        _nth("sliding_window_pattern"),
        aliases={"sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern")},
        defaults={"sliding_window_pattern": 4, "sliding_window": 4096, "intermediate_size": 22528},
    ),
    Family(("olmo3",), _nth("sliding_window_pattern"), defaults={"sliding_window_pattern": 4, "sliding_window": 4096}),
    Family(
        ("gpt_oss",),
        _nth("sliding_window_pattern"),
        defaults={"sliding_window_pattern": 2, "sliding_window": 128, "head_dim": 64, "num_key_value_heads": 8},
    ),
    Family(
        ("exaone4",),
        FirstOf((_TYPES, _EXAONE, EveryNth("sliding_window_pattern", "full", "window"))),
        defaults={"sliding_window_pattern": 4, "sliding_window": 4096},
    ),
    Family(
        ("gpt_neo",),
        Listed("attention_layers", {"global": "full", "local": "window"}),
        aliases={"sliding_window": ("window_size",)},
        defaults={"sliding_window": 256},
    ),
    Family(
        ("step3p5", "step3p7"),
        _TYPES,
        own_names={
            "window": {
                "num_key_value_heads": ("attention_other_setting.num_attention_groups",),
                "head_dim": ("attention_other_setting.head_dim",),
                "num_attention_heads": ("attention_other_setting.num_attention_heads",),
            }
        },
    ),
    Family(
        ("llama4_text",),
        FirstOf(
            (
                _TYPES,
                Listed("no_rope_layers", {0: "full", 1: "chunk"}),
                EveryNth("no_rope_layer_interval", "full", "chunk"),
            )
        ),
        defaults={
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "head_dim": 128,
            "num_key_value_heads": 8,
        },
    ),
    Family(
        ("mllama_text_model",),
        AtIndices("cross_attention_layers", "cross", "full"),
        defaults={"cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38), "num_encoder_tokens": 4 * (40 * 40 + 1)},
    ),
    Family(
        ("whisper",),
        Every("full+cross"),
        aliases={
            "num_hidden_layers": ("decoder_layers",),
            "num_attention_heads": ("decoder_attention_heads",),
            "intermediate_size": ("decoder_ffn_dim",),
            "max_model_len": ("max_target_positions",),
            "num_encoder_tokens": ("max_source_positions",),
        },
        defaults={"num_encoder_tokens": 1500, "max_model_len": 448},
    ),
    Family(
        ("bart", "mbart", "pegasus", "m2m_100", "marian", "blenderbot"),
        Every("full+cross"),
        aliases={
            "num_hidden_layers": ("decoder_layers",),
            "num_attention_heads": ("decoder_attention_heads",),
            "intermediate_size": ("decoder_ffn_dim",),
            "num_encoder_tokens": ("max_position_embeddings",),
        },
    ),
    Family(
        ("t5", "mt5", "umt5", "longt5"),
        Every("full+cross"),
        aliases={
            "num_hidden_layers": ("num_decoder_layers", "num_layers"),
            "num_encoder_tokens": ("n_positions",),
        },
        defaults={"num_encoder_tokens": 512, "max_model_len": 512},
    ),
    Family(
        (
            *("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "mpnet"),
            *("modernbert", "nomic_bert", "camembert", "ernie"),
        ),
        Every("none"),
        rewrite=rewrites.encoder_only,
    ),
    Family(
        ("mamba", "falcon_mamba"),
        Every("state"),
        {"state": states.mamba1},
        aliases={"state_channels": ("intermediate_size", "d_inner")},
        defaults={"state_expand": 2, "conv_kernel": 4, "state_size": 16},
    ),
    Family(
        ("mamba2",),
        Every("state"),
        {"state": states.mamba2},
        aliases={"state_heads": ("num_heads",), "state_head_dim": ("head_dim",), "intermediate_size": ("d_inner",)},
        defaults={"state_expand": 2, "conv_kernel": 4, "state_size": 128, "state_groups": 8},
    ),
    Family(
        ("jamba",),
        AtOffset("attn_layer_period", "attn_layer_offset", "full", "state"),
        {"state": states.mamba1},
        defaults={
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "state_expand": 2,
            "conv_kernel": 4,
            "state_size": 16,
            "num_key_value_heads": 8,
        },
    ),
    Family(
        ("bamba",),
        FirstOf((_TYPES, AtIndices("attn_layer_indices", "full", "state"))),
        {"state": states.mamba2},
        defaults=_MAMBA2 | {"state_size": 256, "state_heads": 128, "intermediate_size": 14336},
    ),
    Family(
        ("granitemoehybrid",),
        FirstOf((_TYPES, _BLOCKS)),
        {"state": states.mamba2},
        defaults=_MAMBA2 | {"state_size": 256},
    ),
    Family(("falcon_h1",), Every("full+state"), {"state": states.mamba2}, defaults=_MAMBA2),
    Family(
        ("zamba2",),
        _BLOCKS,
        {"state": states.mamba2},
        aliases={"head_dim": ("attention_head_dim",)},
        defaults=_MAMBA2,
        rewrite=rewrites.twice_as_wide_heads,
    ),
    Family(
        ("nemotron_h",),
        FirstOf((_LETTERS, _BLOCKS)),
        {"state": states.mamba2},
        aliases={"head_dim": ("head_dim", "attention_head_dim")},
        defaults={"state_groups": 8, "state_expand": 2, "conv_kernel": 4},
    ),
    Family(
        ("qwen3_next", "qwen3_5_moe_text"),
        _nth("full_attention_interval", "state"),
        {"state": states.gated_delta_net},
        defaults=_QWEN_HYBRID | {"num_key_value_heads": 2},
    ),
    Family(
        ("qwen3_5_text",),
        _nth("full_attention_interval", "state"),
        {"state": states.gated_delta_net},
        defaults=_QWEN_HYBRID | {"num_key_value_heads": 4},
    ),
    Family(
        ("minimax", "minimax_text_01", "minimax_m1"),
        FirstOf((_TYPES, Listed("attn_type_list", {0: "state", 1: "full"}))),
        {"state": states.lightning},
    ),
    Family(
        ("minimax_m2",),
        FirstOf((_TYPES, Listed("attn_type_list", {1: "full"}), Every("full"))),
        defaults={"head_dim": 128, "num_key_value_heads": 8},
    ),
    Family(
        ("minimax_m3_vl", "minimax_m3"),
        Listed("sparse_attention_config.sparse_attention_freq", {0: "full", 1: "full+index"}),
        {"index": compressed.index_keys},
    ),
    Family(
        ("deepseek_v4", "deepseek_ref"),
        Listed("compress_ratios", {0: "latest", 4: "latest+by4", 128: "latest+by128"}),
        {"latest": compressed.latest, "by4": compressed.by_4, "by128": compressed.by_128},
        draft="latest",
    ),
    Family(
        ("kimi_linear",),
        FirstOf((AtIndices("linear_attn_config.full_attn_layers", "full", "state", first=1), _TYPES)),
        {"state": states.kimi_delta},
        aliases={
            "linear_num_heads": ("linear_num_heads", "linear_attn_config.num_heads"),
            "linear_head_dim": ("linear_head_dim", "linear_attn_config.head_dim"),
            "conv_kernel": ("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size"),
        },
        defaults=_LATENT,
    ),
    Family(
        ("lfm2", "lfm2_moe"),
        FirstOf((_TYPES, AtIndices("full_attn_idxs", "full", "state"))),
        {"state": states.short_conv},
        aliases={"conv_kernel": ("conv_L_cache",)},
        defaults={"conv_kernel": 3, "num_key_value_heads": 8},
    ),
    Family(
        ("recurrent_gemma",),
        Repeated("block_types", {"recurrent": "state", "attention": "window"}),
        {"state": states.real_gated_lru},
        aliases={"sliding_window": ("attention_window_size",)},
        defaults={"block_types": ("recurrent", "recurrent", "attention"), "sliding_window": 2048, "conv_kernel": 4},
    ),
    Family(("rwkv",), Every("state"), {"state": states.rwkv4}),
    Family(
        ("rwkv5", "rwkv6", "rwkv7"),
        Every("state"),
        {"state": states.rwkv},
        aliases={"head_dim": ("head_size", "head_dim")},
    ),
)
"""Every family that is known. docs/models.md tells where the facts of a row come from."""

BY_MODEL_TYPE: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.model_types}
