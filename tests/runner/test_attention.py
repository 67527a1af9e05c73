"""Long chunks, whose attention is computed in tiles, beside torch's own with a mask of all that is looked at."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvpool.runner.attention import LEAST_TILED, TILE, Rule, attend_chunk


@pytest.mark.parametrize("window", [None, 1, 37, 700, 5000])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "num_heads", "num_kv_heads"),
    [(300, 300, 4, 2), (700, 1500, 6, 2), (40, 1032, 9, 3), (1, 33_000, 2, 2), (513, 1000, 8, 1), (64, 700, 3, 3)],
)
def test_tiles(num_queries: int, num_keys: int, num_heads: int, num_kv_heads: int, window: int | None) -> None:
    group = num_heads // num_kv_heads
    assert num_queries * num_keys * group >= LEAST_TILED, "this is computed in one piece"
    torch.manual_seed(num_queries)
    query = torch.randn(num_queries, num_heads, 16)
    key, value = torch.randn(num_keys, num_kv_heads, 16), torch.randn(num_keys, num_kv_heads, 24)
    at, other = torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)[None]
    looks = (other <= at) & (other > at - (window or num_keys))
    keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (key, value))
    wanted = scaled_dot_product_attention(query.transpose(0, 1), keys, values, looks, scale=0.3).transpose(0, 1)
    found = attend_chunk(query, key, value, window, Rule(0.3))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_there_are_several_tiles() -> None:
    assert 2 * TILE < 700 * 1500 * 3
