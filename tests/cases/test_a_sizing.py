"""Cases of group A: how much memory a token takes."""
# ruff: noqa: N802

import pytest

from kvpool.engine.roofline import ModelShape
from kvpool.errors import ConfigError
from kvpool.models.huggingface import read_model
from kvpool.plan.budget import Budget
from kvpool.plan.deployment import Deployment
from kvpool.plan.grouping import group_layers, layouts
from kvpool.plan.kinds import FullAttention, LayerKind, SlidingWindow, StateSpace
from kvpool.plan.layout import Group, Layout
from kvpool.plan.memory import GIB, Plan, Stage, plan_memory
from kvpool.plan.model import Model
from kvpool.plan.overhead import EngineSettings, overhead
from kvpool.plan.overhead import ModelShape as Widths
from kvpool.plan.pages import LayerPage
from kvpool.plan.rules import Rule, rule
from kvpool.plan.spec import Attention, IndexCache, Latent, State


def test_A09_kv_bytes_use_the_kv_heads_and_not_the_width_of_the_weights() -> None:
    shape = ModelShape(
        "hidden 3584", 7.62e9, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=3584 // 28,
        weight_bytes_per_parameter=1.0,
    )  # fmt: skip
    assert shape.kv_bytes_per_token == 57_344
    assert 3_072 * shape.kv_bytes_per_token == 168 * 2**20
    asked = 3584 * 28 * 2 * 8
    assert asked == 28 * shape.kv_bytes_per_token


def test_A07_one_draft_layer_does_not_make_a_group_of_its_own() -> None:
    full = Attention(num_kv_heads=8, head_dim=64)
    window = Attention(num_kv_heads=8, head_dim=64, kind=SlidingWindow(128))
    assert full.page_bytes(16) == 32_768
    nineteen, eighteen = layouts([window, full] * 18 + [full])

    def capacity(layout: Layout) -> tuple[int, int, int, float]:
        """Block bytes, blocks of 10 GiB, blocks of one request of 131,072 tokens, how many such requests."""
        num_blocks = 10 * 2**30 // layout.block_bytes
        each = sum(kind.max_live_blocks(131_072, 16, 8_192) for kind in layout.kinds)
        return layout.block_bytes, num_blocks, each, round(num_blocks / each, 2)

    # 18 full | 1 full and 17 padding, dealt as 10 and 9 | 18 sliding: 8,192 + 8,192 + ceil(8,319 / 16) + 1
    assert [len(group.layers) for group in eighteen.groups] == [18, 10, 9]
    assert capacity(eighteen) == (589_824, 18_204, 16_905, 1.08)
    assert f"{100 * 17 / 19:.2f}" == "89.47"
    assert str(eighteen.waste) == "17 padding layers, at most 89.47 %"
    assert [len(group.layers) for group in nineteen.groups] == [18, 19]
    assert capacity(nineteen) == (622_592, 17_246, 8_713, 1.98)
    assert str(nineteen.waste) == "1 padding layer, at most 5.56 %"
    assert group_layers([window, full] * 18 + [full]).kinds == nineteen.kinds


def model(*layers: Attention | Latent | State, max_model_len: int = 8_192) -> Model:
    return Model("a model", tuple((layer,) for layer in layers), max_model_len)


def test_A01_tokens_are_those_of_requests_of_a_length_and_not_a_share_of_the_pool() -> None:
    """1 group of full attention and 3 of states, blocks of 784 tokens, 1,487 blocks, requests of 32,768 tokens."""
    kinds: list[LayerKind] = [FullAttention(784), *[StateSpace(block_size=784)] * 3]
    groups = [Group(kind, (LayerPage(0, kind, 8, 8),)) for kind in kinds]
    layout = Layout(tuple(groups), 8, "by hand")

    def counted_by(rule: Rule, length: int = 32_768) -> Plan:
        return Plan(model(Attention(1, 1)), layout, (Stage(1, 1_487 * 8, 8, ()),), Deployment(), rule, length)

    right, old = counted_by(rule("vllm-0.24.0")), counted_by(rule("vllm-0.20.0"))
    assert right.blocks_per_request(32_768) == 42 + 3 == 45
    assert f"{right.max_concurrency():.2f}" == f"{old.max_concurrency():.2f}" == "33.04"
    assert right.kv_tokens == 1_082_800
    assert old.kv_tokens == 1_487 // 4 * 784 == 290_864
    assert right.log_lines()[1] == "Maximum concurrency for 32,768 tokens per request: 33.04x"
    assert counted_by(rule("vllm-0.24.0"), 65_536).kv_tokens > right.kv_tokens
    # kvpool keeps room for the state that a step starts from, too
    assert counted_by(rule("blocks")).blocks_per_request(32_768) == 42 + 3 * 2


@pytest.mark.parametrize(
    ("gib", "num_blocks", "stage"), [((3.18, 10.0), 6_512, 0), ((3.18, 5.0), 5_120, 1)], ids=["i", "ii"]
)
def test_A03_the_stage_with_least_memory_for_its_own_layers_decides(
    gib: tuple[float, float], num_blocks: int, stage: int
) -> None:
    whole = model(*[Attention(4, 128)] * 48, max_model_len=262_144)
    plan = plan_memory(whole, [int(each * GIB) for each in gib], deployment=Deployment(pp=(16, 32)))
    assert [each.block_bytes // 16 for each in plan.stages] == [32_768, 65_536]
    assert (plan.num_blocks, plan.kv_tokens, plan.tight_stage) == (num_blocks, num_blocks * 16, stage)
    assert not plan.fits
    refusal = plan.refusal()
    assert refusal is not None
    assert "stage 0 (16 layers) needs 8.00 GiB and has 3.18" in refusal
    assert f"stage 1 (32 layers) needs 16.00 GiB and has {gib[1]:.2f}" in refusal
    assert 3.18 * GIB // (48 * 2_048) == 34_734


def test_A04_ranks_divide_heads_and_never_below_one() -> None:
    unsharded, sharded = (
        plan_memory(model(*[Attention(8, 128)] * 64), 814 * 262_144 * 256, deployment=Deployment(tp=tp, block_size=256))
        for tp in (1, 4)
    )
    assert [unsharded.bytes_per_token, sharded.bytes_per_token] == [262_144, 65_536]
    assert (unsharded.num_blocks, sharded.num_blocks) == (814, 4 * 814)
    per_rank = [
        plan_memory(model(*[Attention(4, 128)] * 48), 12 * GIB, deployment=Deployment(tp=tp)) for tp in (1, 2, 4, 8, 16)
    ]
    assert [plan.bytes_per_token for plan in per_rank] == [98_304, 49_152, 24_576, 24_576, 24_576]
    assert [plan.kv_tokens for plan in per_rank] == [131_072, 262_144, 524_288, 524_288, 524_288]
    with pytest.raises(ConfigError, match="6 KV heads cannot be split over 8 ranks"):
        plan_memory(model(Attention(6, 128)), GIB, deployment=Deployment(tp=8))


def test_A05_latents_are_on_every_rank_and_may_have_a_second_cache() -> None:
    latents = model(*[Latent(512, 64)] * 61)
    plan = plan_memory(latents, 20 * GIB, deployment=Deployment(tp=8, block_size=64))
    assert [plan.bytes_per_token, plan.kv_tokens] == [70_272, 305_536]
    sparse = model(*[Latent(512, 64, element_bytes=1, index=IndexCache(128))] * 61)
    plan = plan_memory(sparse, 8 * GIB, deployment=Deployment(block_size=64))
    assert plan.bytes_per_token == 61 * 708 == 43_188
    assert 256 * plan.bytes_per_token == 11_056_128
    assert 256 * 61 * IndexCache(128).token_bytes == 2_061_312
    assert (plan.num_blocks, plan.kv_tokens) == (3_107, 198_848)


def test_A10_bytes_a_token_are_constant_and_the_memory_moves() -> None:
    eight_bit = model(*[Attention(8, 128, element_bytes=1)] * 24, max_model_len=221_000)
    first, second = (plan_memory(eight_bit, int(gib * GIB)) for gib in (10.55, 5.59))
    assert first.bytes_per_token == second.bytes_per_token == 49_152
    assert first.kv_tokens == pytest.approx(230_528, rel=0.001)
    assert second.longest == pytest.approx(122_080, rel=0.001)
    assert f"{221_000 * 49_152 / GIB:.2f}" == "10.12"
    assert not second.fits
    shorter, longer = (plan_memory(model(*[Attention(8, 128)] * 32), blocks * 2 * 2**20) for blocks in (1_952, 1_478))
    assert (shorter.kv_tokens, longer.kv_tokens) == (31_232, 23_648)
    assert f"{shorter.max_concurrency(20_000):.2f} {longer.max_concurrency(29_000):.2f}" == "1.56 0.82"


def test_A10_a_larger_step_leaves_less_for_the_cache_and_memory_can_be_given_instead() -> None:
    widths = Widths(4_096, 14_336, 128_256, 32)
    budgets = [
        Budget(
            24 * GIB, 0.9, 15 * GIB, overhead(widths, EngineSettings(max_num_batched_tokens=tokens)).activation_bytes
        )
        for tokens in (2_048, 16_384, 65_536)
    ]
    left = [budget.kv_bytes for budget in budgets]
    assert left == sorted(left, reverse=True)
    assert len(set(left)) == 3


def test_A11_layers_that_share_keep_nothing_and_the_nested_part_is_read() -> None:
    kinds = [*["sliding_attention"] * 4, "full_attention"] * 7
    config = {
        "model_type": "gemma3n",
        "text_config": {
            "model_type": "gemma3n_text", "num_hidden_layers": 35, "num_kv_shared_layers": 15, "num_key_value_heads": 2,
            "num_attention_heads": 8, "hidden_size": 2_048, "head_dim": 256, "sliding_window": 512,
            "layer_types": kinds, "max_position_embeddings": 32_768, "dtype": "bfloat16",
        },
    }  # fmt: skip
    plan = plan_memory(read_model(config), GIB)
    own = [spec for layer in plan.model.layers for spec in layer if isinstance(spec, Attention)]
    assert [sum(type(spec.kind) is kind for spec in own) for kind in (SlidingWindow, FullAttention)] == [16, 4]
    assert {spec.token_bytes() for spec in own} == {2_048}
    assert 35 * 2_048 * 32_768 == 2_240 * 2**20
    assert 20 * 2_048 * 32_768 == 1_280 * 2**20
    assert plan.least_bytes(32_768) == 272 * 2**20
    in_blocks = 4 * 2_048 * 32_768 + 16 * 33 * 16 * 2_048
    assert in_blocks == 272.5 * 2**20
    assert SlidingWindow(512).max_live_blocks(32_768, 16, 1) == 33
    with pytest.raises(ConfigError, match="model_type"):
        read_model({"text": config["text_config"]})


def test_A13_drafts_take_their_part_and_all_positions_under_context_parallelism() -> None:
    target = model(*[Attention(1, 128)] * 48, max_model_len=100_000)
    draft = model(*[Attention(8, 128)] * 8)
    alone = plan_memory(target, 40 * GIB, deployment=Deployment(block_size=64))
    assert 40 * GIB // 24_576 == 1_747_626
    assert alone.kv_tokens == 1_747_626 // 64 * 64
    assert f"{1_747_626 * 8 * 4_096 / GIB:.1f}" == "53.3"
    both = plan_memory(target, 40 * GIB, deployment=Deployment(block_size=64), draft=draft)
    assert [both.bytes_per_token, both.kv_tokens] == [57_344, 748_928]
    # 4 ranks, each with a head of the target as before and, in the draft, all 4 ranks' tokens
    wide = model(*[Attention(32, 128)] * 8)
    ranks = plan_memory(target, 40 * GIB, deployment=Deployment(tp=4, dcp=4, block_size=64), draft=wide)
    assert ranks.block_bytes == 64 * 155_648
    assert ranks.kv_tokens == 4 * 275_904
