"""Cases of group A: how much memory a token takes."""
# ruff: noqa: N802

from kvpool.engine.roofline import ModelShape


def test_A09_kv_bytes_use_the_kv_heads_and_not_the_width_of_the_weights() -> None:
    shape = ModelShape(
        "hidden 3584", 7.62e9, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=3584 // 28,
        weight_bytes_per_parameter=1.0,
    )  # fmt: skip
    assert shape.kv_bytes_per_token == 57_344
    assert 3_072 * shape.kv_bytes_per_token == 168 * 2**20
    asked = 3584 * 28 * 2 * 8
    assert asked == 28 * shape.kv_bytes_per_token
