"""Configuration files to what layers keep: 154 real ones, their traps, and files that are refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.configs import NUM_CONFIGS, folder, model

from kvpool.errors import ConfigError
from kvpool.models.families import BY_MODEL_TYPE, FAMILIES
from kvpool.models.huggingface import read_model
from kvpool.plan.kinds import ChunkedLocal, CrossAttention, FullAttention, LayerKind, SlidingWindow, StateSpace
from kvpool.plan.memory import plan_memory
from kvpool.plan.model import Layer, Model
from kvpool.plan.spec import Attention, EncoderOnly, Latent, SharedKV, State

REFUSED: dict[str, str] = {}
"""Of the shared files: the field that is named, and why. At most 6."""


def kinds(found: Model) -> dict[str, int]:
    """How many caches of each kind."""
    specs = [spec for layer in found.layers for spec in layer]
    return dict(Counter(_name(spec.kind if isinstance(spec, Attention | Latent | State) else spec) for spec in specs))


def _name(kind: LayerKind | SharedKV | EncoderOnly) -> str:
    match kind:
        case SlidingWindow():
            return f"window {kind.window}"
        case ChunkedLocal():
            return f"chunk {kind.chunk_size}"
        case FullAttention():
            return "full"
        case StateSpace():
            return "state"
        case CrossAttention():
            return "cross"
        case SharedKV():
            return "shared"
        case _:
            return "none"


def attention(layer: Layer) -> Attention:
    (spec,) = (spec for spec in layer if isinstance(spec, Attention))
    return spec


def test_every_shared_file_is_answered_or_refused_with_its_field(shared: Path) -> None:
    files = sorted(folder(shared).glob("*.json"))
    assert len(files) == NUM_CONFIGS
    refused = {}
    for file in files:
        try:
            found = read_model(json.loads(file.read_text()), name=file.stem)
        except ConfigError as error:
            refused[file.stem] = str(error)
            continue
        plan = plan_memory(found, 40 * 2**30)
        assert plan.num_blocks > 0, file.stem
        assert plan.max_concurrency() > 0, file.stem
    assert refused.keys() == REFUSED.keys()
    assert all(REFUSED[name] in message for name, message in refused.items())
    assert len(REFUSED) <= 6


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("google__gemma-2-9b", {"window 4096": 21, "full": 21}),
        ("google__gemma-3-27b-it", {"window 1024": 52, "full": 10}),
        ("google__gemma-3-1b-it", {"window 512": 22, "full": 4}),
        ("google__gemma-3n-E4B-it", {"window 512": 16, "full": 4, "shared": 15}),
        ("google__gemma-4-26B-A4B-it", {"window 1024": 25, "full": 5}),
        ("google__gemma-4-E2B-it", {"window 512": 12, "full": 3, "shared": 20}),
        ("CohereLabs__c4ai-command-r7b-12-2024", {"window 4096": 24, "full": 8}),
        ("allenai__Olmo-3-7B-Instruct", {"window 4096": 24, "full": 8}),
        ("openai__gpt-oss-120b", {"window 128": 18, "full": 18}),
        ("mistralai__Mistral-7B-v0.1", {"window 4096": 32}),
        ("mistralai__Mistral-7B-Instruct-v0.3", {"full": 32}),
        ("microsoft__Phi-4-mini-reasoning", {"full": 32}),
        ("Qwen__Qwen2-7B-Instruct", {"full": 28}),
        ("meta-llama__Llama-4-Scout-17B-16E-Instruct", {"chunk 8192": 36, "full": 12}),
        ("meta-llama__Llama-3.2-11B-Vision-Instruct", {"full": 32, "cross": 8}),
        ("openai__whisper-large-v3-turbo", {"full": 4, "cross": 4}),
        ("google-t5__t5-small", {"full": 6, "cross": 6}),
        ("llava-hf__llava-1.5-7b-hf", {"full": 32}),
        ("nvidia__Llama-3_3-Nemotron-Super-49B-v1", {"full": 49, "none": 31}),
        ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"state": 23, "none": 23, "full": 6}),
        ("nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", {"state": 48, "none": 48, "full": 12}),
        ("Qwen__Qwen3-Next-80B-A3B-Instruct", {"state": 36, "full": 12}),
        ("Qwen__Qwen3.5-27B", {"state": 48, "full": 16}),
        ("ai21labs__Jamba-v0.1", {"state": 28, "full": 4}),
        ("ibm-ai-platform__Bamba-9B", {"state": 29, "full": 3}),
        ("ibm-granite__granite-4.0-h-small", {"state": 36, "full": 4}),
        ("tiiuae__Falcon-H1-7B-Instruct", {"full": 44, "state": 44}),
        ("tiiuae__falcon-mamba-7b", {"state": 64}),
        ("mistralai__Mamba-Codestral-7B-v0.1", {"state": 64}),
        ("MiniMaxAI__MiniMax-Text-01_M1", {"state": 70, "full": 10}),
        ("moonshotai__Kimi-Linear-48B-A3B-Instruct", {"state": 21, "full": 6}),
        ("stepfun-ai__Step-3.7-Flash", {"full": 12, "window 512": 33}),
        ("nvidia__MiniMax-M3-NVFP4", {"full": 60 + 57}),
        ("deepseek-ai__DeepSeek-V4-Flash", {"window 128": 43 + 20, "full": 21 + 21 + 20, "window 8": 21 + 21}),
    ],
)
def test_kinds_of_layers(shared: Path, name: str, expected: dict[str, int]) -> None:
    assert kinds(model(shared, name)) == expected


@pytest.mark.parametrize(
    ("name", "heads", "head_dim"),
    [
        ("google__gemma-7b", 16, 256),
        ("Qwen__Qwen3-0.6B", 8, 128),
        ("mistralai__Mistral-Nemo-Instruct-2407", 8, 128),
        ("EleutherAI__gpt-j-6b", 16, 256),
        ("bigcode__gpt_bigcode-santacoder", 1, 128),
        ("tiiuae__falcon-7b", 1, 64),
        ("THUDM__chatglm3-6b", 2, 128),
        ("databricks__dbrx-instruct", 12, 128),
        ("microsoft__phi-2", 32, 80),
        ("Qwen__Qwen-7B", 32, 128),
        ("LGAI-EXAONE__EXAONE-3.0-7.8B-Instruct", 8, 128),
        ("google-t5__t5-small", 8, 64),
        ("llava-hf__llava-1.5-7b-hf", 32, 128),
        ("deepseek-ai__deepseek-vl2-tiny", 10, 128),
        ("google__gemma-4-26B-A4B-it", 8, 256),
    ],
)
def test_heads_by_whatever_name(shared: Path, name: str, heads: int, head_dim: int) -> None:
    spec = next(spec for layer in model(shared, name).layers for spec in layer if isinstance(spec, Attention))
    assert (spec.num_kv_heads, spec.head_dim) == (heads, head_dim)


def test_full_layers_of_gemma_4_have_heads_of_their_own(shared: Path) -> None:
    last = attention(model(shared, "google__gemma-4-26B-A4B-it").layers[5])
    assert last == Attention(2, 512)


def test_layers_that_share_read_the_last_of_their_kind(shared: Path) -> None:
    layers = model(shared, "google__gemma-3n-E4B-it").layers
    assert layers[34] == (SharedKV(19),)
    assert layers[33] == (SharedKV(18),)


def test_full_attention_of_kimi_linear_is_counted_from_1() -> None:
    config = {
        "model_type": "kimi_linear", "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "num_attention_heads": 32, "dtype": "bfloat16", "model_max_length": 4_096,
        "linear_attn_config": {"full_attn_layers": [4], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
    }  # fmt: skip
    layers = read_model(config).layers
    assert [type(layer[0]) for layer in layers] == [State, State, State, Latent]
    assert layers[0] == (State(32, conv_bytes=3 * 3 * 4_096 * 2, recurrent_bytes=32 * 128 * 128 * 4),)


def test_index_caches_of_a_part_of_the_layers(shared: Path) -> None:
    glm = model(shared, "nvidia__GLM-5.2-NVFP4", "bfloat16")
    has_index = [spec.index is not None for layer in glm.layers for spec in layer if isinstance(spec, Latent)]
    assert has_index[:7] == [True, True, True, False, False, False, True]
    assert sum(has_index) == 21
    (draft,) = glm.draft
    assert isinstance(draft[0], Latent)
    assert draft[0].index is not None


def test_draft_heads_are_no_layers_of_the_model(shared: Path) -> None:
    for name, drafts in (("deepseek-ai__DeepSeek-R1", 1), ("MiniMaxAI__MiniMax-M2.5", 3), ("Qwen__Qwen3-0.6B", 0)):
        found = model(shared, name)
        assert len(found.draft) == drafts
        assert len(found.caches(with_draft=True)) == len(found.layers) + drafts


def test_what_was_assumed_is_told(shared: Path) -> None:
    assert any("sliding_window_pattern 6" in note for note in model(shared, "google__gemma-3-27b-it").assumed)
    assert any("num_hidden_layers 32" in note for note in model(shared, "llava-hf__llava-1.5-7b-hf").assumed)
    assert model(shared, "meta-llama__Llama-3.1-8B-Instruct").assumed == ()


def test_a_checkpoint_says_what_its_cache_was_calibrated_for(shared: Path) -> None:
    found = model(shared, "nvidia__Kimi-K2.5-NVFP4")
    assert found.kv_dtype == "fp8"
    assert any("calibrated" in note for note in found.assumed)
    assert model(shared, "nvidia__Kimi-K2.5-NVFP4", "bfloat16").kv_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("kv_dtype", "token_bytes"),
    [
        ("auto", 8 * 2 * 128 * 2),
        ("fp16", 8 * 2 * 128 * 2),
        ("fp8", 8 * 2 * 128),
        ("fp8_e5m2", 8 * 2 * 128),
        ("int8", 8 * 2 * (128 + 4)),
        ("fp8_per_token_head", 8 * 2 * (128 + 4)),
        ("fp4", 8 * 2 * (64 + 8)),
        ("nvfp4", 8 * 2 * (64 + 8)),
    ],
)
def test_kv_dtypes_with_their_scales(shared: Path, kv_dtype: str, token_bytes: int) -> None:
    assert (
        attention(model(shared, "meta-llama__Llama-3.1-8B-Instruct", kv_dtype).layers[0]).token_bytes() == token_bytes
    )


@pytest.mark.parametrize(
    ("kv_dtype", "token_bytes"),
    [("auto", 1_152 + 132), ("fp8", 576 + 132), ("fp8_ds_mla", 656 + 132), ("int8", 576 + 8 + 132)],
)
def test_kv_dtypes_of_latents(shared: Path, kv_dtype: str, token_bytes: int) -> None:
    (spec,) = model(shared, "deepseek-ai__DeepSeek-V3.2", kv_dtype).layers[0]
    assert isinstance(spec, Latent)
    assert spec.token_bytes() == token_bytes


# -- what is refused

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4_096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131_072, "dtype": "bfloat16",
}  # fmt: skip

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
BOTH = {"full": 32, "state": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "foo"}, "model_type 'foo' is not known"),
        ({"model_type": None}, "lacks model_type"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": 10**9}, "at most 100,000"),
        ({"hidden_size": 4_097}, "32 attention heads do not divide it"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads is 2.5"),
        ({"num_nextn_predict_layers": 1e300}, "num_nextn_predict_layers is 1e+300"),
        ({"num_nextn_predict_layers": 10**7}, "num_nextn_predict_layers is 10000000"),
        ({"head_dim": float("nan")}, "head_dim is nan"),
        ({"head_dim": float("inf")}, "head_dim is inf"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers is 32"),
        ({"layer_types": ["full_attention"] * 31}, "31 entries for 32 layers"),
        ({"layer_types": ["strange_attention"] * 32}, "layer_types has 'strange_attention'"),
        ({"layer_types": ["sliding_attention"] * 32, "sliding_window": 0}, "sliding_window is 0"),
        ({"cla_share_factor": 2}, "cla_share_factor in a 'llama' configuration is not known"),
        ({"kv_compression_ratio": 4}, "kv_compression_ratio in a 'llama' configuration is not known"),
        ({"dtype": "float3"}, "dtype is 'float3'"),
        ({"multi_query": "yes"}, "multi_query is 'yes'"),
    ],
)
def test_one_error_that_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_model({**LLAMA, **changes})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_fields_are_never_guessed() -> None:
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        fields = {key: value for key, value in LLAMA.items() if key != name} | {"model_type": "mistral"}
        with pytest.raises(ConfigError, match=f"lacks {name}"):
            read_model(fields)


def test_an_unknown_type_can_be_read_as_a_known_one() -> None:
    assert read_model({**LLAMA, "model_type": "foo"}, model_type="llama").layers == read_model(LLAMA).layers


def test_what_is_not_a_configuration() -> None:
    wrong: Any
    for wrong in ([], "llama", 3, None, {}):
        with pytest.raises(ConfigError):
            read_model(wrong)


def test_a_dtype_can_be_given() -> None:
    assert attention(read_model(LLAMA, dtype="float16", kv_dtype="auto").layers[0]).element_bytes == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["mamba"] * 32}, "'state' in part"),
        ({"layer_types": ["hybrid"] * 32}, "'state' in part"),
        ({"layers_block_type": ["mamba"] * 32}, "layers_block_type"),
        ({"hybrid_override_pattern": "M" * 32}, "hybrid_override_pattern"),
        ({"attn_type_list": [0] * 32}, "attn_type_list"),
        ({"linear_attn_config": {"full_attn_layers": [4]}}, "linear_attn_config"),
        ({"block_configs": []}, "block_configs"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config"),
        ({"full_attention_interval": 4}, "full_attention_interval"),
        ({"use_cla": True, "cla_share_factor": 2}, "cla_share_factor"),
        ({"use_cla": False, "cla_share_factor": 2}, None),
        ({"layer_types": [None] * 32}, "layer_types has None"),
        ({"model_type": "bert", "is_decoder": True}, "is_decoder is true"),
        ({"model_type": "bamba", "attn_layer_indices": [{}]}, "attn_layer_indices"),
        ({"model_type": "mllama_text_model", "cross_attention_layers": [True, False]}, "cross_attention_layers"),
        ({"model_type": "glm_moe_dsa", **LATENT, "index_head_dim": 128, "indexer_types": ["full"]}, "indexer_types"),
        ({"model_type": "glm_moe_dsa", **LATENT, "index_head_dim": 128, "indexer_types": 3}, "indexer_types"),
        ({"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "mamba_ssm_dtype": [1]}, "dtype is [1]"),
    ],
)
def test_other_ways_to_tell_layers_apart_are_never_passed_over(changes: dict[str, Any], message: str | None) -> None:
    """What one family says in a field, another may not have."""
    if message is None:
        assert kinds(read_model({**LLAMA, **changes})) == {"full": 32}
        return
    with pytest.raises(ConfigError) as raised:
        read_model({**LLAMA, **changes})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3_moe", "sliding_window": 4_096}, {"full": 32}),
        ({"model_type": "qwen2", "sliding_window": 4_096, "use_sliding_window": True}, {"full": 28, "window 4096": 4}),
        ({"model_type": "mistral", "num_hidden_layers": 2}, {"window 4096": 2}),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}, {"full": 2}),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, {"window 4096": 24, "full": 8}),
        ({"model_type": "exaone4"}, {"window 4096": 24, "full": 8}),
        ({"model_type": "exaone4", "sliding_window": None}, {"full": 32}),
        ({"model_type": "longcat_flash", "num_layers": 14, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, {"full": 28}),
        ({"model_type": "falcon_h1", "mamba_d_state": 16, "mamba_n_heads": 8, "ssm_in_multiplier": 1.2}, BOTH),
        ({"model_type": "lfm2", "full_attn_idxs": [0, 1], "conv_dim": 4_096}, {"full": 2, "state": 30}),
    ],
)
def test_windows_and_halves_as_the_classes_have_them(config: dict[str, Any], expected: dict[str, int]) -> None:
    assert kinds(read_model({**LLAMA, **config})) == expected


def test_latents_are_the_class_default_unless_the_file_says_null() -> None:
    deepseek = {**LLAMA, "model_type": "deepseek_v3", "num_hidden_layers": 1}
    assert read_model(deepseek).layers == ((Latent(512, 64),),)
    assert kinds(read_model({**deepseek, "kv_lora_rank": None})) == {"full": 1}
    assert attention(read_model({**deepseek, "use_mla": False}).layers[0]).num_kv_heads == 8


def test_the_width_of_a_cache_is_not_that_of_the_weights() -> None:
    found = read_model({**LLAMA, "dtype": "float8_e4m3fn"})
    assert attention(found.layers[0]).element_bytes == 2
    assert any("float8_e4m3fn weights" in note for note in found.assumed)
    assert attention(read_model(LLAMA, dtype="float32").layers[0]).element_bytes == 4
    with pytest.raises(ConfigError, match="dtype is 'float3'"):
        read_model(LLAMA, dtype="float3")


def test_heads_of_single_kinds_of_layers() -> None:
    gemma = {
        **LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 256, "sliding_window": 512,
        "num_global_key_value_heads": 2,
    }  # fmt: skip
    assert attention(read_model(gemma).layers[5]) == Attention(8, 512), "global_head_dim is 512 where nothing is said"
    assert attention(read_model({**gemma, "attention_k_eq_v": True}).layers[5]) == Attention(2, 512)
    single = {"05": {"head_dim": 384}}
    assert attention(read_model({**gemma, "per_layer_config": single}).layers[5]) == Attention(8, 384)
    with pytest.raises(ConfigError, match="per_layer_config"):
        read_model({**gemma, "per_layer_config": {"05": {"sliding_window": 3}}})
    zamba = {
        **LLAMA,
        "model_type": "zamba2",
        "num_hidden_layers": 1,
        "layers_block_type": ["hybrid"],
        "kv_channels": 80,
    }
    state = {"n_mamba_heads": 8, "mamba_d_state": 64}
    assert attention(read_model({**zamba, **state}).layers[0]).head_dim == 256
    ernie = read_model({**LLAMA, "model_type": "ernie4_5", "hidden_size": 2_048})
    assert attention(ernie.layers[0]).head_dim == 128


def test_scaled_positions_and_class_defaults_of_heads() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    found = read_model({**LLAMA, "max_position_embeddings": 40_960, "rope_scaling": yarn})
    assert found.max_model_len == 131_072
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert any("as many KV heads" in note for note in read_model(without).assumed)
    assert attention(read_model({**without, "model_type": "mixtral"}).layers[0]).num_kv_heads == 8
    assert (
        attention(read_model({**without, "model_type": "mixtral", "num_key_value_heads": None}).layers[0]).num_kv_heads
        == 32
    )
    assert attention(read_model({**without, "model_type": "falcon"}).layers[0]).num_kv_heads == 1


@pytest.mark.parametrize(
    ("quantization", "kv_dtype"),
    [
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 4}}, None),
        ({"kv_cache_quant_algo": "FOO8"}, None),
        ({"kv_cache_scheme": None}, "bfloat16"),
    ],
)
def test_what_a_checkpoint_says_of_its_cache(quantization: dict[str, Any], kv_dtype: str | None) -> None:
    found = read_model({**LLAMA, "quantization_config": quantization})
    assert found.kv_dtype == (kv_dtype or "bfloat16")
    assert any("is not known" in note for note in found.assumed) == (kv_dtype is None)


# -- laws

_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.floats(allow_nan=True), st.text(max_size=5),
    st.lists(st.one_of(st.integers(-1, 4), st.sampled_from(["full_attention", "sliding_attention"])), max_size=5),
    st.dictionaries(st.sampled_from(["sparse_index_dim", "num_heads"]), st.integers(-1, 9), max_size=2),
)  # fmt: skip
_NAMES = st.sampled_from(
    [
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types"),
        *("sliding_window", "sliding_window_pattern", "max_position_embeddings", "dtype", "kv_lora_rank", "expand"),
        *("num_kv_shared_layers", "qk_rope_head_dim", "attention_chunk_size", "index_head_dim", "compress_ratios"),
        *("hybrid_override_pattern", "layers_block_type", "state_size", "conv_kernel", "mamba_num_heads", "n_groups"),
        *("block_configs", "text_config", "quantization_config", "num_nextn_predict_layers", "attn_layer_indices"),
    ]
)


@given(st.sampled_from(sorted(BY_MODEL_TYPE)), st.dictionaries(_NAMES, _VALUES, max_size=12))
def test_any_configuration_is_answered_or_refused(model_type: str, fields: dict[str, Any]) -> None:
    """With whole, positive figures, or with one ConfigError."""
    try:
        found = read_model({**LLAMA, **fields, "model_type": model_type})
        plan = plan_memory(found, 2**30, max_model_len=1_000)
    except ConfigError as error:
        assert str(error)  # noqa: PT017
        return
    assert plan.num_blocks >= 0
    assert plan.block_bytes >= 0
    assert plan.kv_tokens >= 0
    assert plan.max_concurrency() >= 0
    assert plan.bytes_per_token >= 0
    assert plan.longest is None or plan.longest >= 0


def test_no_model_type_has_two_rows() -> None:
    assert len(BY_MODEL_TYPE) == sum(len(family.model_types) for family in FAMILIES)
