"""Lines that people published of their servers' starts: each test has the number of its source in sizing_truths.md.

Memory was printed with two decimals, so what follows from it is a range: `between` has both ends.

Not here, for want of inputs: 8's memory, 14 and 16 (how many tokens were drafted is not said), 18 (what else is in
memory is not said), the first figure of B7 (no whole number of blocks gives it), the blocks of 12 (memory is not said).
"""
# ruff: noqa: N802

from fractions import Fraction
from pathlib import Path

import pytest
from tests.models.configs import model

from kvpool.plan.deployment import Deployment
from kvpool.plan.kinds import FullAttention, StateSpace
from kvpool.plan.memory import GIB, Plan, plan_memory
from kvpool.plan.model import Model
from kvpool.plan.rules import rule
from kvpool.plan.spec import Attention, Latent, State


def plans(model: Model, printed_gib: float, max_model_len: int, version: str = "0.18.0", **how: int) -> list[Plan]:
    """At both ends of what the printed memory may have been."""
    return [
        plan_memory(
            model,
            int((printed_gib + end) * GIB),
            max_model_len=max_model_len,
            deployment=Deployment(**how),  # type: ignore[arg-type]
            rule=rule(f"vllm-{version}"),
        )
        for end in (-0.005, 0.005)
    ]


def between(plans: list[Plan], what: str, figure: float) -> bool:
    low, high = (float(getattr(plan, what)) for plan in plans)
    return low <= figure <= high


def uniform(num_layers: int, num_kv_heads: int, head_dim: int, max_model_len: int) -> Model:
    return Model("by hand", ((Attention(num_kv_heads, head_dim),),) * num_layers, max_model_len)


# -- section A: bytes a token


@pytest.mark.parametrize(
    ("name", "tp", "kv_dtype", "bytes_per_token"),
    [
        ("meta-llama__Llama-3.1-70B-Instruct", 1, "auto", 327_680),
        ("meta-llama__Llama-3.1-70B-Instruct", 4, "auto", 81_920),
        ("meta-llama__Llama-3.1-70B-Instruct", 1, "fp8", 163_840),
        ("meta-llama__Llama-3.1-70B-Instruct", 4, "fp8", 40_960),
        ("meta-llama__Llama-4-Scout-17B-16E-Instruct", 8, "auto", 24_576),
        ("meta-llama__Llama-4-Scout-17B-16E-Instruct", 8, "fp8", 12_288),
        ("Qwen__Qwen3-235B-A22B-FP8", 4, "auto", 48_128),
        ("Qwen__Qwen3-235B-A22B-FP8", 8, "auto", 48_128),
        ("Qwen__Qwen3-VL-30B-A3B-Instruct", 1, "auto", 98_304),
        ("deepseek-ai__DeepSeek-R1", 8, "auto", 70_272),
        ("moonshotai__Kimi-K2.5", 8, "auto", 70_272),
        ("deepseek-ai__DeepSeek-V3.2", 8, "auto", 61 * (576 * 2 + 132)),
    ],
)
def test_A_bytes_a_token(shared: Path, name: str, tp: int, kv_dtype: str, bytes_per_token: int) -> None:
    """As of vLLM 0.11, which counts the chunked layers of Llama 4 as full."""
    plan = plan_memory(
        model(shared, name, kv_dtype), GIB, deployment=Deployment(tp=tp), max_model_len=8192, rule=rule("vllm-0.11.2")
    )
    assert plan.bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("name", "kv_dtype", "bytes_per_token"),
    [
        ("Qwen__Qwen3.5-35B-A3B", "auto", 40 * 2048),
        ("Qwen__Qwen3-Next-80B-A3B-Instruct", "auto", 48 * 2048),
        ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "fp8", 5 * 6 * 512),
    ],
)
def test_A_memory_through_tokens_of_models_with_states(
    shared: Path, name: str, kv_dtype: str, bytes_per_token: int
) -> None:
    """The old figure divides the pool among the groups, so every group is in it."""
    plan = plan_memory(model(shared, name, kv_dtype), 60 * GIB, max_model_len=10_000, rule=rule("vllm-0.18.0"))
    assert 60 * GIB / plan.kv_tokens == pytest.approx(bytes_per_token, rel=0.01)
    assert plan.bytes_per_token * len(plan.layout.groups) == bytes_per_token


# -- section B: single lines


def test_1_and_2_a_longer_limit_leaves_less_memory(shared: Path) -> None:
    llama = model(shared, "meta-llama__Llama-3.1-8B-Instruct")
    first, second = plans(llama, 3.81, 20_000), plans(llama, 2.89, 29_000)
    assert between(first, "num_blocks", 1_952)
    assert f"{1_952 / first[0].blocks_per_request(20_000):.2f}" == "1.56"
    assert between(second, "num_blocks", 1_478)
    assert f"{1_478 / second[0].blocks_per_request(29_000):.2f}" == "0.82"
    assert all(plan.fits for plan in first)
    assert not any(plan.fits for plan in second)


def test_3_the_printed_memory_is_of_rank_0_and_the_smallest_decides(shared: Path) -> None:
    of_rank_0 = plans(model(shared, "Qwen__Qwen3-235B-A22B-FP8"), 8.11, 40_960, tp=4)
    assert between(of_rank_0, "kv_tokens", 180_928)
    assert pytest.approx(1 / 1.011, abs=0.001) == 178_880 / 180_928


@pytest.mark.parametrize(
    ("name", "gib", "length", "tokens", "times", "version"),
    [
        pytest.param("Qwen__Qwen3-14B", 6.51, 32_768, 42_656, "1.30", "0.11.0", id="4"),
        pytest.param("Qwen__Qwen3-8B", 18.69, 40_960, 136_080, "3.32", "0.18.0", id="B3"),
        pytest.param("Qwen__Qwen2.5-14B", 41.43, 4_096, 226_240, "55.23", "0.21.0", id="B11"),
    ],
)
def test_lines_of_models_that_keep_everything(
    shared: Path, name: str, gib: float, length: int, tokens: int, times: str, version: str
) -> None:
    found = plans(model(shared, name), gib, length, version)
    assert between(found, "kv_tokens", tokens)
    assert f"{tokens / 16 / found[0].blocks_per_request(length):.2f}" == times


def test_5_blocks_of_128() -> None:
    """Mistral-Small-3.2-24B: 40 layers of 8 KV heads of 128."""
    found = plans(uniform(40, 8, 128, 131_072), 28.20, 16_000, "0.11.0", block_size=128)
    assert between(found, "kv_tokens", 184_832)
    assert 184_832 == 1_444 * 128
    assert f"{1_444 / found[0].blocks_per_request(16_000):.2f}" == "11.55"
    assert found[0].blocks_per_request(15_049) == 118


@pytest.mark.parametrize(
    ("num_blocks", "times"),
    [pytest.param(1_381, "10.79", id="8"), pytest.param(127_626, "997.08", id="9")],
)
def test_concurrency_at_2048(num_blocks: int, times: str) -> None:
    plan = plan_memory(uniform(80, 8, 128, 2_048), num_blocks * 80 * 65_536, rule=rule("vllm-0.11.0"))
    assert (plan.num_blocks, plan.kv_tokens) == (num_blocks, num_blocks * 16)
    assert f"{plan.max_concurrency():.2f}" == times


@pytest.mark.parametrize(
    ("name", "tp", "mib"),
    [
        pytest.param("meta-llama__Llama-2-7b-hf", 1, 8, id="10, 12: Llama-2-7B"),
        pytest.param("meta-llama__Llama-2-70b-hf", 4, 1.25, id="10: Llama-2-70B"),
        pytest.param("meta-llama__Llama-3.1-70B-Instruct", 4, 1.25, id="12: Llama-3.1-70B"),
        pytest.param("mistralai__Mistral-Nemo-Instruct-2407", 1, 2.5, id="12: Mistral-Nemo"),
        pytest.param("mistralai__Mistral-Nemo-Instruct-2407", 2, 1.25, id="12: Mistral-Nemo, two ranks"),
        pytest.param("Qwen__Qwen2.5-7B-Instruct", 1, 0.875, id="12: Qwen2.5-7B"),
        pytest.param("01-ai__Yi-34B", 2, 1.875, id="12: Yi-34B"),
    ],
)
def test_bytes_of_a_block(shared: Path, name: str, tp: int, mib: float) -> None:
    plan = plan_memory(model(shared, name), 8 * GIB, deployment=Deployment(tp=tp))
    assert plan.block_bytes == mib * 2**20


def test_12_blocks_of_a_cpu_tier_of_8_gib(shared: Path) -> None:
    """1,023 beside the null block."""
    assert plan_memory(model(shared, "meta-llama__Llama-2-7b-hf"), 8 * GIB).num_usable_blocks == 1_023


def test_11_an_rtx_4090(shared: Path) -> None:
    plan = plan_memory(model(shared, "meta-llama__Llama-3.1-8B-Instruct"), 2_588 * 2 * 2**20, max_model_len=32_768)
    assert (plan.num_blocks, plan.kv_tokens) == (2_588, 41_408)
    assert f"{plan.num_blocks * plan.block_bytes / GIB:.2f}" == "5.05"


def test_20_llama_4_needs_24_gib_for_a_million_tokens(shared: Path) -> None:
    scout = model(shared, "meta-llama__Llama-4-Scout-17B-16E-Instruct")
    (plan, _) = plans(scout, 9.97, 1_048_576, "0.11.0", tp=8)
    assert plan.blocks_per_request(1_048_576) * plan.block_bytes == 24 * GIB
    assert not plan.fits


def test_21_the_whole_model_charged_to_one_stage(shared: Path) -> None:
    """The report's figure counts 48 layers; the stage of 16 has three times as many tokens (case A03)."""
    found = plans(model(shared, "Qwen__Qwen3-30B-A3B-FP8"), 3.18, 262_144)
    assert found[0].blocks_per_request(262_144) * found[0].block_bytes == 24 * GIB
    assert between(found, "longest", 34_736)


def test_22_a_tpu_with_blocks_of_128(shared: Path) -> None:
    llama = model(shared, "meta-llama__Llama-3.1-8B-Instruct")
    found = plans(llama, 0.71, 131_072, "0.29.0", block_size=128)
    assert found[0].blocks_per_request(131_072) * found[0].block_bytes == 16 * GIB
    assert between(found, "longest", 5_632)


def test_23_a_latent_of_320() -> None:
    small = Model("Mistral-Small-4-119B", ((Latent(256, 64),),) * 36, 1_048_576)
    found = plans(small, 17.39, 1_048_576, block_size=64)
    assert found[0].bytes_per_token == 23_040
    assert found[0].blocks_per_request(1_048_576) * found[0].block_bytes == 22.5 * GIB
    assert between(found, "longest", 810_208)


def test_B5_falcon_h1_3b_has_blocks_of_2080() -> None:
    """Mamba 2: 32 heads of 128, state 256, 1 group, kernel 4; attention: 2 KV heads of 128; both in all 32 layers."""
    state = State(32, conv_bytes=3 * 4_096 * 2, recurrent_bytes=32 * 128 * 256 * 2, group_bytes=3 * 512 * 2)
    falcon = Model("Falcon-H1-3B-Base", ((Attention(2, 128), state),) * 32, 131_072)
    found = plans(falcon, 5.28, 2_048, "0.12.0")
    assert {kind.block_size for kind in found[0].kinds} == {2_080}
    assert f"{float(100 * found[0].layout.waste.page_share):.2f}" == "0.24"
    assert between(found, "kv_tokens", 83_968)
    assert f"{found[1].max_concurrency():.2f}" == "41.50"


def test_B7_qwen3_next_with_aligned_checkpoints(shared: Path) -> None:
    """121 blocks of 544 tokens, and 2 of each of 3 groups of states: 470 / 127 x 65,536 tokens."""
    qwen = model(shared, "Qwen__Qwen3-Next-80B-A3B-Instruct")
    found = [
        plan_memory(
            qwen,
            int((5.85 + end) * GIB),
            max_model_len=65_536,
            deployment=Deployment(mamba_cache_mode="align"),
            rule=rule("vllm-0.20.1"),
        )
        for end in (-0.005, 0.005)
    ]
    assert found[0].blocks_per_request(65_536) == 127
    assert between(found, "kv_tokens", 242_534)


def test_B10_glm_5_with_index_keys_in_a_part_of_its_layers(shared: Path) -> None:
    glm = model(shared, "nvidia__GLM-5.2-NVFP4", "fp8")
    (low, high) = plans(glm, 152.98, 131_072, "0.24.0", block_size=64)
    assert low.bytes_per_token == 78 * 576 + 21 * 132
    assert pytest.approx(low.num_blocks, rel=0.001) == 53_763
    assert 53_763 * 64 == 3_440_832
    assert high.num_blocks - low.num_blocks < 5


# -- section C and D: the rules


def test_C2_gemma_like_groups_divide_the_pool(shared: Path) -> None:
    gemma = model(shared, "google__gemma-3-27b-it")
    old, new = (
        plan_memory(gemma, 20 * GIB, max_model_len=32_768, rule=rule(f"vllm-{v}")) for v in ("0.20.0", "0.20.1")
    )
    assert old.num_blocks == new.num_blocks == 16_384
    assert old.kv_tokens == 16_384 // 7 * 16
    needed = 6 * (-(-(1_023 + 8_192) // 16) + 1) + 32_768 // 16
    assert old.blocks_per_request(32_768) == needed
    assert new.kv_tokens == int(16_384 / needed * 32_768)


@pytest.mark.parametrize(
    ("heads", "value_heads", "kv_heads", "kv_dtype_bytes", "tp", "block_size", "page_bytes"),
    [
        pytest.param(16, 32, 2, 2, 1, 1_056, 2_146_304, id="Qwen3.5-35B"),
        pytest.param(16, 32, 2, 2, 4, 528, 536_576, id="Qwen3.5-35B, four ranks"),
        pytest.param(16, 32, 4, 2, 1, 528, 2_146_304, id="Qwen3.5-9B"),
        pytest.param(16, 32, 4, 1, 1, 1_056, 2_146_304, id="Qwen3.5-9B, fp8"),
    ],
)
def test_C4_a_state_raises_the_block_of_attention(
    heads: int, value_heads: int, kv_heads: int, kv_dtype_bytes: int, tp: int, block_size: int, page_bytes: int
) -> None:
    state = State(
        value_heads,
        conv_bytes=3 * (2 * heads + value_heads) * 128 * 2,
        recurrent_bytes=value_heads * 128 * 128 * 4,
    )
    assert state.page_bytes(16, tp) == page_bytes
    layers = ((state,),) * 30 + ((Attention(kv_heads, 256, element_bytes=kv_dtype_bytes),),) * 10
    plan = plan_memory(Model("by hand", layers, 8_192), GIB, deployment=Deployment(tp=tp), rule=rule("vllm-0.18.0"))
    assert {kind.block_size for kind in plan.kinds} == {block_size}


def test_C4_the_padding_of_qwen3_5(shared: Path) -> None:
    plan = plan_memory(model(shared, "Qwen__Qwen3.5-35B-A3B"), 60 * GIB, rule=rule("vllm-0.18.0"))
    assert f"{100 * float(plan.layout.waste.page_share):.2f}" == "0.76"


def test_C5_context_parallelism_multiplies_the_tokens(shared: Path) -> None:
    deepseek = model(shared, "deepseek-ai__DeepSeek-R1")
    one, eight = (plan_memory(deepseek, 20 * GIB, deployment=Deployment(tp=8, dcp=n)) for n in (1, 8))
    assert one.num_blocks == eight.num_blocks
    assert eight.kv_tokens == 8 * one.kv_tokens
    assert eight.bytes_per_token == Fraction(one.bytes_per_token, 8)


def test_D1_a_request_takes_whole_blocks(shared: Path) -> None:
    llama = model(shared, "meta-llama__Llama-3.1-70B-Instruct")
    plan = plan_memory(llama, 50 * GIB, max_model_len=10_000, deployment=Deployment(block_size=64))
    assert plan.max_concurrency() == plan.num_blocks / 157 != plan.kv_tokens / 10_000


def test_D2_without_prefix_caching_a_state_block_is_a_whole_request(shared: Path) -> None:
    nemotron = model(shared, "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "fp8")
    short, long = (
        plan_memory(nemotron, 60 * GIB, max_model_len=length, rule=rule("vllm-0.18.0")) for length in (2_048, 8_192)
    )
    assert short.num_blocks == long.num_blocks
    assert short.kv_tokens == short.num_blocks // 5 * 2_048
    assert long.kv_tokens == long.num_blocks // 5 * min(kind.block_size or 0 for kind in long.kinds)


def test_D4_states_are_wider_only_where_the_file_says_so(shared: Path) -> None:
    next_, qwen3_5 = (
        plan_memory(model(shared, name), GIB, rule=rule("vllm-0.18.0"))
        for name in ("Qwen__Qwen3-Next-80B-A3B-Instruct", "Qwen__Qwen3.5-35B-A3B")
    )
    assert {kind.block_size for kind in next_.kinds} == {544}
    assert {kind.block_size for kind in qwen3_5.kinds} == {1_056}


@pytest.mark.parametrize(
    ("name", "architecture", "version", "block_size"),
    [
        ("deepseek-ai__DeepSeek-R1", "hopper", "0.16.0", 64),
        ("deepseek-ai__DeepSeek-R1", "hopper", "0.17.1", 64),
        ("deepseek-ai__DeepSeek-R1", "hopper", "0.18.0", 16),
        ("deepseek-ai__DeepSeek-R1", "blackwell", "0.18.0", 32),
        ("deepseek-ai__DeepSeek-R1", "cdna", "0.16.0", 16),
        ("deepseek-ai__DeepSeek-V3.2", "hopper", "0.16.0", 64),
        ("deepseek-ai__DeepSeek-V3.2", "hopper", "0.18.0", 64),
        ("meta-llama__Llama-3.1-8B-Instruct", "hopper", "0.16.0", 16),
    ],
)
def test_D5_blocks_of_latents(shared: Path, name: str, architecture: str, version: str, block_size: int) -> None:
    plan = plan_memory(
        model(shared, name), GIB, deployment=Deployment(architecture=architecture), rule=rule(f"vllm-{version}")
    )
    assert plan.kinds == (FullAttention(block_size),)


@pytest.mark.parametrize(
    ("name", "num_tuples", "by_version", "per_request"),
    [
        ("nvidia__DeepSeek-V4-Pro-NVFP4", 31, (1_482_048, 1_473_408, 1_435_968), (3_537, 6_540, 7_194)),
        ("deepseek-ai__DeepSeek-V4-Flash", 22, (1_051_776, 1_039_680, 1_002_240), (3_481, 6_429, 7_194)),
    ],
)
def test_D7_deepseek_v4(
    shared: Path, name: str, num_tuples: int, by_version: tuple[int, ...], per_request: tuple[int, ...]
) -> None:
    """The block of 0.20, of 0.23 and of 0.27; requests of 131,072 tokens in 0.20, in 0.26 and in 0.27."""
    assert by_version[0] == num_tuples * 47_808
    versions = ("0.20.2", "0.23.0", "0.27.0")
    found = [plan_memory(model(shared, name), 40 * GIB, rule=rule(f"vllm-{version}")) for version in versions]
    assert tuple(plan.block_bytes for plan in found) == by_version
    versions = ("0.20.2", "0.26.0", "0.27.0")
    found = [plan_memory(model(shared, name), 40 * GIB, rule=rule(f"vllm-{version}")) for version in versions]
    assert tuple(plan.blocks_per_request(131_072) for plan in found) == per_request
    pages = {page.page_bytes for group in found[0].layout.groups for page in group.pages}
    assert pages == {37_440, 8_640, 1_728}


@pytest.mark.parametrize(
    ("gib", "length", "in_flight", "tokens"),
    [(7.01, 912_128, 8_192, 1_009_661), (7.71, 121_344, 16_384, 150_992)],
)
def test_two_starts_of_deepseek_v4_flash_in_vllm_issue_51041(
    shared: Path, gib: float, length: int, in_flight: int, tokens: int
) -> None:
    """0.26.0 with the draft head; two steps are in flight."""
    flash = model(shared, "deepseek-ai__DeepSeek-V4-Flash")
    low, high = (
        plan_memory(
            flash,
            int((gib + end) * GIB),
            max_model_len=length,
            deployment=Deployment(mtp=True, max_num_batched_tokens=in_flight // 2),
            rule=rule("vllm-0.26.0"),
        )
        for end in (-0.005, 0.005)
    )
    assert low.kv_tokens <= tokens <= high.kv_tokens


# -- section E: what tools get wrong


def test_E_latents_are_not_divided(shared: Path) -> None:
    deepseek = model(shared, "deepseek-ai__DeepSeek-V3.2")
    one, eight = (plan_memory(deepseek, 20 * GIB, deployment=Deployment(tp=tp)).kv_tokens for tp in (1, 8))
    assert one == eight


def test_E_a_model_with_windows_is_neither_bounded_nor_all_full(shared: Path) -> None:
    gemma = model(shared, "google__gemma-3-27b-it")
    plan = plan_memory(gemma, 20 * GIB)
    assert plan.bytes_per_token == 10 * 8_192
    assert 0 < plan.bytes_per_token * 6 < 62 * 8_192


def test_E_head_dim_is_not_hidden_size_through_heads(shared: Path) -> None:
    for name, head_dim in (
        ("google__gemma-7b", 256),
        ("Qwen__Qwen3-0.6B", 128),
        ("mistralai__Mistral-Nemo-Instruct-2407", 128),
    ):
        (spec,) = model(shared, name).layers[0]
        assert isinstance(spec, Attention)
        assert spec.head_dim == head_dim


def test_E_the_weights_do_not_decide_the_width_of_the_cache(shared: Path) -> None:
    (spec,) = model(shared, "Qwen__Qwen3-235B-A22B-FP8").layers[0]
    assert isinstance(spec, Attention)
    assert spec.element_bytes == 2


def test_E_a_model_of_states_alone_takes_blocks(shared: Path) -> None:
    plan = plan_memory(model(shared, "tiiuae__falcon-mamba-7b"), 20 * GIB)
    assert all(isinstance(kind, StateSpace) for kind in plan.kinds)
    assert plan.block_bytes == 64 * (8_192 * 3 * 2 + 8_192 * 16 * 2)
    assert 0 < plan.max_concurrency() < 10_000
