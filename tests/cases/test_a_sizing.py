"""Cases of group A: how much memory a token takes."""
# ruff: noqa: N802

from kvpool.engine.roofline import ModelShape
from kvpool.plan.grouping import group_layers, layouts
from kvpool.plan.kinds import SlidingWindow
from kvpool.plan.layout import Layout
from kvpool.plan.spec import Attention


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
