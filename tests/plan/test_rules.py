"""Rules of releases: what changed in which, and layouts that a release does not have."""

import pytest

from kvpool.errors import ConfigError
from kvpool.plan.deployment import Deployment
from kvpool.plan.kinds import SlidingWindow
from kvpool.plan.memory import GIB, Plan, plan_memory
from kvpool.plan.model import Layer, Model
from kvpool.plan.rules import BLOCKS, CHANGES, STEADY, rule
from kvpool.plan.spec import Attention, IndexCache, Latent, State

FULL: Layer = (Attention(8, 128),)
WINDOW: Layer = (Attention(8, 128, kind=SlidingWindow(1_024)),)
STATE: Layer = (State(32, conv_bytes=49_152, recurrent_bytes=2_097_152),)
LATENT: Layer = (Latent(512, 64),)


def planned(*layers: Layer, version: str, gib: float = 20, length: int = 32_768, **how: object) -> Plan:
    return plan_memory(
        Model("by hand", layers, length),
        int(gib * GIB),
        deployment=Deployment(**how),  # type: ignore[arg-type]
        rule=rule(f"vllm-{version}"),
    )


def test_names_of_rules() -> None:
    assert rule("blocks") is BLOCKS
    assert rule("steady") is STEADY
    assert rule("vllm-0.18").name == rule("vllm-v0.18.0").name == "vllm-0.18.0"
    for build in ("0.18.0rc1", "0.18.0.dev8+g2841a84ac", "0.18.0+rhai5", "0.18.0.post1"):
        assert rule(f"vllm-{build}").name == "vllm-0.18.0"
    for name in ("", "vllm", "vllm-", "vllm-0.10.2", "vllm-0.34.0", "vllm-1.0.0"):
        with pytest.raises(ConfigError):
            rule(name)


def test_changes_are_in_order_and_every_rule_says_where_it_holds() -> None:
    for steps in CHANGES.values():
        releases = [since for since, _ in steps]
        assert releases == sorted(set(releases))
        assert releases[0] == (0, 11, 0)
    assert rule("vllm-0.20.0").versions == "0.20.0 to before 0.20.1"
    assert rule("vllm-0.33.0").versions.endswith("to 0.33.0")


@pytest.mark.parametrize(("version", "size"), [("0.11.0", 10), ("0.12.0", 12), ("0.17.1", 12), ("0.18.0", 12)])
def test_groups_of_the_commonest_kind_while_it_is_not_much_commoner(version: str, size: int) -> None:
    layout = planned(*[FULL] * 10, *[WINDOW] * 12, version=version).layout
    assert {len(group.pages) + group.num_padding_layers for group in layout.groups} == {size}
    between = planned(*[FULL] * 10, *[WINDOW] * 14, version=version).layout
    expected = 14 if version == "0.18.0" else 10
    assert {len(group.pages) + group.num_padding_layers for group in between.groups} == {expected}


def test_a_model_of_states_alone_has_no_prefix_caching() -> None:
    assert planned(STATE, STATE, version="0.26.0").blocks_per_request(32_768) == 1
    assert planned(STATE, STATE, version="0.26.0", mamba_cache_mode="align").blocks_per_request(32_768) == 2
    both = planned(STATE, FULL, version="0.26.0")
    assert both.blocks_per_request(32_768) == 2 + -(-32_768 // (both.kinds[1].block_size or 1))


@pytest.mark.parametrize(
    ("version", "block_size"), [("0.11.0", 1_888), ("0.18.0", 1_920), ("0.20.0", 1_888), ("0.28.0", 1_920)]
)
def test_blocks_of_latents_beside_states(version: str, block_size: int) -> None:
    """Kimi Linear: a state of 2,170,880 B, latents of 1,152 B a token."""
    kimi: Layer = (State(32, conv_bytes=73_728, recurrent_bytes=2_097_152),)
    plan = planned(kimi, kimi, kimi, LATENT, version=version)
    assert {kind.block_size for kind in plan.kinds} == {block_size}


def test_what_must_hold_one_request() -> None:
    """Gemma 3: 10 full layers, 52 windows; the first group's blocks alone, or all groups', and then the null block."""
    gemma = [*[WINDOW] * 5, FULL] * 10 + [WINDOW] * 2
    first, groups, null = (planned(*gemma, version=version, gib=1.8) for version in ("0.18.0", "0.19.0", "0.29.0"))
    blocks = (577, 6 * 577 + 2_048)
    assert first.needed_bytes(32_768) in (blocks[0] * first.block_bytes, 2_048 * first.block_bytes)
    assert groups.needed_bytes(32_768) == blocks[1] * groups.block_bytes
    assert null.needed_bytes(32_768) == (6 * (-(-(1_023 + 16_384) // 16) + 1) + 2_048 + 1) * null.block_bytes
    assert first.fits
    assert not groups.fits
    layers = planned(*gemma, version="0.13.0", gib=1.8)
    assert layers.needed_bytes(32_768) == 52 * 577 * 65_536 + 10 * 2_048 * 65_536


def test_pages_that_do_not_divide_have_no_layout_before_they_were_padded() -> None:
    odd: Layer = (Attention(3, 128, kind=SlidingWindow(1_024)),)
    with pytest.raises(ConfigError, match="has no layout"):
        planned(FULL, odd, version="0.20.0")
    assert planned(FULL, odd, version="0.24.0").num_blocks > 0


def test_layers_of_unequal_heads_are_groups_of_their_own() -> None:
    same: Layer = (Attention(4, 256),)
    layout = planned(FULL, same, WINDOW, WINDOW, version="0.20.0").layout
    assert [len(group.pages) for group in layout.groups] == [1, 1, 1, 1]


def test_stages_of_unequal_pages() -> None:
    """Until 0.17 a stage is charged for the pages of all layers."""
    sparse: Layer = (Latent(512, 64, index=IndexCache(128)),)
    layers = [*[LATENT] * 30, *[sparse] * 30]
    whole, own = (planned(*layers, version=version, pp=2) for version in ("0.16.0", "0.17.0"))
    assert whole.num_blocks < own.num_blocks
    assert whole.stages[0].block_bytes == whole.layout.block_bytes


def test_compressed_latents_came_with_0_20() -> None:
    packed: Layer = (Latent(448, 64, compression=4, page_multiple=576),)
    for version, how in (("0.19.0", {}), ("0.20.0", {"pp": 2})):
        with pytest.raises(ConfigError, match=r"0\.2"):
            planned(packed, packed, version=version, **how)


def test_steps_of_a_server() -> None:
    assert rule("vllm-0.27.0").limits(139) == (8_192, 1_024)
    assert rule("vllm-0.28.0").limits(178) == (16_384, 1_024)
    assert BLOCKS.limits(79, is_a100=True) == (2_048, 256)
    assert BLOCKS.limits(24) == (2_048, 256)
