"""In what the weights of a model type differ from a Llama's: a row for each type whose weights are known.

The plain layer has a norm before attention and one before its MLP, projections of queries, keys, values and outputs
without biases unless `attention_bias` says so, a gated MLP, and a head of its own. A type without a row is refused: the
widths in its file do not tell which projections there are. Rows were compared with the classes of transformers.

Knows nothing of: how many elements there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvpool.errors import ConfigError
from kvpool.models.fields import Fields


@dataclass(frozen=True, slots=True)
class Said:
    """What a field of the file says, and what counts where it does not."""

    field: str
    otherwise: bool = False

    def by(self, fields: Fields) -> bool:
        return fields.flag(self.field) if fields.has(self.field) else self.otherwise


@dataclass(frozen=True, slots=True)
class Begins:
    """Whether a field's text begins so, or another field says yes."""

    field: str
    beginning: str
    or_said: Said

    def by(self, fields: Fields) -> bool:
        return str(fields.get(self.field)).startswith(self.beginning) or self.or_said.by(fields)


Flag: TypeAlias = Said | Begins | bool


def holds(flag: Flag, fields: Fields) -> bool:
    """Whether it does in this model. ConfigError when the field is neither true nor false."""
    return flag if isinstance(flag, bool) else flag.by(fields)


_ATTENTION_BIAS = Said("attention_bias")


@dataclass(frozen=True, slots=True)
class Traits:
    """A row: the plain layer where nothing is said."""

    query_bias: Flag = _ATTENTION_BIAS
    """Of queries and values, and of keys unless `key_bias` says otherwise."""
    key_bias: Flag | None = None
    output_bias: Flag = _ATTENTION_BIAS
    mlp_bias: Flag = Said("mlp_bias")
    head_bias: Flag = False
    is_gated: Flag = True
    """The MLP, and each expert, has a gate beside its first projection."""
    num_norms: int = 2
    """Of each layer, each as wide as the model."""
    norm_bias: Flag = False
    qk_norm: str = ""
    """"head": norms as wide as one head for queries and keys; "all": as wide as all heads; "": none."""
    has_qk_norm: Flag = True
    has_output_gate: Flag = False
    """The queries' projection is twice as wide."""
    has_head_gate: bool = False
    """One gate for each head, of the layer's input."""
    has_sinks: bool = False
    has_cross_gates: bool = False
    """Layers of cross attention have norms of each head's queries and keys, and a gate of each half."""
    positions: bool = False
    """Learned, one for each position of `max_model_len`."""
    num_extra_positions: int = 0
    has_embedding_norm: bool = False
    is_tied: bool = False
    """The head is the embeddings, where the file does not say."""
    mlp_ratio: int | None = None
    """The width of the MLP over the model's, where the file does not say."""
    mlp_halved: bool = False
    """The file's width is that of the gate and the projection beside it together."""
    mlp_adjusted: bool = False
    """Two thirds of the file's width, rounded up to a multiple, where the file does not say otherwise (LFM2)."""
    one_mixer: bool = False
    """A layer is attention, or a state, or an MLP, or experts, with one norm."""
    dense_width: str = "intermediate_size"
    """The field with the width of the MLP of layers without experts."""
    shared_width: str | None = None
    """The field with the width of shared experts; None: as each expert, times their number."""
    has_shared_gate: bool = False
    expert_bias: bool = False
    """Of each expert, and of the router."""
    mlp_beside_experts: bool = False
    """A dense MLP works beside the experts, with three norms more."""
    num_extra_embeddings: int = 0
    state_norm: Flag = True
    """Before the output projection of a Mamba 2."""
    inner_norms: bool = False
    """Of the time step and of B and C in a Mamba 1."""
    num_norms_final: int = 1


_BIASED = Traits(query_bias=True, output_bias=True, mlp_bias=True, is_gated=False, norm_bias=True)
_ALL_BIASED = Traits(query_bias=Said("use_bias"), output_bias=Said("use_bias"), mlp_bias=Said("use_bias"))
_QWEN2 = Traits(query_bias=True, output_bias=False, mlp_bias=False)
_QWEN3 = Traits(qk_norm="head")
_NEXT = replace(_QWEN3, has_output_gate=True, shared_width="shared_expert_intermediate_size", has_shared_gate=True)
_GEMMA3 = Traits(num_norms=4, qk_norm="head", is_tied=True)
_PHI = replace(_BIASED, num_norms=1, head_bias=True, mlp_ratio=4)
_GPT2 = replace(_BIASED, positions=True, is_tied=True, mlp_ratio=4)
_MAMBA = Traits(one_mixer=True, is_tied=True)
_STEP = Traits(qk_norm="head", has_head_gate=True, shared_width="share_expert_dim")

_ROWS: tuple[tuple[tuple[str, ...], Traits], ...] = (
    (("llama", "text_llama", "llava", "mistral", "mixtral", "ministral3", "exaone", "baichuan", "internlm2"), Traits()),
    (("phi3", "phi3_v", "nemotron-nas", "dbrx", "granite", "granitemoe", "helium", "internlm3"), Traits()),
    (("deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_ref", "kimi_k2"), Traits()),
    (("glm_moe_dsa", "glm4_moe_lite", "kimi_linear", "minimax_m1", "minimax_text_01", "minimax"), Traits()),
    (("cohere",), Traits(num_norms=1, is_tied=True, qk_norm="each", has_qk_norm=Said("use_qk_norm"))),
    (("cohere2",), Traits(num_norms=1, is_tied=True)),
    (("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "mimo"), _QWEN2),
    (("qwen2_moe",), replace(_QWEN2, shared_width="shared_expert_intermediate_size", has_shared_gate=True)),
    (("qwen",), replace(_QWEN2, mlp_halved=True)),
    (("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _QWEN3),
    (("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _NEXT),
    (("chatglm",), replace(_QWEN2, query_bias=Said("add_qkv_bias"), mlp_bias=Said("add_bias_linear"))),
    (("glm4_moe",), Traits(output_bias=False, qk_norm="head", has_qk_norm=Said("use_qk_norm"))),
    (("glm",), Traits(output_bias=False)),
    (("glm4",), Traits(output_bias=False, num_norms=4)),
    (("seed_oss",), Traits(output_bias=Said("attention_out_bias"))),
    (("exaone4", "dots1"), Traits(qk_norm="head")),
    (("ernie4_5", "ernie4_5_moe"), replace(_ALL_BIASED, is_tied=True)),
    (("smollm3", "minicpm3"), Traits(is_tied=True)),
    (("arcee",), Traits(is_gated=False)),
    (("nemotron",), Traits(is_gated=False, norm_bias=True)),
    (("minimax_m2",), Traits(qk_norm="all", has_qk_norm=Said("use_qk_norm", True))),
    (
        ("minimax_m3_vl", "minimax_m3"),
        Traits(qk_norm="head", dense_width="dense_intermediate_size", shared_width="shared_intermediate_size"),
    ),
    (("llama4_text",), Traits(dense_width="intermediate_size_mlp", shared_width="intermediate_size")),
    (("olmo",), Traits(num_norms=0, num_norms_final=0)),
    (("olmo2", "olmo3", "olmoe"), Traits(qk_norm="all")),
    (("gemma",), Traits(is_tied=True)),
    (("gemma2",), Traits(num_norms=4, is_tied=True)),
    (("gemma3_text", "gemma3n_text"), _GEMMA3),
    (("gemma4_text",), replace(_GEMMA3, mlp_beside_experts=True)),
    (("gpt_oss",), Traits(query_bias=True, output_bias=True, has_sinks=True, expert_bias=True)),
    (("gpt2", "gpt_bigcode"), _GPT2),
    (("gpt_neo",), replace(_GPT2, query_bias=False)),
    (
        ("gpt_neox",),
        replace(_BIASED, query_bias=Said("attention_bias", True), output_bias=Said("attention_bias", True)),
    ),
    (("opt", "biogpt"), replace(_BIASED, positions=True, num_extra_positions=2, is_tied=True)),
    (("bloom",), replace(_BIASED, has_embedding_norm=True, is_tied=True, mlp_ratio=4)),
    (("mpt",), Traits(is_gated=False, is_tied=True, mlp_ratio=4)),
    (("gptj", "codegen"), replace(_PHI, query_bias=False, output_bias=False)),
    (("phi", "phi-msft"), _PHI),
    (("phi3small",), replace(_BIASED, is_gated=True, is_tied=True)),
    (("phimoe",), Traits(norm_bias=True, head_bias=Said("lm_head_bias"))),
    (
        ("starcoder2",),
        replace(
            _BIASED,
            query_bias=Said("use_bias", True),
            output_bias=Said("use_bias", True),
            mlp_bias=Said("use_bias", True),
            is_tied=True,
        ),
    ),
    (("stablelm",), Traits(query_bias=Said("use_qkv_bias"), output_bias=False, norm_bias=True)),
    (
        ("falcon", "RefinedWeb", "RefinedWebModel"),
        Traits(
            query_bias=Said("bias"),
            output_bias=Said("bias"),
            mlp_bias=Said("bias"),
            is_gated=False,
            num_norms=1,
            norm_bias=True,
            is_tied=True,
            mlp_ratio=4,
        ),
    ),
    (("mllama_text_model",), Traits(num_extra_embeddings=8, has_cross_gates=True)),
    (("step3p5", "step3p7"), _STEP),
    (("mamba", "falcon_mamba", "mamba2"), _MAMBA),
    (("jamba",), Traits(inner_norms=True)),
    (("bamba",), Traits()),
    (("granitemoeshared",), Traits(shared_width="shared_intermediate_size")),
    (("granitemoehybrid",), Traits(shared_width="shared_intermediate_size", is_tied=True)),
    (("lfm2",), Traits(qk_norm="head", is_tied=True, mlp_adjusted=True)),
    (("lfm2_moe",), Traits(qk_norm="head", is_tied=True)),
    (("falcon_h1",), Traits(state_norm=Said("mamba_rms_norm"))),
    (
        ("nemotron_h",),
        Traits(is_gated=False, one_mixer=True, shared_width="moe_shared_expert_intermediate_size"),
    ),
    (
        ("whisper",),
        replace(_BIASED, key_bias=False, positions=True, num_norms=3, is_tied=True),
    ),
    (
        ("t5", "mt5", "umt5"),
        Traits(is_gated=Begins("feed_forward_proj", "gated", Said("is_gated_act")), num_norms=3, is_tied=True),
    ),
)
TRAITS: Mapping[str, Traits] = {name: traits for names, traits in _ROWS for name in names}


def traits_of(fields: Fields) -> Traits:
    """The row of a model type. ConfigError when there is none."""
    if fields.model_type not in TRAITS:
        raise ConfigError(
            f"the weights of {fields.model_type!r} models are not known: give the bytes of the weights instead"
        )
    return TRAITS[fields.model_type]
