"""The bytes of weights on a rank: what engines report that they loaded, and the laws of dividing."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.test_parameters import LLAMA, config_of, configs, counted

from kvpool.errors import ConfigError
from kvpool.models.fields import Fields
from kvpool.models.formats import WeightFormat, WeightScheme, weight_scheme
from kvpool.models.weight_bytes import Ranks, weight_bytes
from kvpool.models.weights import Parameters, Part, Weight

GIB = 2**30

# -- what vLLM loaded

_FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
_FP8_BUT_DELTA = _FP8 | {"ignore": ["lm_head", "re:.*linear_attn.*"]}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
_NEMOTRON = _MODELOPT | {
    "ignore": [
        "lm_head",
        *(f"backbone.layers.{index}.mixer.*" for index in (4, 5, 11, 12, 18, 19, 25, 26, 32, 33, 41, 42)),
    ]
}
"""Layers of attention, and the state before each, stay in 16 bits."""

LOADED: dict[str, tuple[str, dict[str, Any] | None, float]] = {
    "Qwen/Qwen3-235B-A22B-Instruct-2507": ("Qwen__Qwen3-235B-A22B-FP8", {}, 0.001),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("Qwen__Qwen3-VL-30B-A3B-Instruct", {}, 0.0065),
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": ("meta-llama__Llama-3.1-70B-Instruct", _FP8, 0.0025),
    "RedHatAI/Qwen3-235B-A22B-FP8-dynamic": ("Qwen__Qwen3-235B-A22B-FP8", _FP8, 0.0005),
    "RedHatAI/Qwen3-Coder-Next-FP8-dynamic": ("Qwen__Qwen3-Next-80B-A3B-Instruct", _FP8_BUT_DELTA, 0.0005),
    "RedHatAI/Qwen3.5-35B-A3B-FP8-dynamic": ("Qwen__Qwen3.5-35B-A3B", _FP8, 0.01),
    "deepseek-ai/DeepSeek-R1-0528": ("deepseek-ai__DeepSeek-R1", None, 0.005),
    "deepseek-ai/DeepSeek-V3.2": ("deepseek-ai__DeepSeek-V3.2", None, 0.006),
    "meta-llama/Llama-3.3-70B-Instruct": ("meta-llama__Llama-3.1-70B-Instruct", {}, 0.0015),
    "moonshotai/Kimi-K2.5": ("moonshotai__Kimi-K2.5", None, 0.0015),
    "nvidia/Llama-3.3-70B-Instruct-FP8": ("meta-llama__Llama-3.1-70B-Instruct", _MODELOPT, 0.0025),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", _NEMOTRON, 0.033),
}
"""By the model of the record: the file of its shape, its quantisation (None: the file's), the error that there is.

What is loaded beside weights is a table of positions, 0.01 to 0.3 GiB. Not compared: MI300X, where vLLM pads matrices.
"""


def loaded(shared: Path, model: str) -> Iterator[tuple[int, float]]:
    """Ranks, and the GiB that each of them loaded."""
    with (shared / "data" / "sizing" / "vllm_boot_records.csv").open() as file:
        for row in csv.DictReader(file):
            if row["model"] == model and row["accelerator"] != "MI300X":
                yield int(row["tp"]), float(row["model_load_gib"])


@pytest.mark.parametrize("model", LOADED)
def test_a_rank_loads_what_is_counted(shared: Path, model: str) -> None:
    name, quantization, error = LOADED[model]
    config = config_of(shared, name)
    if quantization is not None:
        config = {**config, "quantization_config": quantization or None}
    parameters, fields = counted(config)
    scheme = weight_scheme(fields)
    records = set(loaded(shared, model))
    assert records
    for tp, gib in records:
        (on_rank,) = weight_bytes(parameters, scheme, Ranks(tp=tp))
        assert gib * (1 - error) <= on_rank / GIB <= gib


def test_a_checkpoint_of_4_bit_experts(shared: Path) -> None:
    """gpt-oss-120b: 65.25 GB on disk."""
    parameters, fields = counted(config_of(shared, "openai__gpt-oss-120b"))
    assert weight_bytes(parameters, weight_scheme(fields))[0] / 1e9 == pytest.approx(65.25, abs=0.01)


# -- formats


def scheme_of(quantization: Any, **fields: Any) -> WeightScheme:
    config = {"model_type": "mistral", "torch_dtype": "bfloat16", "quantization_config": quantization, **fields}
    return weight_scheme(Fields(config))


@pytest.mark.parametrize(
    ("quantization", "num_bytes"),
    [
        pytest.param(None, 524_288, id="16 bits: 512 x 512 x 2"),
        pytest.param({"quant_method": "fp8"}, 262_144, id="fp8, one scale: 512 x 512"),
        pytest.param(
            {"quant_method": "fp8", "weight_block_size": [128, 128]}, 262_208, id="blocks: 512 x 512 + 4 x 4 x 4"
        ),
        pytest.param(_FP8, 264_192, id="a scale for each output: 512 x 512 + 512 x 4"),
        pytest.param({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 147_456, id="NVFP4: 512 x 512 / 2 + / 16"),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 128}, 136_192, id="131,072 + 2,048 groups of 2.5 B"
        ),
        pytest.param({"quant_method": "awq", "bits": 4, "group_size": 128}, 136_192, id="as gptq"),
        pytest.param(
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
            },
            147_456,
            id="int4 in groups of 32: 131,072 + 8,192 groups of 2 B",
        ),
    ],
)
def test_bytes_of_a_matrix(quantization: Any, num_bytes: int) -> None:
    scheme = scheme_of(quantization)
    matrix = Weight(Part.MLP, "mlp.up_proj", 512, 512)
    assert scheme.num_bytes(matrix, "model.layers.0.mlp.up_proj") == num_bytes


@pytest.mark.parametrize("part", [Part.EMBEDDINGS, Part.HEAD, Part.ROUTER, Part.NORMS, Part.TOWER])
def test_some_parts_are_never_quantised(part: Part) -> None:
    assert scheme_of({"quant_method": "fp8"}).num_bytes(Weight(part, "it", 8, 8), "it") == 128


def test_vectors_are_never_quantised() -> None:
    bias = Weight(Part.ATTENTION, "self_attn.q_proj.bias", 8)
    assert scheme_of({"quant_method": "fp8"}).num_bytes(bias, "model.layers.0.self_attn.q_proj.bias") == 16


@pytest.mark.parametrize(
    ("named", "is_kept"),
    [
        ("model.layers.3.self_attn.q_proj", True),
        ("model.language_model.layers.3.self_attn", True),
        ("self_attn", True),
        ("q_proj", True),
        ("model.layers.*.self_attn", False),
        ("model.layers.*.self_attn*", True),
        ("*.attn.*", True),
        ("backbone.layers.3.mixer.*", True),
        ("re:.*self_attn.*", True),
        ("model.layers.33.self_attn", False),
        ("model.layers.3.mlp", False),
        ("q", False),
        ("re:.*mlp.*", False),
    ],
)
def test_modules_that_a_list_keeps(named: str, is_kept: bool) -> None:
    scheme = scheme_of({"quant_method": "fp8", "modules_to_not_convert": [named]})
    query = Weight(Part.ATTENTION, "self_attn.q_proj", 8, 8)
    assert scheme.num_bytes(query, "model.layers.3.self_attn.q_proj") == (128 if is_kept else 64)


def test_experts_in_a_format_of_their_own() -> None:
    """DeepSeek V4: experts in 4 bits with a scale byte for 32, the rest in fp8."""
    scheme = scheme_of({"quant_method": "fp8"}, expert_dtype="fp4")
    assert scheme.num_bytes(Weight(Part.EXPERTS, "mlp.experts.up_proj", 64, 64), "") == 2048 + 128
    assert scheme.num_bytes(Weight(Part.MLP, "mlp.up_proj", 64, 64), "") == 4096
    scheme = scheme_of({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, expert_dtype="fp4")
    assert scheme.num_bytes(Weight(Part.EXPERTS, "mlp.experts.up_proj", 64, 64), "") == 2048 + 256


@pytest.mark.parametrize(
    ("quantization", "told"),
    [
        ("fp8", "quantization_config"),
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm'"),
        ({"quant_method": "modelopt"}, "quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}, "num_bits"),
        ({"quant_method": "compressed-tensors", "config_groups": ["group_0"]}, "num_bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 4}, "group_size"),
    ],
)
def test_what_does_not_tell_the_bytes_is_refused(quantization: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        scheme_of(quantization)


def test_what_is_assumed_is_told() -> None:
    fields = Fields(
        {"model_type": "mistral", "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    )
    weight_scheme(fields)
    assert fields.assumed == [
        "embeddings, head, norms and routers in 16 bits, all else quantised: the quantisation lists nothing that it "
        "leaves out"
    ]


# -- ranks

BF16 = WeightScheme(2)


def test_eight_kv_heads_on_sixteen_ranks_are_there_twice() -> None:
    """Llama of 4 query and 2 KV heads of 16, hidden 64: on 4 ranks each has a query head and a KV head."""
    parameters = counted(LLAMA | {"num_hidden_layers": 1, "vocab_size": 4, "tie_word_embeddings": True})[0]
    queries_and_outputs, keys_and_values = 2 * 64 * 16, 2 * 64 * 16
    mlp, norms, embeddings = 3 * 64 * 128 // 4, 3 * 64, 64
    elements = queries_and_outputs + keys_and_values + mlp + norms + embeddings
    assert weight_bytes(parameters, BF16, Ranks(tp=4)) == (2 * elements,)


def experts_only() -> Parameters:
    return Parameters((), ((Weight(Part.EXPERTS, "mlp.experts.up_proj", 10, 8, 10, num_copies=6),),), ())


@pytest.mark.parametrize(
    ("ranks", "elements"),
    [
        (Ranks(), 480),
        (Ranks(tp=2), 240),
        (Ranks(tp=2, dp=2), 6 * 3 * 8),
        (Ranks(tp=2, dp=2, expert_parallel=True), 2 * 80),
        (Ranks(tp=8, expert_parallel=True), 80),
    ],
)
def test_experts_are_cut_in_pieces_or_dealt_out_whole(ranks: Ranks, elements: int) -> None:
    assert weight_bytes(experts_only(), BF16, ranks) == (2 * elements,)


def test_stages_have_their_layers_and_the_ends() -> None:
    parameters = counted(LLAMA)[0]
    layer, table = parameters.of_layer(0), 100 * 64
    stages = weight_bytes(parameters, BF16, Ranks(stages=(1, 3)))
    assert stages == (2 * (layer + table), 2 * (3 * layer + 64 + table))


def test_a_tied_head_is_there_twice_where_stages_part_it_from_the_embeddings() -> None:
    parameters = counted(LLAMA | {"tie_word_embeddings": True})[0]
    assert sum(weight_bytes(parameters, BF16, Ranks(stages=(2, 2)))) == 2 * (parameters.total + 100 * 64)
    assert sum(weight_bytes(parameters, BF16)) == 2 * parameters.total


def test_draft_layers_are_in_the_last_stage_when_they_are_in_use() -> None:
    parameters = counted(LLAMA | {"num_nextn_predict_layers": 1})[0]
    without = weight_bytes(parameters, BF16, Ranks(stages=(2, 2)))
    assert weight_bytes(parameters, BF16, Ranks(stages=(2, 2)), with_draft=True) == (
        without[0],
        without[1] + 2 * parameters.in_draft,
    )


def test_stages_that_are_not_those_of_the_model() -> None:
    with pytest.raises(ConfigError, match="stages have 3 layers together, the model has 4"):
        weight_bytes(counted(LLAMA)[0], BF16, Ranks(stages=(1, 2)))


schemes = st.sampled_from(
    [
        BF16,
        WeightScheme(2, WeightFormat(8), WeightFormat(8)),
        WeightScheme(2, WeightFormat(8, 32, 4, 4), WeightFormat(4, 8, 1, 16)),
        WeightScheme(4, WeightFormat(4, 20, 1, 8), None, kept=("self_attn",)),
    ]
)


@given(configs(), schemes, st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_ranks_have_everything_between_them(
    config: dict[str, Any], scheme: WeightScheme, tp: int, dp: int, expert_parallel: bool
) -> None:
    parameters = counted(config)[0]
    (alone,) = weight_bytes(parameters, scheme, with_draft=True)
    (on_rank,) = weight_bytes(parameters, scheme, Ranks(tp, dp, expert_parallel), with_draft=True)
    assert on_rank * tp * dp >= alone
    assert on_rank <= alone


@given(configs(), schemes, st.integers(1, 9), st.data())
def test_stages_have_everything_between_them(
    config: dict[str, Any], scheme: WeightScheme, tp: int, data: st.DataObject
) -> None:
    parameters = counted(config | {"tie_word_embeddings": False})[0]
    first = data.draw(st.integers(0, len(parameters.layers)))
    stages = weight_bytes(parameters, scheme, Ranks(tp, stages=(first, len(parameters.layers) - first)))
    assert sum(stages) == sum(weight_bytes(parameters, scheme, Ranks(tp)))
    assert min(stages) >= 0
