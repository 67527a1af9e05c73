"""Text as tokens come: whole characters, right spaces, nothing lost, and the same as decoding all at once."""

import random
from typing import Any

import pytest
from tests.serving.toy import ByteTokenizer
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvpool.errors import RefusedError
from kvpool.serving.choice import Choice, completion_logprobs
from kvpool.serving.detokenizer import Detokenizer
from kvpool.serving.stream import Output
from kvpool.serving.tokenizer import TransformersTokenizer

TEXTS = [
    "plain words, and some more of them",
    "naïve café",
    "日本語のテキスト",
    "👩‍👩‍👧 family 🎉",
    "a\n\n  b\tc",
    "ẞ€𝄞",
]


def pieces_of(tokenizer: Any, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*map(detokenizer.add, ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_become_whole_characters(text: str) -> None:
    pieces = pieces_of(ByteTokenizer(), list((text * 5).encode()))
    assert "".join(pieces) == text * 5
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_the_prompt_begins_is_told_whole() -> None:
    start, *rest = "€ and so on".encode()
    assert "".join(pieces_of(ByteTokenizer(), rest, [*b"for 1 ", start])) == "€ and so on"


def test_what_never_becomes_whole_is_told_in_the_end() -> None:
    assert pieces_of(ByteTokenizer(), [*b"ab", 0xE2, 0x82]) == ["a", "b", "", "", "\ufffd"]


def test_broken_bytes_do_not_hold_the_text_back_for_good() -> None:
    pieces = pieces_of(ByteTokenizer(), [0xFF] * 200 + list(b"end"))
    assert "".join(pieces) == "\ufffd" * 200 + "end"


def spaced() -> TransformersTokenizer:
    """Words as SentencePiece has them, and bytes for all else, as Llama's first vocabularies have it."""
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁hello",
        "▁world",
        "ly",
        "▁a",
        ",",
        ".",
    ]
    fast = Fast(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", unk_token="<unk>"))


def test_words_keep_their_spaces_and_bytes_are_joined(rng: random.Random) -> None:
    tokenizer = spaced()
    words = [
        [258],
        [259],
        [260],
        [261],
        [262],
        [263],
        [264],
        *([byte + 2 for byte in text.encode()] for text in "é€🎉"),
    ]
    for _ in range(200):
        ids = [token_id for word in rng.choices(words, k=30) for token_id in word]
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


def test_the_first_word_after_a_prompt_has_its_space() -> None:
    assert pieces_of(spaced(), [260], [259]) == [" world", ""]
    assert pieces_of(spaced(), [260]) == ["world", ""]


def test_tokens_of_byte_fallback_are_told_as_bytes() -> None:
    tokenizer = spaced()
    assert [tokenizer.token_bytes(token_id) for token_id in (2 + 0xE2, 259, 1)] == [b"\xe2", b" hello", b"</s>"]
    assert tokenizer.eos_token_ids == {1}


def byte_level() -> TransformersTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    return TransformersTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>"))


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_vocabularies(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert pieces_of(tokenizer, [*ids, 256])[-2:] == ["", ""]


def test_a_text_that_cannot_fit_is_refused_before_it_is_cut_into_tokens() -> None:
    """The longest token has a letter for each of its bytes, or the name of a special one."""
    tokenizer = TransformersTokenizer(byte_level()._tokenizer, max_tokens=10)
    assert len(tokenizer.encode("x" * 50)) == 50
    with pytest.raises(RefusedError, match=r"51 letters, and the 10 tokens .* 50 letters at most"):
        tokenizer.encode("x" * 51)


def test_ids_that_the_model_lacks_are_not_known() -> None:
    assert TransformersTokenizer(byte_level()._tokenizer, vocab_size=99).vocab_size == 99
    assert TransformersTokenizer(byte_level()._tokenizer, vocab_size=9999).vocab_size == 257


@pytest.mark.parametrize("text", TEXTS)
def test_where_tokens_begin_is_the_same_piece_by_piece(text: str) -> None:
    """A letter that several tokens make up counts with the last of them."""
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    choice, offsets = Choice(tokenizer, [], []), []
    for token_id in ids:
        choice.take(Output(0, token_id, None, None))
        offsets.append(choice.num_letters)
    assert offsets == completion_logprobs(tokenizer, [None] * len(ids), ids, 0)["text_offset"]
    assert offsets == [len(text.encode()[:at].decode(errors="ignore")) for at in range(len(ids))]
