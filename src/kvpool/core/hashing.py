"""The name of a block's content: parent, tokens, extra keys.

name = SHA-256(canonical CBOR of [parent name, [token ids], extra keys or null]), byte for byte the digest that vLLM
calls `sha256_cbor`. The parent of a first block is the root, SHA-256(canonical CBOR of a text): the same in every
process, whatever PYTHONHASHSEED is.

Canonical CBOR (RFC 8949, section 4.2.1) writes every value in one way only, so two different inputs never encode alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from itertools import chain, islice, repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool._native import encode_blocks, hash_blocks, hash_encoded
from kvpool.errors import ConfigError, UsageError

ExtraKey: TypeAlias = "str | int | bytes | tuple[ExtraKey, ...]"
"""Whatever else changes what keys and values mean. Each key of a block is a tuple that begins with its kind."""

DEFAULT_SEED = "vllm-none-hash"

_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY = 0x00, 0x20, 0x40, 0x60, 0x80
_NULL = b"\xf6"
# An array of 3, the first of them 32 bytes.
_START = b"\x83\x58\x20"
_CODES_LIMIT = 1 << 20


def _cbor_head(kind: int, value: int) -> bytes:
    """A CBOR item's first bytes: its kind, and its value or length in the shortest form."""
    if value < 24:
        return bytes((kind | value,))
    for code, width in enumerate((1, 2, 4, 8), start=24):
        if value < 1 << (8 * width):
            return bytes((kind | code,)) + value.to_bytes(width, "big")
    raise UsageError(f"{value} does not fit into 64 bits")


def cbor(value: ExtraKey) -> bytes:
    """Canonical CBOR of text, an integer, bytes, or a tuple of these."""
    match value:
        case int():
            return _cbor_head(_UINT, value) if value >= 0 else _cbor_head(_NEGATIVE, -1 - value)
        case bytes():
            return _cbor_head(_BYTES, len(value)) + value
        case str():
            text = value.encode()
            return _cbor_head(_TEXT, len(text)) + text
        case tuple():
            return _cbor_head(_ARRAY, len(value)) + b"".join(map(cbor, value))
    raise UsageError(f"extra keys are text, integers, bytes and tuples of these, not {value!r}")


# The CBOR bytes of token id i stand at place i. A flat list is twice as fast as a dict here, since a vocabulary
# of them does not fit into the processor's nearest cache.
_codes: list[bytes] = []


def _grow_codes(highest: int) -> None:
    """Make room in `_codes` for a whole vocabulary around the token id `highest`.

    In one assignment of values that are always the same, so that threads that do it at once do not disturb each other.
    """
    start, stop = len(_codes), min(1 << highest.bit_length(), _CODES_LIMIT)
    _codes[start:stop] = [_cbor_head(_UINT, token_id) for token_id in range(start, stop)]


# Bytes of a code of each width, left-aligned in a cell of 5: which of them are used.
_USED = np.arange(5) < np.arange(6)[:, None]


@lru_cache(maxsize=1)
def _code_table_of(num_codes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    codes = _codes[:num_codes]
    cells = np.frombuffer(b"".join(code.ljust(5, b"\0") for code in codes), dtype=np.uint8).reshape(-1, 5)
    return cells, np.fromiter(map(len, codes), dtype=np.uint8, count=len(codes))


def _code_table(highest: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """`_codes` as arrays: uint8 cells of shape (codes, 5), and the width of each code."""
    if highest >= len(_codes):
        _grow_codes(highest)
    return _code_table_of(len(_codes))


def _encode_tokens(token_ids: Sequence[int]) -> Iterable[bytes]:
    """The CBOR bytes of each token id."""
    if token_ids and min(token_ids) < 0:
        raise UsageError(f"token ids are 0 or more, not {min(token_ids)}")
    try:
        return list(map(_codes.__getitem__, token_ids))
    except IndexError:
        return _encode_new_tokens(token_ids)


def _encode_new_tokens(token_ids: Sequence[int]) -> Iterable[bytes]:
    highest = max(token_ids)
    if highest >= _CODES_LIMIT:
        return list(map(_cbor_head, repeat(_UINT), token_ids))
    _grow_codes(highest)
    return map(_codes.__getitem__, token_ids)


@dataclass(frozen=True, slots=True)
class BlockHasher:
    """Names the full blocks of a token sequence. Two hashers of equal size and seed give equal names.

    Changing `seed` changes every name: caches, routers and stores that should understand each other need the same one.
    """

    block_size: int
    seed: str = DEFAULT_SEED
    root: bytes = field(init=False)
    _head: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}: a block holds at least 1 token, 16 is usual")
        object.__setattr__(self, "root", sha256(cbor(self.seed)).digest())
        object.__setattr__(self, "_head", _cbor_head(_ARRAY, self.block_size))

    def names(
        self,
        token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        parent: bytes | None = None,
        extra_keys: Iterable[tuple[ExtraKey, ...] | None] = (),
    ) -> list[bytes]:
        """The 32-byte names of the full blocks of `token_ids`, first to last; an unfilled end has none.

        `parent` names the block before the first (None: there is none). `extra_keys` has one entry a block, None or ()
        for a block without; blocks past its end have none. An array of int32 or int64 is hashed as it is. UsageError
        for tokens and keys that have no name.
        """
        before = self.root if parent is None else parent
        keys = islice(extra_keys, len(token_ids) // self.block_size)
        extras = [cbor(each) if each else None for each in keys]
        names = hash_blocks(token_ids, self.block_size, before, extras) if hash_blocks is not None else None
        return self._pure_names(token_ids, before, extras) if names is None else names

    def _pure_names(
        self, token_ids: Sequence[int] | npt.NDArray[np.integer[Any]], parent: bytes, extras: Sequence[bytes | None]
    ) -> list[bytes]:
        """The same in Python: the reference, and for token ids of more than 32 bits."""
        tokens = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        head, join = self._head, b"".join
        codes = repeat(iter(_encode_tokens(tokens)), self.block_size)
        ends = chain((extra or _NULL for extra in extras), repeat(_NULL))
        name, names = parent, []
        for block, end in zip(zip(*codes, strict=False), ends, strict=False):
            name = sha256(join((_START, name, head, *block, end))).digest()
            names.append(name)
        return names

    def name(self, block: bytes, parent: bytes | None, extra_keys: tuple[ExtraKey, ...] | None) -> bytes:
        """The name of one block whose tokens are encoded already."""
        extra = cbor(extra_keys) if extra_keys else None
        if hash_encoded is not None:
            return hash_encoded(block, self.block_size, parent or self.root, extra)
        return sha256(b"".join((_START, parent or self.root, self._head, block, extra or _NULL))).digest()

    def encode(self, blocks: npt.NDArray[np.int64]) -> list[bytes]:
        """The encoded tokens of many blocks at once, for `name`. int64, shape (blocks, block_size), all 0 or more."""
        codes = encode_blocks(blocks) if encode_blocks is not None else None
        return self._pure_encode(blocks) if codes is None else codes

    @staticmethod
    def _pure_encode(blocks: npt.NDArray[np.int64]) -> list[bytes]:
        if not blocks.size:
            return []
        highest = int(blocks.max())
        if highest >= _CODES_LIMIT:
            return [b"".join(_encode_tokens(block)) for block in blocks.tolist()]
        cells, widths = _code_table(highest)
        tokens = blocks.reshape(-1)
        width = widths.take(tokens)
        data = cells.take(tokens, axis=0)[_USED.take(width, axis=0)].tobytes()
        ends = width.reshape(blocks.shape).sum(axis=1, dtype=np.int64).cumsum().tolist()
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
