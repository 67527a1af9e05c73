"""Layers to groups: layouts of known models, derived by hand, and what holds for all layouts."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.plan.grouping import group_layers, layouts
from kvpool.plan.kinds import ChunkedLocal, CrossAttention, FullAttention, SlidingWindow, StateSpace
from kvpool.plan.layout import Layout
from kvpool.plan.spec import Attention, EncoderOnly, Latent, LayerSpec, SharedKV, State

FULL = Attention(8, 128)
WINDOW = Attention(8, 128, kind=SlidingWindow(1024))
CHUNKS = Attention(8, 128, kind=ChunkedLocal(8192))


def sizes(layout: Layout) -> list[int]:
    """How many layers every group has."""
    return [len(group.layers) for group in layout.groups]


def block_sizes(layout: Layout) -> set[int | None]:
    return {kind.block_size for kind in layout.kinds}


# -- one kind


def test_layers_of_one_kind_are_one_group() -> None:
    """Llama 3.1 8B: 32 pages of 65,536 B."""
    layout = group_layers([FULL] * 32)
    assert layout.kinds == (FullAttention(block_size=16),)
    assert layout.groups[0].layers == tuple(range(32))
    assert layout.block_bytes == 2_097_152
    assert 40 * 2**30 // layout.block_bytes == 20_480
    assert layout.waste.share == 0
    assert layout.rejected == ()


def test_layers_of_one_kind_with_different_pages_are_one_group_with_pages_of_their_own() -> None:
    """8 heads of 128, 4 heads of 64 and a latent, all full attention: 65,536 + 16,384 + 18,432 B."""
    layout = group_layers([FULL, Attention(4, 64), Latent(512, 64)])
    assert [page.page_bytes for page in layout.groups[0].pages] == [65_536, 16_384, 18_432]
    assert (layout.block_bytes, layout.groups[0].page_bytes) == (100_352, 65_536)
    assert layout.waste.share == 0


def test_states_alone_need_no_particular_block_size() -> None:
    layout = group_layers([State(8, recurrent_bytes=80)] * 3, block_size=64)
    assert (layout.kinds, layout.block_bytes) == ((StateSpace(block_size=64),), 240)


# -- two kinds with equal pages


def test_gemma_3_27b() -> None:
    """10 full, 52 sliding: 6 groups of 10 for 52 layers are 8 padding layers, 8 / 52. Of 70 places 8 are unused."""
    layer = Attention(16, 128)
    layout = group_layers(
        [layer if (i + 1) % 6 == 0 else Attention(16, 128, kind=SlidingWindow(1024)) for i in range(62)], tp=2
    )
    assert str(layout.waste) == "8 padding layers, at most 15.38 %"
    assert "8 padding layers, at most 15.38 %" in layout.report()
    assert sizes(layout) == [9, 9, 9, 9, 8, 8, 10]
    assert [group.num_padding_layers for group in layout.groups] == [1, 1, 1, 1, 2, 2, 0]
    assert layout.waste.share == Fraction(8, 70)
    assert layout.block_bytes == 10 * 16 * 2 * 8 * 128 * 2


def test_gemma_3_1b() -> None:
    """4 full, 22 sliding: 6 groups of 4 for 22 layers, 2 / 22."""
    full, window = Attention(1, 256), Attention(1, 256, kind=SlidingWindow(512))
    layout = group_layers([full if (i + 1) % 6 == 0 else window for i in range(26)])
    assert str(layout.waste) == "2 padding layers, at most 9.09 %"
    assert layout.waste.share == Fraction(2, 28)


def test_a_half_sliding_model_with_a_draft_layer() -> None:
    """19 full, 18 sliding: 2 groups of 19 leave 1 of 38 places empty, 3 groups of 18 leave 17 of 54."""
    full, window = Attention(8, 64), Attention(8, 64, kind=SlidingWindow(128))
    layout = group_layers([window, full] * 18 + [full])
    assert sizes(layout) == [18, 19]
    assert str(layout.waste) == "1 padding layer, at most 5.56 %"
    assert layout.why == (
        "2 groups of 19 layers, blocks of 16 tokens: 1 padding layer, at most 5.56 %, 2.63 % of the bytes hold nothing"
        "; it would be 31.48 % with 3 groups of 18 layers, blocks of 16 tokens"
    )


def test_chunked_local_layers() -> None:
    """12 full, 36 local: 4 groups of 12."""
    layout = group_layers(([CHUNKS] * 3 + [FULL]) * 12)
    assert sizes(layout) == [12] * 4
    assert layout.waste.share == 0
    assert layout.kinds == (ChunkedLocal(8192, block_size=16),) * 3 + (FullAttention(block_size=16),)


def test_cross_attention_is_a_kind_of_its_own() -> None:
    layout = group_layers([FULL, Attention(8, 128, kind=CrossAttention())] * 32)
    assert sizes(layout) == [32, 32]


@pytest.mark.parametrize("few", range(1, 25))
def test_with_two_kinds_the_least_waste_is_the_rule_of_one_and_a_half(few: int) -> None:
    for many in range(few + 1, 3 * few + 2):
        layout = group_layers([FULL] * few + [WINDOW] * many)
        size = many if many < 1.5 * few else few
        assert layout.block_bytes == size * 65_536, (few, many)


def test_what_vllm_calls_at_most_is_of_the_kind_that_is_padded_most() -> None:
    """3, 4 and 4 in groups of 4: 1 of 3. In groups of 3 it would be 2 and 2 of 4."""
    other = Attention(8, 128, kind=SlidingWindow(64))
    layout = group_layers([FULL] * 3 + [WINDOW] * 4 + [other] * 4)
    assert str(layout.waste) == "1 padding layer, at most 33.33 %"
    assert layout.rejected[0].share == Fraction(4, 15)


# -- pages made equal


def test_a_page_that_divides_the_largest_gets_a_larger_block() -> None:
    """Full 2 x 2 x 512 x 2 = 4,096 B a token, sliding 2 x 8 x 256 x 2 = 8,192: blocks of 32 and 16, 131,072 B both."""
    window, full = Attention(8, 256, kind=SlidingWindow(1024)), Attention(2, 512)
    layout = group_layers(([window] * 5 + [full]) * 5)
    assert layout.kinds == (SlidingWindow(1024, block_size=16),) * 5 + (FullAttention(block_size=32),)
    assert sizes(layout) == [5] * 6
    assert layout.block_bytes == 5 * 131_072
    assert layout.waste.share == 0
    # padded instead, the 5 full layers would use 5 x 65,536 of 6 x 5 x 131,072 B: half of a sixth is lost
    assert (layout.rejected[0].num_groups, layout.rejected[0].share) == (6, Fraction(1, 12))


def test_a_page_that_does_not_divide_the_largest_is_padded() -> None:
    """6 heads against 8: 49,152 of 65,536 B, so a third on top of what it keeps."""
    layout = group_layers([FULL, Attention(6, 128, kind=SlidingWindow(64))])
    assert block_sizes(layout) == {16}
    assert layout.waste.page_share == Fraction(1, 3)
    assert layout.waste.share == Fraction(1, 8)
    assert "no padding layers, pages padded by at most 33.33 %, 12.50 % of the bytes hold nothing" in layout.why


def test_a_page_is_padded_where_a_larger_block_would_cut_chunks() -> None:
    """A third of the page, but 3 x 16 tokens do not divide 8,192."""
    layout = group_layers([Attention(6, 128), Attention(2, 128, kind=ChunkedLocal(8192))])
    assert block_sizes(layout) == {16}
    assert layout.waste.page_share == 2


def test_padding_instead_of_a_larger_block_is_never_the_better_way() -> None:
    layout = group_layers([FULL] * 2 + [Attention(4, 128, kind=SlidingWindow(64))] * 2)
    assert block_sizes(layout) == {16, 32}
    assert (layout.rejected[0].way, layout.rejected[0].share) == (
        "2 groups of 2 layers, blocks of 16 tokens",
        Fraction(1, 4),
    )


# -- layers of a kind that differ


def test_a_draft_layer_with_larger_heads_joins_the_group_of_its_kind() -> None:
    """18 x 32,768 + 65,536 = 655,360 B against 18 x 32,768. Equal pages would need 37 groups of one layer."""
    full, window = Attention(8, 64), Attention(8, 64, kind=SlidingWindow(128))
    layout = group_layers([window, full] * 18 + [FULL])
    assert sizes(layout) == [18, 19]
    assert layout.block_bytes == 655_360
    assert layout.waste.share == Fraction(65_536, 2 * 655_360)
    assert layout.groups[1].pages[-1].page_bytes == 65_536


def test_layers_that_differ_are_parted_where_that_wastes_less() -> None:
    """16 narrow and 16 wide full ones, 32 sliding: 4 groups of 16 fit, stacked ones leave 1 of 6 parts empty."""
    narrow, wide, window = Attention(8, 64), Attention(8, 128), Attention(8, 64, kind=SlidingWindow(128))
    layout = group_layers([narrow] * 16 + [wide] * 16 + [window] * 32)
    assert sizes(layout) == [16] * 4
    assert [kind.block_size for kind in layout.kinds] == [32, 16, 32, 32]
    assert layout.waste.share == 0
    assert layout.rejected[0].share == Fraction(1, 6)


def test_stacked_groups_get_larger_blocks_where_there_is_room() -> None:
    """4 + 5 heads of full attention against one layer of 2: 9 are not 2 n, so 4 times and not 4.5."""
    layout = group_layers([Attention(4, 128), Attention(5, 128), Attention(2, 128, kind=SlidingWindow(64))])
    assert layout.kinds == (FullAttention(block_size=16), SlidingWindow(64, block_size=64))
    assert layout.waste.share == Fraction(1, 18)


def test_stacked_states_raise_the_block_too() -> None:
    """Two states of 40,000 and 30,000 B, two attention layers of 2,048 + 1,024 B a token: 32 tokens are 98,304 B."""
    states = [State(1, recurrent_bytes=40_000), State(1, recurrent_bytes=30_000)]
    layout = group_layers([Attention(4, 128), Attention(2, 128), *states])
    assert (layout.block_bytes, block_sizes(layout)) == (98_304, {32})
    assert layout.waste.share == Fraction(98_304 - 70_000, 2 * 98_304)


# -- states


def conv(channels: int) -> int:
    """A convolution of 4 keeps 3 elements of 2 bytes."""
    return 3 * channels * 2


def test_jamba() -> None:
    """Mamba 1, 8,192 channels: 49,152 + 8,192 x 16 x 2 = 311,296 B. Attention 4,096 B a token: 76 tokens, so 80."""
    mamba = State(8_192, conv_bytes=conv(8_192), recurrent_bytes=8_192 * 16 * 2)
    layout = group_layers([FULL if i % 8 == 4 else mamba for i in range(32)])
    assert sizes(layout) == [4] * 8
    assert block_sizes(layout) == {80}
    assert layout.block_bytes == 4 * 80 * 4_096
    assert layout.waste.page_share == Fraction(327_680, 311_296) - 1


def test_bamba() -> None:
    """2,147,840 B over 4,096 a token are 524.4 tokens, so 528; 29 Mamba layers in groups of 3 are 1 padding layer."""
    mamba = State(128, conv_bytes=conv(8_192), recurrent_bytes=8_192 * 128 * 2, num_groups=1, group_bytes=conv(2 * 128))
    layout = group_layers([FULL if i in (9, 18, 27) else mamba for i in range(32)])
    assert len(layout.groups) == 11
    assert block_sizes(layout) == {528}
    assert str(layout.waste) == "1 padding layer, at most 3.45 %, pages padded by at most 0.69 %"


@pytest.mark.parametrize(("tp", "block_size"), [(1, 1_056), (2, 1_056), (4, 528)])
def test_a_gated_delta_net_with_a_quarter_of_attention(tp: int, block_size: int) -> None:
    """2,146,304 B over 2,048 a token are 1,048 tokens, so 1,056; KV heads stop dividing at 2 ranks, the state does not.

    On 2 ranks 1,073,152 over 1,024 are 1,048 again, so 1,056; on 4 ranks 536,576 over 1,024 are 524, so 528.
    """
    net = State(32, conv_bytes=conv(8_192), recurrent_bytes=32 * 128 * 128 * 4)
    layout = group_layers(([net] * 3 + [Attention(2, 256)]) * 10, tp=tp)
    assert sizes(layout) == [10] * 4
    assert block_sizes(layout) == {block_size}
    assert f"{100 * float(layout.waste.page_share):.2f}" == "0.76"


def test_the_start_of_a_hybrid_of_52_layers() -> None:
    """Nemotron 3 Nano, fp8: 2,134,016 B over 512 a token are 4,168 tokens, so 4,176.

    A start of vLLM 0.13 had 93.13 GiB, and printed 6,506,208 tokens: blocks // groups x block size.
    """
    mamba = State(64, conv_bytes=conv(4_096), recurrent_bytes=4_096 * 128 * 4, num_groups=8, group_bytes=conv(2 * 128))
    layout = group_layers([mamba] * 23 + [Attention(2, 128, element_bytes=1)] * 6 + [EncoderOnly()] * 23)
    assert sizes(layout) == [6, 6, 6, 5, 6]
    assert block_sizes(layout) == {4_176}
    assert int(93.13 * 2**30) // layout.block_bytes // 5 * 4_176 == 6_506_208
    assert len(layout.uncached) == 23


def test_latent_attention_beside_a_state() -> None:
    """Kimi Linear: 3 x 12,288 x 2 + 32 x 128 x 128 x 4 = 2,170,880 B over 1,152 are 1,884.4 tokens, so 1,888."""
    layout = group_layers(
        [Latent(512, 64)] * 7 + [State(32, conv_bytes=conv(12_288), recurrent_bytes=32 * 128 * 128 * 4)] * 20
    )
    assert block_sizes(layout) == {1_888}
    assert str(layout.waste).startswith("1 padding layer, at most 5.00 %")


def test_a_small_state_is_padded_and_raises_nothing() -> None:
    """Short convolutions: 10 of them and 6 of attention, 2 padding layers, 2 / 10."""
    layout = group_layers([State(2_048, conv_bytes=2 * 2_048 * 2)] * 10 + [Attention(8, 64)] * 6)
    assert block_sizes(layout) == {16}
    assert str(layout.waste) == "2 padding layers, at most 20.00 %, pages padded by at most 300.00 %"


def test_a_block_that_holds_the_state_already_stays() -> None:
    layout = group_layers([FULL, State(8, recurrent_bytes=4_096 * 100)], block_size=200)
    assert block_sizes(layout) == {200}


def test_a_state_raises_the_block_to_a_divisor_of_the_chunks() -> None:
    """3,000,000 B over 4,096 are 733 tokens, so 736 or more: of the divisors of 8,192 that is 1,024."""
    layout = group_layers([CHUNKS, State(8, recurrent_bytes=3_000_000)])
    assert block_sizes(layout) == {1_024}


# -- pipeline stages


def test_layers_are_dealt_to_the_groups_so_that_stages_have_a_part_of_each() -> None:
    names = ("full.0", "window.0", "window.1", "full.1", "window.2", "window.3")
    layout = group_layers({name: FULL if name.startswith("full") else WINDOW for name in names})
    assert [group.layers for group in layout.groups] == [
        ("full.0", "full.1"), ("window.0", "window.2"), ("window.1", "window.3"),
    ]  # fmt: skip
    assert layout.stage_block_bytes(names[:3]) == layout.stage_block_bytes(names[3:]) == layout.block_bytes // 2
    assert layout.stage_block_bytes(names) == layout.block_bytes
    assert layout.stage_block_bytes(["elsewhere"]) == 0


def test_uneven_stages() -> None:
    """48 layers of 2 x 4 x 128 x 2 B a token, 16 and 32 of them: 6,512 blocks of 3.18 GiB, 5,120 of 5 GiB."""
    layout = group_layers([Attention(4, 128)] * 48)
    first, second = layout.stage_block_bytes(range(16)), layout.stage_block_bytes(range(16, 48))
    assert (int(3.18 * 2**30) // first, 5 * 2**30 // second) == (6_512, 5_120)


# -- layers that keep nothing


def test_layers_that_read_another_layers_cache() -> None:
    """Gemma 3n: 35 layers, every fifth full, the last 15 read layers 18 and 19. 20 keep their own: 16 and 4."""
    kinds = [FullAttention() if i % 5 == 4 else SlidingWindow(512) for i in range(35)]
    layout = group_layers(
        [
            Attention(2, 256, kind=kind) if i < 20 else SharedKV(19 if kind == FullAttention() else 18)
            for i, kind in enumerate(kinds)
        ]
    )
    assert sizes(layout) == [4] * 5
    assert layout.shared[:5] == ((20, 18), (21, 18), (22, 18), (23, 18), (24, 19))
    assert len(layout.shared) == 15
    assert "15 layers that read the cache of 2 others" in layout.report()


def test_a_model_that_keeps_nothing() -> None:
    layout = group_layers([EncoderOnly()] * 12)
    assert (layout.groups, layout.block_bytes, layout.uncached) == ((), 0, tuple(range(12)))
    assert layout.waste.share == 0
    assert layout.why == "no layer keeps anything"
    assert layout.report().splitlines()[:2] == ["0 groups, blocks of 0 B", "  12 layers with nothing to keep"]


# -- what cannot be

group: Any = group_layers


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: group([]), "no layers are given: 1 or more"),
        (lambda: group({}), "no layers are given"),
        (lambda: group([FULL], block_size=0), "block_size is 0: a whole number of 1 or more"),
        (lambda: group([FULL], tp=0), "tp is 0"),
        (lambda: group([FULL], tp=3), "8 KV heads cannot be split over 3 ranks"),
        (lambda: group([FULL, FullAttention()]), "layer 1 is FullAttention(block_size=None): Attention, Latent"),
        (lambda: group({1.5: FULL}), "a layer is called 1.5: a text or a whole number"),
        (lambda: group({True: FULL}), "a layer is called True"),
        (lambda: group({"a": FULL, "b": SharedKV("c")}), "layer 'b' reads the cache of 'c', which is none"),
        (lambda: group([FULL, SharedKV(0), SharedKV(1)]), "layer 2 reads the cache of 1, which reads that of 0"),
        (lambda: group([SharedKV(1), EncoderOnly()]), "layer 0 reads the cache of 1, which keeps nothing"),
        (lambda: group([SharedKV(0)]), "layer 0 reads the cache of 0, which reads that of 0"),
        (lambda: group([FULL, CHUNKS], block_size=24), "chunk_size 8192 is no multiple of the block size 24"),
        (
            lambda: group([Latent(512, 64), WINDOW]),
            "layer 0 cannot share a page with the others: its latent page of 18,432 B is not padded, and the largest "
            "page of 65,536 B is no multiple of it; 55,296 and 73,728 B are the nearest that are",
        ),
        (
            lambda: group([Attention(8, 128, kind=ChunkedLocal(512)), State(8, recurrent_bytes=3_000_000)]),
            "a state of 3,000,000 B and attention of 4,096 B a token cannot share a page: that takes blocks of 736 "
            "tokens, and chunks of 512 do not end on their borders; chunks of 736 do",
        ),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_laid_out_are_refused_with_the_numbers(make: Callable[[], Layout], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make()


def test_what_the_refusals_call_nearest_works() -> None:
    state = State(8, recurrent_bytes=3_000_000)
    assert block_sizes(group_layers([Attention(8, 128, kind=ChunkedLocal(736)), state])) == {736}
    window = Attention(4, 128, 104, kind=SlidingWindow(64), scale_bytes=28)
    assert window.page_bytes(16) == 16 * 4 * 520
    assert group_layers([Latent(512, 8), window]).waste.share == 0


# -- what holds for all layouts

KINDS = st.one_of(
    st.just(FullAttention()),
    st.builds(SlidingWindow, st.integers(1, 5_000), st.integers(0, 8)),
    st.builds(ChunkedLocal, st.sampled_from([16, 48, 512, 8_192])),
    st.just(CrossAttention()),
)
CACHED: st.SearchStrategy[LayerSpec] = st.one_of(
    st.builds(Attention, st.sampled_from([1, 2, 4, 6, 8]), st.sampled_from([64, 80, 128]), kind=KINDS),
    st.builds(Latent, st.sampled_from([256, 512]), st.just(64), kind=KINDS),
    st.builds(State, st.just(4), recurrent_bytes=st.integers(1, 400_000).map(lambda number: 4 * number)),
)
SPECS = st.one_of(CACHED, st.builds(EncoderOnly), st.builds(SharedKV, st.integers(0, 40)))
MODELS = st.one_of(
    st.lists(SPECS, max_size=12),
    st.lists(st.tuples(CACHED, st.integers(1, 12)), min_size=1, max_size=3).map(
        lambda runs: [spec for spec, times in runs for _ in range(times)]
    ),
)


@given(MODELS, st.sampled_from([1, 7, 16, 32, 528]), st.sampled_from([1, 2, 3, 8]))
def test_every_layout(layers: Sequence[LayerSpec], block_size: int, tp: int) -> None:
    try:
        layout = group_layers(layers, block_size, tp)
    except ConfigError:
        return
    assert_sound(layout, layers, block_size)
    candidates = layouts(layers, block_size, tp)
    assert layout.waste.share == min(candidate.waste.share for candidate in candidates)
    assert len(layout.rejected) == len(candidates) - 1
    for candidate in candidates:
        assert_sound(candidate, layers, block_size)


def assert_sound(layout: Layout, layers: Sequence[LayerSpec], block_size: int) -> None:
    placed = [layer for group in layout.groups for layer in group.layers]
    without = [*layout.uncached, *(layer for layer, _ in layout.shared)]
    assert Counter(map(str, [*placed, *without])) == Counter(map(str, range(len(layers))))
    for group in layout.groups:
        assert group.kind.block_size is not None
        assert group.kind.block_size >= block_size
        group.kind.validate(group.kind.block_size)
        assert all(page.page_bytes >= page.kept_bytes > 0 for page in group.pages)
        assert all(page.kind == group.kind for page in group.pages)
        used = sum(page.page_bytes for page in group.pages) + group.num_padding_layers * group.page_bytes
        assert group.num_padding_layers >= 0
        assert used <= layout.block_bytes
    waste = layout.waste
    assert 0 <= waste.share < 1
    assert waste.padding_layers_share >= 0
    assert waste.page_share >= 0
    assert layout.report().endswith(layout.why)


@given(st.lists(st.sampled_from([FULL, WINDOW, CHUNKS]), min_size=1, max_size=60))
def test_layer_i_of_a_kind_goes_to_group_i_mod_n(layers: Sequence[Attention]) -> None:
    layout = group_layers(layers)
    for spec in {FULL, WINDOW, CHUNKS} & set(layers):
        names = [name for name, other in enumerate(layers) if other == spec]
        groups = [group.layers for group in layout.groups if type(group.kind) is type(spec.kind)]
        assert groups == [tuple(names[index :: len(groups)]) for index in range(len(groups))]


def test_ten_thousand_layers_find_a_place() -> None:
    layers = [
        Attention(1 + i % 8, 128) if i % 3 else Attention(8, 128, kind=SlidingWindow(1 + i)) for i in range(10_000)
    ]
    layout = group_layers(layers)
    assert sorted(name for group in layout.groups for name in group.layers if isinstance(name, int)) == list(
        range(10_000)
    )
