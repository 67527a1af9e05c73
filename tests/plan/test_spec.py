"""What a layer keeps, in bytes: every figure is derived beside it."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.plan.kinds import CrossAttention, FullAttention, LayerKind, SlidingWindow, StateSpace
from kvpool.plan.spec import Attention, IndexCache, Latent, State, heads_per_rank

# -- attention


@pytest.mark.parametrize(
    ("spec", "token_bytes"),
    [
        pytest.param(Attention(32, 128), 16_384, id="MHA: 2 x 32 x 128 x 2"),
        pytest.param(Attention(8, 128), 4_096, id="GQA: 2 x 8 x 128 x 2"),
        pytest.param(Attention(1, 256), 1_024, id="MQA: 2 x 1 x 256 x 2"),
        pytest.param(Attention(8, 192, 128), 5_120, id="keys and values differ: 8 x (192 + 128) x 2"),
        pytest.param(Attention(8, 128, element_bytes=1), 2_048, id="fp8: half of bf16"),
        pytest.param(Attention(8, 128, element_bytes=1, scale_bytes=4), 2_112, id="fp8 and scales: 8 x 2 x (128 + 4)"),
        pytest.param(Attention(8, 128, element_bytes=0.5), 1_024, id="fp4: a quarter of bf16"),
        pytest.param(Attention(8, 128, element_bytes=0.5, scale_bytes=8), 1_152, id="NVFP4: 8 x 2 x (64 + 128 / 16)"),
        pytest.param(Attention(3, 5, 4, element_bytes=0.5), 15, id="9 elements of half a byte are 5 bytes a head"),
        pytest.param(Attention(2, 512, k_equals_v=True), 2_048, id="K equal to V: 1 x 2 x 512 x 2"),
        pytest.param(Attention(2, 512, k_equals_v=True, scale_bytes=4), 2_056, id="one tensor, one scale"),
    ],
)
def test_bytes_of_a_token(spec: Attention, token_bytes: int) -> None:
    assert spec.token_bytes() == token_bytes
    assert spec.page_bytes(16) == 16 * token_bytes


@pytest.mark.parametrize("kind", [FullAttention(), SlidingWindow(128, num_sinks=4), CrossAttention()])
def test_the_kind_changes_no_page(kind: SlidingWindow | FullAttention | CrossAttention) -> None:
    assert Attention(8, 128, kind=kind).page_bytes(16) == 65_536


def test_a_block_of_llama_3_1_8b() -> None:
    assert 32 * Attention(8, 128).page_bytes(16) == 2 * 2**20


def test_ranks_divide_the_heads_and_then_replicate_them() -> None:
    layer = Attention(4, 128)
    per_rank = [48 * layer.token_bytes(tp) for tp in (1, 2, 4, 8, 16)]
    assert per_rank == [98_304, 49_152, 24_576, 24_576, 24_576]
    assert [12 * 2**30 // num_bytes for num_bytes in per_rank] == [131_072, 262_144, 524_288, 524_288, 524_288]


def test_pages_of_a_rank() -> None:
    """64 layers of 8 heads, 4 ranks, pages of 256 tokens: 4 times the 814 pages of the unsharded size, and a rest."""
    layer = Attention(8, 128)
    unsharded, sharded = 64 * layer.page_bytes(256), 64 * layer.page_bytes(256, tp=4)
    assert (unsharded, sharded) == (256 * 262_144, 256 * 65_536)
    assert 3_258 * sharded // unsharded == 814


@pytest.mark.parametrize(
    ("num_heads", "tp", "nearest"), [(6, 8, 6), (6, 4, 3), (6, 5, 6), (8, 12, 8), (8, 15, 16), (3, 2, 1), (40, 64, 80)]
)
def test_ranks_that_cannot_have_equal_shares(num_heads: int, tp: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_heads} KV heads .* {tp} ranks.* nearest that works is {nearest}$"):
        Attention(num_heads, 128).token_bytes(tp)
    assert heads_per_rank(num_heads, nearest) >= 1


# -- latent attention


def test_a_latent_has_no_factor_of_2_and_is_on_every_rank() -> None:
    """(512 + 64) x 2 = 1,152 B; 61 layers 70,272 B; 20 GiB of blocks of 64 hold 4,774 of them."""
    layer = Latent(512, 64)
    assert [61 * layer.token_bytes(tp) for tp in (1, 8, 7)] == [70_272] * 3
    assert 20 * 2**30 // (61 * layer.page_bytes(64, tp=8)) * 64 == 305_536


def test_a_latent_with_an_index() -> None:
    """fp8: 576 + (128 + 4) = 708 B; 61 layers 43,188 B a token."""
    layer = Latent(512, 64, element_bytes=1, index=IndexCache(128))
    assert 61 * layer.page_bytes(256) == 11_056_128
    assert 61 * IndexCache(128).token_bytes * 256 == 2_061_312
    assert 8 * 2**30 // (61 * layer.page_bytes(64)) * 64 == 198_848


def test_a_latent_in_bf16_with_an_index_in_fp8() -> None:
    """DeepSeek V3.2: 576 x 2 + 132 = 1,284 B; 61 layers 78,324 B."""
    assert 61 * Latent(512, 64, index=IndexCache(128)).token_bytes() == 78_324


def test_a_latent_in_fp8_whose_rotated_part_is_not() -> None:
    """512 in fp8, four fp32 scales, 64 in bf16."""
    assert Latent(512, 64, element_bytes=1, rope_element_bytes=2, scale_bytes=16).token_bytes() == 656


# -- states


def mamba2(num_heads: int, head_dim: int, state_size: int, num_groups: int, recurrent_element_bytes: int) -> State:
    """With a convolution of 4 in 2 bytes, so 3 elements kept a channel."""
    return State(
        num_heads,
        conv_bytes=3 * num_heads * head_dim * 2,
        recurrent_bytes=num_heads * head_dim * state_size * recurrent_element_bytes,
        num_groups=num_groups,
        group_bytes=3 * 2 * state_size * 2,
    )


def test_the_state_of_a_gated_delta_net() -> None:
    """32 value heads, 16 key heads of 128: 3 x (2 x 2,048 + 4,096) x 2 + 32 x 128 x 128 x 4; a quarter on 4 ranks."""
    layer = State(32, conv_bytes=3 * 8_192 * 2, recurrent_bytes=32 * 128 * 128 * 4)
    assert (layer.state_bytes(), layer.state_bytes(4)) == (2_146_304, 536_576)
    assert layer.page_bytes(16) == layer.page_bytes(4_096) == 2_146_304


def test_the_groups_of_mamba_2_are_replicated_once_ranks_exceed_them() -> None:
    """128 heads of 64, one group of 128: 3 x (8,192 + 2 x 128) x 2 = 50,688 and 8,192 x 128 x 2 = 2,097,152."""
    layer = mamba2(128, 64, 128, num_groups=1, recurrent_element_bytes=2)
    assert layer.state_bytes() == 50_688 + 2_097_152
    assert layer.state_bytes(4) == 49_152 // 4 + 1_536 + 2_097_152 // 4
    eight = mamba2(64, 64, 128, num_groups=8, recurrent_element_bytes=4)
    assert eight.state_bytes() == 3 * (4_096 + 2 * 8 * 128) * 2 + 4_096 * 128 * 4 == 2_134_016
    assert 8 * eight.state_bytes(8) == eight.state_bytes()


def test_heads_of_a_state_are_not_replicated() -> None:
    with pytest.raises(ConfigError, match="state of 24 heads cannot be split over 16 ranks: the nearest below is 12"):
        State(24, recurrent_bytes=24).state_bytes(16)


# -- what cannot be

attention: Any = Attention
state: Any = State


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: attention(0, 128), "num_kv_heads is 0: a whole number of 1 or more"),
        (lambda: attention(8, 0), "head_dim is 0"),
        (lambda: attention(8, 128, 0), "head_dim_v is 0"),
        (lambda: attention(8.0, 128), "num_kv_heads is 8.0"),
        (lambda: attention(True, 128), "num_kv_heads is True"),
        (lambda: attention(8, 128, scale_bytes=-1), "scale_bytes is -1: a whole number of 0 or more"),
        (lambda: attention(8, 128, element_bytes=0.3), "element_bytes is 0.3: a whole number of bits"),
        (lambda: attention(8, 128, element_bytes=0), "element_bytes is 0:"),
        (lambda: attention(8, 128, element_bytes=float("nan")), "element_bytes is nan"),
        (lambda: attention(8, 128, element_bytes=float("inf")), "element_bytes is inf"),
        (lambda: attention(8, 128, element_bytes="fp8"), "element_bytes is 'fp8'"),
        (lambda: attention(8, 128, 64, k_equals_v=True), "k_equals_v with head_dim 128 and head_dim_v 64"),
        (lambda: attention(8, 128, kind=StateSpace()), "a state has StateSpace()"),
        (lambda: attention(8, 128, kind=FullAttention(block_size=16)), "the layout finds the block size"),
        (lambda: Latent(0, 64), "kv_lora_rank is 0"),
        (lambda: Latent(512, -1), "rope_dim is -1"),
        (lambda: Latent(512, 64, rope_element_bytes=0.1), "element_bytes is 0.1"),
        (lambda: IndexCache(0), "dim is 0"),
        (lambda: state(0, recurrent_bytes=8), "num_heads is 0"),
        (lambda: state(8), "a state of 0 bytes"),
        (lambda: state(8, conv_bytes=3, recurrent_bytes=14), "17 bytes of state are no whole number for each of 8"),
        (lambda: state(8, recurrent_bytes=8, kind=FullAttention()), "a state has StateSpace()"),
        (lambda: attention(8, 128).page_bytes(0), "block_size is 0"),
        (lambda: Latent(512, 64).page_bytes(16, tp=0), "tp is 0"),
        (lambda: state(8, recurrent_bytes=8).page_bytes(-1), "block_size is -1"),
        (lambda: attention(8, 128, kind=SlidingWindow(0)), "window is 0"),
    ],
)  # fmt: skip
def test_a_spec_that_cannot_be_is_refused_with_its_numbers(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make()


def test_specs_are_values() -> None:
    kinds: set[LayerKind] = {Attention(8, 128).kind, Latent(512, 64).kind}
    assert kinds == {FullAttention()}
    assert len({Attention(8, 128), Attention(8, 128), Attention(8, 128, 128)}) == 2
