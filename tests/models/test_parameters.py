"""How many parameters models have: totals were compared with the classes of transformers, or with published figures.

They are `sum(p.numel() for p in model.parameters())` of the class that belongs to the file. Towers of images that a
file does not describe are left out on both sides.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.models.families import BY_MODEL_TYPE
from kvpool.models.fields import Fields, language_part
from kvpool.models.parameters import count_parameters
from kvpool.models.patterns import num_listed, words_of
from kvpool.models.weights import Parameters, Part

TOTALS = {
    "01-ai__Yi-34B": 34_388_917_248,
    "CohereForAI__aya-23-8B": 8_028_033_024,
    "CohereForAI__c4ai-command-r-v01": 34_980_831_232,
    "EleutherAI__gpt-j-6b": 6_050_882_784,
    "HuggingFaceTB__SmolLM-1.7B": 1_711_376_384,
    "HuggingFaceTB__SmolLM2-135M-Instruct": 134_515_008,
    "LGAI-EXAONE__EXAONE-3.0-7.8B-Instruct": 7_818_448_896,
    "MiniMaxAI__MiniMax-M2.5": 228_689_748_992,
    "MiniMaxAI__MiniMax-M2": 228_689_748_992,
    "MiniMaxAI__MiniMax-Text-01_M1": 456_089_655_296,
    "Qwen__Qwen-7B": 7_721_324_544,
    "Qwen__Qwen1.5-MoE-A2.7B-Chat": 14_315_784_192,
    "Qwen__Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen__Qwen2.5-0.5B": 494_032_768,
    "Qwen__Qwen2.5-1.5B": 1_543_714_304,
    "Qwen__Qwen2.5-14B": 14_770_033_664,
    "Qwen__Qwen2.5-32B": 32_763_876_352,
    "Qwen__Qwen2.5-3B": 3_085_938_688,
    "Qwen__Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen__Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen__Qwen3-0.6B": 596_049_920,
    "Qwen__Qwen3-1.7B": 1_720_574_976,
    "Qwen__Qwen3-14B": 14_768_307_200,
    "Qwen__Qwen3-235B-A22B-FP8": 235_093_634_560,
    "Qwen__Qwen3-30B-A3B-FP8": 30_532_122_624,
    "Qwen__Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen__Qwen3-30B-A3B": 30_532_122_624,
    "Qwen__Qwen3-32B-FP8-Static-PerTensor": 32_762_123_264,
    "Qwen__Qwen3-32B": 32_762_123_264,
    "Qwen__Qwen3-4B": 4_022_468_096,
    "Qwen__Qwen3-8B": 8_190_735_360,
    "Qwen__Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen__Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen__Qwen3-VL-235B-A22B-Instruct": 235_670_022_896,
    "Qwen__Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen__Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen__Qwen3-VL-32B-Instruct": 33_357_390_064,
    "Qwen__Qwen3-VL-32B-Thinking": 33_357_390_064,
    "Qwen__Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen__Qwen3.5-122B-A10B": 122_562_817_776,
    "Qwen__Qwen3.5-27B": 27_356_728_560,
    "Qwen__Qwen3.5-35B-A3B": 35_107_181_936,
    "RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": 108_641_793_536,
    "THUDM__chatglm3-6b": 6_243_584_000,
    "THUDM__glm-4-9b-chat": 9_399_951_360,
    "XiaomiMiMo__MiMo-7B-Base": 7_622_619_136,
    "ai21labs__Jamba-v0.1": 51_570_323_328,
    "allenai__OLMo-2-0325-32B": 32_234_279_936,
    "allenai__OLMo-2-1124-13B": 13_716_198_400,
    "allenai__OLMo-2-1124-7B": 7_298_617_344,
    "allenai__OLMo-7B-hf": 6_888_095_744,
    "allenai__Olmo-3-7B-Instruct": 7_298_011_136,
    "baichuan-inc__Baichuan2-7B-Chat": 7_505_973_248,
    "bigcode__gpt_bigcode-santacoder": 1_124_886_528,
    "bigcode__starcoder2-3b": 3_030_371_328,
    "bigcode__starcoder2-7b": 7_173_923_840,
    "codellama__CodeLlama-34b-Instruct-hf": 33_743_970_304,
    "databricks__dbrx-instruct": 157_970_307_072,
    "deepseek-ai__DeepSeek-R1": 671_026_404_352,
    "deepseek-ai__DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai__DeepSeek-V2-Lite_maxtext": 15_706_484_224,
    "deepseek-ai__DeepSeek-V3.2": 671_877_929_216,
    "deepseek-ai__DeepSeek-V4-Flash": 284_332_230_231,
    "deepseek-ai__DeepSeek-V4-Flash_maxtext": 284_332_230_231,
    "deepseek-ai__deepseek-vl2-tiny": 2_934_734_080,
    "google-t5__t5-small": 60_506_624,
    "google__gemma-2-27b": 27_227_128_320,
    "google__gemma-2-2b": 2_614_341_888,
    "google__gemma-2-9b": 9_241_705_984,
    "google__gemma-3-1b-it": 999_885_952,
    "google__gemma-3-27b-it": 27_432_406_640,
    "google__gemma-3-4b-it": 4_299_915_632,
    "google__gemma-3n-E4B-it": 6_835_235_568,
    "google__gemma-4-26B-A4B-it": 25_805_933_872,
    "google__gemma-4-E2B-it": 4_797_113_600,
    "google__gemma-7b": 8_537_680_896,
    "ibm-granite__granite-4.0-h-small": 32_207_337_984,
    "internlm__internlm2-7b": 7_737_708_544,
    "liuhaotian__llava-v1.5-7b": 6_738_415_616,
    "llava-hf__llava-1.5-7b-hf": 7_063_427_072,
    "meta-llama__Llama-2-13b-hf": 13_015_864_320,
    "meta-llama__Llama-2-70b-hf": 68_976_648_192,
    "meta-llama__Llama-2-7b-hf": 6_738_415_616,
    "meta-llama__Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama__Llama-3.1-70B": 70_553_706_496,
    "meta-llama__Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama__Llama-3.2-11B-Vision-Instruct": 10_670_220_835,
    "meta-llama__Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama__Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama__Llama-3.2-90B-Vision-Instruct": 88_593_355_323,
    "meta-llama__Llama-4-Scout-17B-16E-Instruct": 107_769_861_120,
    "meta-llama__Meta-Llama-3-70B-Instruct": 70_553_706_496,
    "meta-llama__Meta-Llama-3.1-405B": 405_853_388_800,
    "meta-llama__Meta-Llama-3.1-70B": 70_553_706_496,
    "meta-llama__Meta-Llama-3.1-8B": 8_030_261_248,
    "microsoft__Phi-3-small-128k-instruct": 7_392_272_384,
    "microsoft__Phi-3-vision-128k-instruct": 3_821_079_552,
    "microsoft__Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft__Phi-4-mini-reasoning": 3_836_021_760,
    "microsoft__Phi-mini-MoE-instruct": 7_647_632_704,
    "microsoft__phi-2": 2_779_683_840,
    "microsoft__phi-4": 3_836_021_760,
    "mistralai__Mamba-Codestral-7B-v0.1": 7_285_403_648,
    "mistralai__Ministral-3-3B-2512": 3_849_090_048,
    "mistralai__Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai__Mistral-7B-v0.1": 7_241_732_096,
    "mistralai__Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai__Mixtral-8x22B-v0.1": 140_620_634_112,
    "mistralai__Mixtral-8x7B-v0.1": 46_702_792_704,
    "moonshotai__Kimi-K2.5": 1_026_879_353_328,
    "moonshotai__Kimi-Linear-48B-A3B-Instruct": 49_133_074_464,
    "nvidia__DeepSeek-V3.1-NVFP4": 671_026_404_352,
    "nvidia__DeepSeek-V3.2-NVFP4": 671_877_929_216,
    "nvidia__DeepSeek-V4-Pro-NVFP4": 1_572_997_179_491,
    "nvidia__GLM-5-NVFP4": 743_911_199_232,
    "nvidia__GLM-5.1-NVFP4": 743_911_199_232,
    "nvidia__GLM-5.2-NVFP4": 743_377_000_704,
    "nvidia__Gemma-4-26B-A4B-NVFP4": 25_805_933_872,
    "nvidia__Kimi-K2.5-NVFP4": 1_026_879_353_328,
    "nvidia__Kimi-K2.6-NVFP4": 1_026_879_353_328,
    "nvidia__Kimi-K2.7-Code-NVFP4": 1_026_879_353_328,
    "nvidia__Llama-3.1-70B-Instruct-FP8": 70_553_706_496,
    "nvidia__MiniMax-M2.7-NVFP4": 228_689_748_992,
    "nvidia__MiniMax-M3-NVFP4": 427_040_132_864,
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_937_344,
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": 31_577_937_344,
    "nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 549_308_968_960,
    "nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8": 549_308_968_960,
    "nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4": 549_308_968_960,
    "nvidia__NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": 31_577_937_344,
    "nvidia__Qwen3.5-122B-A10B-NVFP4": 122_562_817_776,
    "nvidia__Qwen3.5-397B-A17B-NVFP4": 396_802_360_816,
    "nvidia__Qwen3.6-27B-NVFP4": 27_356_728_560,
    "nvidia__Qwen3.6-35B-A3B-NVFP4": 35_107_181_936,
    "openai-community__gpt2": 124_439_808,
    "openai__gpt-oss-120b": 116_829_156_672,
    "openai__whisper-large-v3-turbo": 808_878_080,
    "openai__whisper-large-v3": 1_543_490_560,
    "sgl-project__DeepSeek-V4-Flash-FP8": 284_332_230_231,
    "sgl-project__DeepSeek-V4-Pro-FP8": 1_572_997_179_491,
    "stabilityai__stablelm-3b-4e1t": 2_795_443_200,
    "state-spaces__mamba-130m-hf": 129_135_360,
    "stepfun-ai__Step-3.7-Flash": 195_844_496_640,
    "tiiuae__Falcon-H1-7B-Instruct": 7_585_513_568,
    "tiiuae__falcon-7b": 6_921_720_704,
    "tiiuae__falcon-mamba-7b": 7_272_665_088,
    "zai-org__GLM-4.5": 352_797_814_784,
    "zai-org__GLM-5-FP8": 743_911_199_232,
    "zai-org__GLM-5.1-FP8": 743_911_199_232,
    "zai-org__GLM-5.1": 743_911_199_232,
    "zai-org__GLM-5.2-FP8": 743_377_000_704,
}
"""Parameters, draft layers apart, by the name of the file."""


def counted(config: Mapping[str, Any]) -> tuple[Parameters, Fields]:
    """The parameters of a decoded file, and the fields that they were read from."""
    part = language_part(config)
    family = BY_MODEL_TYPE[part["model_type"]]
    part = part if family.rewrite is None else family.rewrite(part)
    fields = Fields(part, family.aliases, family.defaults)
    listed = None if fields.has("num_hidden_layers") else num_listed(family.pattern, fields)
    words = words_of(family.pattern, fields, listed or fields.whole("num_hidden_layers"))
    return count_parameters(fields, family, words), fields


def config_of(shared: Path, name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((shared / "data" / "configs" / f"{name}.json").read_text())
    return config


@pytest.mark.parametrize("name", TOTALS)
def test_totals_are_those_of_the_model_class(shared: Path, name: str) -> None:
    assert counted(config_of(shared, name))[0].total == TOTALS[name]


CLASS_DEFAULTS = [
    json.loads(line) for line in (Path(__file__).parent / "class_defaults.jsonl").read_text().splitlines()
]
"""What the classes of transformers 5.24 have where nothing else is said, or with one trait turned over, and the total
of the model that they build. Types of which there is no file above."""


@pytest.mark.parametrize("config", CLASS_DEFAULTS, ids=lambda config: config["model_type"])
def test_defaults_of_a_class_build_a_model_of_that_size(config: dict[str, Any]) -> None:
    assert counted({name: value for name, value in config.items() if name != "total"})[0].total == config["total"]


@pytest.mark.parametrize(
    ("name", "intermediate_size", "total"),
    [
        ("CohereLabs__c4ai-command-r7b-12-2024", 22_528, 11_249_258_496),
        ("ibm-ai-platform__Bamba-9B", 14_336, 9_780_235_392),
    ],
)
def test_a_field_that_a_file_lacks(shared: Path, name: str, intermediate_size: int, total: int) -> None:
    config = {**config_of(shared, name), "intermediate_size": intermediate_size}
    assert counted(config)[0].total == total


def test_widths_of_each_layer(shared: Path) -> None:
    """Nemotron-NAS: each layer's MLP is a multiple of two thirds of the hidden size, rounded up to 256s; 49.87 B."""
    config = config_of(shared, "nvidia__Llama-3_3-Nemotron-Super-49B-v1")
    multiples = [block["ffn"]["ffn_mult"] for block in config["block_configs"]]
    widths = [-(-int(2 * multiple * config["hidden_size"] / 3) // 256) * 256 for multiple in multiples]
    assert counted({**config, "intermediate_size": widths})[0].total == 49_867_399_168


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen__Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen__Qwen3-235B-A22B-FP8", 235, 22),
        ("Qwen__Qwen3-Coder-480B-A35B-Instruct", 480, 35),
        ("Qwen__Qwen3-Next-80B-A3B-Instruct", 80, 3.9),
        ("Qwen__Qwen3.5-122B-A10B", 122, 9.8),
        ("deepseek-ai__DeepSeek-R1", 671, 37),
        ("deepseek-ai__DeepSeek-V2-Lite", 15.7, 2.66),
        ("deepseek-ai__DeepSeek-V4-Flash", 284, 13.4),
        ("nvidia__DeepSeek-V4-Pro-NVFP4", 1573, 49),
        ("moonshotai__Kimi-K2.5", 1026, 32.5),
        ("mistralai__Mixtral-8x7B-v0.1", 46.7, 12.9),
        ("mistralai__Mixtral-8x22B-v0.1", 141, 39),
        ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, 3.6),
        ("nvidia__NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", 550, 55),
        ("meta-llama__Llama-4-Scout-17B-16E-Instruct", 108, 17),
        ("google__gemma-4-26B-A4B-it", 25.8, 3.8),
        ("ai21labs__Jamba-v0.1", 52, 12),
        ("ibm-granite__granite-4.0-h-small", 32, 9),
    ],
)
def test_totals_and_active_parameters_are_the_published_ones(
    shared: Path, name: str, billions: float, active: float
) -> None:
    parameters = counted(config_of(shared, name))[0]
    assert parameters.total / 1e9 == pytest.approx(billions, rel=0.01)
    assert parameters.active / 1e9 == pytest.approx(active, rel=0.035)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("openai__gpt-oss-120b", 5.1),
        ("zai-org__GLM-4.5", 32),
        ("zai-org__GLM-5-FP8", 40),
        ("MiniMaxAI__MiniMax-M2", 10),
        ("MiniMaxAI__MiniMax-Text-01_M1", 45.9),
        ("moonshotai__Kimi-Linear-48B-A3B-Instruct", 3),
    ],
)
def test_some_publish_active_parameters_without_embeddings(shared: Path, name: str, active: float) -> None:
    """With the head or without it."""
    parameters = counted(config_of(shared, name))[0]
    without = parameters.active - parameters.of(Part.EMBEDDINGS)
    both = (without / 1e9, (without - parameters.of(Part.HEAD)) / 1e9)
    assert min(abs(figure / active - 1) for figure in both) < 0.04


def test_draft_layers_are_counted_apart(shared: Path) -> None:
    """MiMo: 7,833,409,536 with its draft layer, as its checkpoint has it. DeepSeek: 685 B with embeddings and head."""
    mimo = counted(config_of(shared, "XiaomiMiMo__MiMo-7B-Base"))[0]
    assert mimo.total + mimo.in_draft == 7_833_409_536
    deepseek = counted(config_of(shared, "deepseek-ai__DeepSeek-R1"))[0]
    doubled = deepseek.of(Part.EMBEDDINGS, Part.HEAD)
    assert (deepseek.total + deepseek.in_draft + doubled) / 1e9 == pytest.approx(684.5, abs=0.1)


def test_parts_of_a_mixture_of_experts(shared: Path) -> None:
    """DeepSeek R1: 58 layers of 256 experts and a shared one, 3 dense layers, each matrix 7168 wide."""
    parameters = counted(config_of(shared, "deepseek-ai__DeepSeek-R1"))[0]
    expert = 3 * 7168 * 2048
    assert parameters.of(Part.EXPERTS) == 58 * 256 * expert
    assert parameters.of(Part.SHARED_EXPERTS) == 58 * expert
    assert parameters.of(Part.MLP) == 3 * 3 * 7168 * 18432
    assert parameters.of(Part.ROUTER) == 58 * 256 * 7168
    assert parameters.of(Part.HEAD) == parameters.of(Part.EMBEDDINGS) == 129_280 * 7168
    assert parameters.of_layer(0, Part.EXPERTS) == 0
    assert parameters.of_layer(3, Part.EXPERTS) == 256 * expert
    assert parameters.of_layer(0) == parameters.of_layer(0, *Part)


def test_a_tied_head_is_nothing_of_its_own() -> None:
    tied = counted(LLAMA | {"tie_word_embeddings": True})[0]
    own = counted(LLAMA | {"tie_word_embeddings": False})[0]
    assert tied.of(Part.HEAD) == 0
    assert own.total - tied.total == own.of(Part.HEAD) == LLAMA["vocab_size"] * LLAMA["hidden_size"]


def test_what_is_assumed_is_told(shared: Path) -> None:
    fields = counted({name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"})[1]
    assert any("head is a weight of its own" in told for told in fields.assumed)
    fields = counted(config_of(shared, "liuhaotian__llava-v1.5-7b"))[1]
    assert any("no weights of a tower" in told for told in fields.assumed)


# -- what is refused

LLAMA: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        counted({key: value for key, value in LLAMA.items() if key != name})


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model_type": "zamba2", "layers_block_type": ["mamba"] * 4}, "zamba2"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"intermediate_size": [128]}, "intermediate_size"),
        ({"num_local_experts": 8}, "num_experts_per_tok"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ],
)
def test_what_cannot_be_meant_is_refused(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        counted(LLAMA | changed)


# -- laws

sizes = st.integers(1, 8)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Small models of several families, with whatever widths."""
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (8, 8)]))
    config = {
        "hidden_size": heads * draw(sizes),
        "intermediate_size": draw(st.integers(0, 40)),
        "num_hidden_layers": draw(sizes),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": draw(st.integers(1, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "num_nextn_predict_layers": draw(st.integers(0, 2)),
    }
    family: dict[str, Any] = draw(st.sampled_from(_FAMILIES))
    return config | family


_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
_FAMILIES: list[dict[str, Any]] = [
    {"model_type": "mistral"},
    {"model_type": "gpt2", "n_positions": 32},
    {"model_type": "qwen3_moe", "head_dim": 8, "mlp_only_layers": [0], **_EXPERTS},
    {"model_type": "gpt_oss", "head_dim": 8, **_EXPERTS},
    {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 8,
        "q_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        **_EXPERTS,
    },
    {
        "model_type": "qwen3_next",
        "head_dim": 8,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "shared_expert_intermediate_size": 12,
        **_EXPERTS,
    },
    {
        "model_type": "falcon_h1",
        "mamba_d_state": 4,
        "mamba_n_heads": 4,
        "mamba_d_head": 6,
        "mamba_n_groups": 2,
    },
]


@given(configs())
def test_counts_are_whole_and_add_up(config: dict[str, Any]) -> None:
    parameters = counted(config)[0]
    assert all(isinstance(weight.num_elements, int) and weight.num_elements >= 0 for weight in parameters)
    assert sum(parameters.of(part) for part in Part) == parameters.total
    assert 0 < parameters.active <= parameters.total
    assert parameters.in_draft >= 0
    assert len(parameters.layers) == config["num_hidden_layers"]


@given(configs())
def test_units_are_whole_pieces(config: dict[str, Any]) -> None:
    for weight in counted(config)[0]:
        assert weight.num_units >= 1
        assert weight.num_outputs * weight.num_inputs % weight.num_units == 0
