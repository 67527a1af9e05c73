"""What serving needs of a tokenizer, and the tokenizers of transformers seen that way.

Knows nothing of: requests, streams.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from kvpool.errors import RefusedError, UsageError

Message: TypeAlias = Mapping[str, Any]
"""A turn of a chat: `role`, `content`, and what else a template reads."""


class Tokenizer(Protocol):
    """Texts to token ids and back. Used on two threads at once, `encode` on one of them."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def eos_token_ids(self) -> Collection[int]:
        """The tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """RefusedError where that is more than any request may have."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text; U+FFFD for bytes that are no character, such as the first half of one."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, be it a part of a character."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The chat as the model was trained to see it, up to where it answers. UsageError where that cannot be."""


class TransformersTokenizer:
    """A tokenizer of transformers. `eos_token_ids` are those of the model, beside the tokenizer's own.

    `vocab_size`: ids that the model knows, where the tokenizer may have more. Texts that cannot have `max_tokens` or
    fewer, each token being as long as the longest, are refused before the work is done.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: Collection[int] = (),
        vocab_size: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.eos_token_ids: Collection[int] = frozenset([*own, *eos_token_ids])
        self.vocab_size = min(len(tokenizer), vocab_size or len(tokenizer))
        self._max_tokens = max_tokens
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._is_byte_level = "ByteLevel" in repr(decoder)
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._max_tokens is not None and len(text) > self._max_tokens * self._longest_token:
            raise RefusedError(
                f"the text has {len(text):,} letters, and the {self._max_tokens:,} tokens that a request may have are "
                f"{self._max_tokens * self._longest_token:,} letters at most: shorten it"
            )
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise UsageError("the model has no chat template: send its own prompt format to /v1/completions")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise UsageError(f"the model's chat template does not take these messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def _token_bytes(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        if self._is_byte_level and all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        return piece.replace("▁", " ").encode()


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
