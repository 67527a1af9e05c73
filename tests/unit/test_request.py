"""Requests: what they accept, and that each block is hashed once, with the keys that belong to it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool import Adapter, BlockHasher, EncoderInput, MediaItem, PromptEmbeds, Request, UsageError
from kvpool.core.hashing import ExtraKey

HASHER = BlockHasher(4)
Keys = tuple[ExtraKey, ...]


class CountingHasher(BlockHasher):
    """Counts the tokens that it is given."""

    __slots__ = ("counts",)
    counts: list[int]

    def names(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        parent: bytes | None = None,
        extra_keys: Iterable[Keys | None] = (),
    ) -> list[bytes]:
        self.counts.append(len(token_ids))
        return super().names(token_ids, parent, extra_keys)


@pytest.fixture
def counting() -> CountingHasher:
    hasher = CountingHasher(4)
    object.__setattr__(hasher, "counts", [])
    return hasher


def names_with_keys(tokens: Sequence[int], *keys: Keys) -> list[bytes]:
    return HASHER.names(tokens, None, keys)


def embeds(rows: Any, is_embedded: Sequence[bool], dtype: Any = np.float32) -> PromptEmbeds:
    return PromptEmbeds(np.array(rows, dtype=dtype), np.array(is_embedded, dtype=bool))


def test_a_request_keeps_its_prompt_and_grows() -> None:
    prompt = [1, 2, 3]
    request = Request("r", prompt)
    request.append(4)
    assert request.token_ids == [1, 2, 3, 4]
    assert (request.num_tokens, request.num_prompt_tokens, request.num_preemptions) == (4, 3, 0)
    assert prompt == [1, 2, 3]


@pytest.mark.parametrize("tokens", [(5, 6), range(5, 7), np.array([5, 6], dtype=np.int32), [np.int64(5), 6]])
def test_any_sequence_of_whole_numbers_is_a_prompt(tokens: Any) -> None:
    request = Request("r", tokens)
    assert request.token_ids == [5, 6]
    assert [type(token) for token in request.token_ids] == [int, int]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request("r", []), "'r' has an empty prompt"),
        (lambda: Request("r", [3, -2]), "'r': token ids are whole numbers of 0 .. .*, not -2"),
        (lambda: Request("r", [1.0]), "'r': token ids are whole numbers"),  # type: ignore[list-item]
        (lambda: Request("r", ["1"]), "'r': token ids are whole numbers"),  # type: ignore[list-item]
        (lambda: Request("r", [2**63]), "'r': token ids are whole numbers"),
        (lambda: Request("r", [1], cache_salt="\ud800"), "its cache_salt '\\\\ud800' is no valid text"),
        (lambda: Request("r", [1], adapter=Adapter("a", "\udfff")), "its adapter id '\\\\udfff' is no valid text"),
        (lambda: Request("r", bytes(16)), "'r': bytes is given for token ids"),
        (lambda: Request("r", [1], cache_salt=""), "'r' has an empty cache_salt"),
        (lambda: Request("r", [1], tenant=""), "'r' has an empty tenant"),
        (lambda: Request("r", [1], max_tokens=0), "'r' has max_tokens 0: at least 1"),
        (lambda: Request("r", [1, 2], media=[MediaItem("m", -1, 1)]), "lies outside its prompt of 2 tokens"),
        (lambda: Request("r", [1, 2], media=[MediaItem("m", 0, 0)]), "lies outside its prompt of 2 tokens"),
        (lambda: Request("r", [1, 2], media=[MediaItem("m", 1, 2)]), "lies outside its prompt of 2 tokens"),
        (lambda: Request("r", [1], encoder_input=EncoderInput("e", 0)), "'r' has an encoder input of 0 tokens"),
        (lambda: Request("r", [1], encoder_input=EncoderInput("e", -3)), "'r' has an encoder input of -3 tokens"),
        (lambda: Request("r", [1], encoder_input=EncoderInput("", 3)), "'r' has an empty encoder input"),
        (lambda: Request("r", [1], encoder_input=EncoderInput("\ud800", 3)), "its encoder input .* is no valid text"),
        (
            lambda: Request("r", [1, 2], prompt_embeds=embeds([[1.0]], [True])),
            r"2 prompt tokens, rows of shape \(1, 1\).* a choice of shape \(1,\): \(2, hidden size\) and \(2,\)",
        ),
        (lambda: Request("r", [1, 2], prompt_embeds=embeds([[1.0]] * 2, [True])), r"a choice of shape \(1,\)"),
        (lambda: Request("r", [1], prompt_embeds=PromptEmbeds(np.zeros(1), np.ones(1, bool))), r"rows of shape \(1,\)"),
    ],
)
def test_what_is_no_request_is_refused(make: Callable[[], Request], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_negative_token_is_not_appended() -> None:
    request = Request("r", [1])
    with pytest.raises(UsageError, match=r"token ids are whole numbers of 0 .. 2\*\*63 - 1, not -1"):
        request.append(-1)
    assert request.token_ids == [1]


def test_the_prompt_is_hashed_once_and_decoded_blocks_as_they_fill(counting: CountingHasher) -> None:
    request = Request("r", range(9))
    assert len(request.block_hashes(counting)) == 2
    request.block_hashes(counting)
    for token in range(3):
        request.append(token)
        request.block_hashes(counting)
    assert len(request.block_hashes(counting)) == 3
    assert counting.counts == [8, 4]
    assert request.block_hashes(counting) == HASHER.names(request.token_ids)


def test_a_block_that_is_encoded_already_gets_the_same_name() -> None:
    plain, keyed = Request("p", range(8)), Request("k", range(8), adapter=Adapter("a", "1"), cache_salt="s")
    for request in (plain, keyed):
        twin = Request("t", request.token_ids, adapter=request.adapter, cache_salt=request.cache_salt)
        request.block_hashes(HASHER)
        for token in range(4):
            request.append(token)
            twin.append(token)
        [code] = HASHER.encode(np.array([request.token_ids[-4:]]))
        assert request.block_hashes(HASHER, code) == twin.block_hashes(HASHER)


def test_an_equal_hasher_does_not_hash_again_and_another_does() -> None:
    request = Request("r", range(8))
    names = request.block_hashes(BlockHasher(4))
    assert request.block_hashes(BlockHasher(4)) is names
    assert request.block_hashes(BlockHasher(8)) == BlockHasher(8).names(range(8))
    assert request.block_hashes(BlockHasher(4, "seed")) == BlockHasher(4, "seed").names(range(8))
    assert request.block_hashes(BlockHasher(4)) == names


def test_a_salt_and_a_tenant_enter_the_first_block() -> None:
    tokens = range(12)
    salted, owned = Request("s", tokens, cache_salt="s"), Request("t", tokens, tenant="s")
    both = Request("b", tokens, tenant="t", cache_salt="s")
    assert salted.block_hashes(HASHER) == names_with_keys(tokens, (("cache_salt", "s"),))
    assert owned.block_hashes(HASHER) == names_with_keys(tokens, (("tenant", "s"),))
    assert both.block_hashes(HASHER) == names_with_keys(tokens, (("tenant", "t"), ("cache_salt", "s")))


def test_an_adapter_enters_every_block_decoded_ones_too() -> None:
    request = Request("r", range(7), adapter=Adapter("a", "1"))
    request.block_hashes(HASHER)
    for token in range(7, 12):
        request.append(token)
        request.block_hashes(HASHER)
    key = (("lora", "a", "1"),)
    assert request.block_hashes(HASHER) == names_with_keys(range(12), key, key, key)


def test_a_media_item_enters_the_blocks_that_it_overlaps() -> None:
    """Tokens 3 .. 8 and 9: blocks 0, 1 and 2; each key has the item's start as seen from the block's."""
    request = Request("r", range(16), media=[MediaItem("late", 9, 1), MediaItem("early", 3, 6)])
    keys = ((("mm", "early", 3),), (("mm", "early", -1),), (("mm", "early", -5), ("mm", "late", 1)))
    assert request.block_hashes(HASHER) == names_with_keys(range(16), *keys)


def test_keys_of_one_block_stand_in_vllm_order() -> None:
    request = Request(
        "r", range(4), cache_salt="s", tenant="t", adapter=Adapter("a", "1"), media=[MediaItem("m", 0, 4)]
    )
    keys = (("lora", "a", "1"), ("mm", "m", 0), ("tenant", "t"), ("cache_salt", "s"))
    assert request.block_hashes(HASHER) == names_with_keys(range(4), keys)


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_names_do_not_depend_on_when_they_are_asked_for(step: int) -> None:
    def request(tokens: Sequence[int]) -> Request:
        return Request("r", tokens, cache_salt="s", adapter=Adapter("a", "1"), media=[MediaItem("m", 2, 1)])

    grown = request(range(3))
    for token in range(3, 30):
        grown.append(token)
        if token % step == 0:
            grown.block_hashes(HASHER)
    assert grown.block_hashes(HASHER) == request(range(30)).block_hashes(HASHER)


def test_the_plain_name_leaves_the_keys_out() -> None:
    request = Request("r", range(9), cache_salt="s", adapter=Adapter("a", "1"))
    assert request.plain_name(HASHER) == HASHER.names(range(4))[0]
    assert Request("short", range(3)).plain_name(HASHER) is None


# -- what an encoder reads


def test_an_encoder_input_enters_every_block_decoded_ones_too() -> None:
    request = Request("r", range(7), encoder_input=EncoderInput("e", 5))
    request.block_hashes(HASHER)
    for token in range(7, 12):
        request.append(token)
        request.block_hashes(HASHER)
    key = (("encoder", "e"),)
    assert request.block_hashes(HASHER) == names_with_keys(range(12), key, key, key)
    assert (request.num_encoder_tokens, Request("r", [1]).num_encoder_tokens) == (5, 0)


def test_an_encoder_input_and_an_adapter_are_told_apart_by_their_kind() -> None:
    request = Request("r", range(4), adapter=Adapter("a", "1"), encoder_input=EncoderInput("e", 5), cache_salt="s")
    keys = (("lora", "a", "1"), ("encoder", "e"), ("cache_salt", "s"))
    assert request.block_hashes(HASHER) == names_with_keys(range(4), keys)


# -- rows that stand for tokens

ROWS = np.arange(24, dtype=np.float32).reshape(12, 2)
MIXED = [False] * 5 + [True] * 3 + [False] * 4
"""Of three blocks, the second has three rows."""


def names_of(rows: Any, choice: Sequence[bool], dtype: Any = np.float32) -> list[bytes]:
    return Request("r", range(12), prompt_embeds=embeds(rows, choice, dtype)).block_hashes(HASHER)


def num_shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    return [*map(bytes.__eq__, one, other), False].index(False)


def test_equal_rows_and_choices_give_equal_names() -> None:
    assert names_of(ROWS, MIXED) == names_of(ROWS.copy(), list(MIXED))
    assert names_of(np.asfortranarray(ROWS), MIXED) == names_of(ROWS, MIXED)
    assert names_of(np.repeat(ROWS, 2, axis=1)[:, ::2], MIXED) == names_of(ROWS, MIXED)


def test_a_prompt_with_rows_shares_nothing_with_one_without() -> None:
    plain = Request("p", range(12)).block_hashes(HASHER)
    for choice in ([False] * 12, MIXED, [True] * 12):
        assert not set(plain) & set(names_of(ROWS, choice))


def test_rows_that_are_not_taken_do_not_count() -> None:
    other = ROWS.copy()
    other[[0, 4, 8, 11]] = 99
    assert names_of(other, MIXED) == names_of(ROWS, MIXED)


@pytest.mark.parametrize(("at", "num_equal"), [(5, 1), (7, 1)])
def test_a_row_that_is_taken_counts_from_its_block_on(at: int, num_equal: int) -> None:
    other = ROWS.copy()
    other[at, 1] += 1
    assert num_shared(names_of(other, MIXED), names_of(ROWS, MIXED)) == num_equal


@pytest.mark.parametrize(("at", "num_equal"), [(0, 0), (4, 1), (5, 1), (11, 2)])
def test_the_choice_counts_from_its_block_on(at: int, num_equal: int) -> None:
    other = [chosen != (position == at) for position, chosen in enumerate(MIXED)]
    assert num_shared(names_of(ROWS, other), names_of(ROWS, MIXED)) == num_equal


def test_equal_rows_at_other_positions_are_another_input() -> None:
    """All rows are alike: only the choice tells the two apart."""
    rows = np.ones((12, 2), np.float32)
    one, other = [True, False] * 6, [False, True] * 6
    assert num_shared(names_of(rows, one), names_of(rows, other)) == 0


def test_equal_bytes_of_another_type_or_shape_are_another_input() -> None:
    zeros: list[Any] = [np.zeros((12, 4), np.float16), np.zeros((12, 2), np.float32), np.zeros((12, 2), np.int32)]
    names = [names_of(rows, [True] * 12, rows.dtype) for rows in zeros]
    assert len({own[0] for own in names}) == 3


def test_tokens_count_beside_rows() -> None:
    one = Request("r", range(12), prompt_embeds=embeds(ROWS, MIXED))
    other = Request("r", [*range(8), 99, *range(9, 12)], prompt_embeds=embeds(ROWS, MIXED))
    assert num_shared(one.block_hashes(HASHER), other.block_hashes(HASHER)) == 2


@pytest.mark.parametrize("num_prompt", [5, 7, 8])
def test_rows_end_with_the_prompt_and_decoded_blocks_follow(num_prompt: int) -> None:
    """The last block of the prompt is filled by outputs: it has the rows of the prompt; the next has none."""
    rows, choice = ROWS[:num_prompt], [True] * num_prompt
    grown = Request("r", range(num_prompt), prompt_embeds=embeds(rows, choice))
    grown.block_hashes(HASHER)
    for token in range(num_prompt, 16):
        grown.append(token)
        grown.block_hashes(HASHER)
    digest = embeds(rows, choice).digest
    keys = [(("prompt_embeds", digest(at, at + 4)),) for at in range(0, num_prompt, 4)]
    assert grown.block_hashes(HASHER) == names_with_keys(range(16), *keys)


def test_rows_stand_after_media_and_before_the_owner() -> None:
    given = embeds(ROWS[:4], [True] * 4)
    request = Request("r", range(4), prompt_embeds=given, media=[MediaItem("m", 1, 2)], tenant="t")
    keys = (("mm", "m", 1), ("prompt_embeds", given.digest(0, 4)), ("tenant", "t"))
    assert request.block_hashes(HASHER) == names_with_keys(range(4), keys)
