"""What the cache must know of a request: its tokens, whatever else changes their meaning, and its blocks' names.

Owns: the tokens and the names already computed from them.
Knows nothing of: blocks, scheduling, time.
"""

import hashlib
import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.core.hashing import BlockHasher, ExtraKey, cbor
from kvpool.core.late import Keeper, written_late
from kvpool.errors import UsageError
from kvpool.types import BlockHash, RequestId


def plain_ids(token_ids: Iterable[int]) -> list[int]:
    """Token ids as plain numbers. UsageError that names the first that is none: a whole number of 0 .. 2**63 - 1."""
    if isinstance(token_ids, bytes | bytearray | str):
        raise UsageError(f"{type(token_ids).__name__} is given for token ids: whole numbers, one for each token")
    try:
        if isinstance(token_ids, np.ndarray) and token_ids.dtype.kind in "iu":
            token_ids = token_ids.tolist()
        given = token_ids if isinstance(token_ids, list | tuple) else list(token_ids)
    except (TypeError, NotImplementedError):  # as of a memoryview of several axes
        raise UsageError(f"token ids are whole numbers, one for each token, not {token_ids!r}") from None
    try:
        numbers = array("q", given)
    except (TypeError, OverflowError):
        numbers = array("q")
    if len(numbers) == len(given) and (not numbers or np.frombuffer(numbers, np.int64).min() >= 0):
        return numbers.tolist()
    raise UsageError(f"token ids are whole numbers of 0 .. 2**63 - 1, not {_first_wrong(given)!r}")


def _first_wrong(given: Sequence[object]) -> object:
    for token_id in given:
        try:
            if not 0 <= operator.index(token_id) < 1 << 63:  # type: ignore[arg-type]
                return token_id
        except TypeError:
            return token_id
    return given


class RequestLike(Protocol):
    """What the cache and the scheduler read of a request. `Request` is one; the replay has one named by a trace.

    It compares by identity, and `token_ids` is the same list for all its life.
    """

    @property
    def request_id(self) -> RequestId: ...
    @property
    def token_ids(self) -> list[int]:
        """Prompt tokens and appended ones; a new token is appended to this list."""

    @property
    def num_tokens(self) -> int:
        """The length of `token_ids`."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def reads_cache(self) -> bool: ...
    @property
    def num_encoder_tokens(self) -> int:
        """What cross attention keeps of it; 0 without an encoder."""

    num_preemptions: int
    max_tokens: int | None
    """The most tokens that will be appended; None: not known. A scheduler sets it to what fits."""

    def block_hashes(self, hasher: BlockHasher, next_block: bytes | None = None, /) -> Sequence[BlockHash]:
        """The names of all full blocks so far, each hashed once.

        `next_block` may be given when exactly one has no name yet: its tokens, as `hasher.encode` gives them.
        """

    def plain_name(self, hasher: BlockHasher, num_blocks: int = 1, /) -> BlockHash | None:
        """The name of block `num_blocks` if the request had no extra keys; None when it is not full or not known."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. `unique_id` tells two adapters of the same name apart: its path, a digest, a number as text."""

    name: str
    unique_id: str


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A picture, sound or other item whose placeholder tokens stand at offset .. offset + length - 1 of the prompt.

    `identifier` is a digest of its content, used whole: two items that share it share cache entries.
    """

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """What an encoder reads (sound, a text to be translated), and how many tokens it makes of it.

    `identifier` is a digest of its content, used whole. It enters the name of every block: what the decoder keeps
    depends on it from the first token on.
    """

    identifier: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Rows of numbers that stand for tokens of the prompt.

    `rows`: shape (prompt tokens, hidden size), any dtype; `is_embedded`: bool, shape (prompt tokens,), whether the row
    is taken at that position; the token id counts where it is not. Rows and choice enter the names of all blocks of the
    prompt, even of those that are only ids: a prompt with rows shares nothing with one without.
    """

    rows: npt.NDArray[Any]
    is_embedded: npt.NDArray[np.bool_]

    def digest(self, start: int, stop: int) -> str:
        """Of what stands at positions start .. stop - 1: SHA-256 over the choice, shape, dtype and the rows taken."""
        chosen = np.ascontiguousarray(self.is_embedded[start:stop], dtype=np.bool_)
        rows = np.ascontiguousarray(self.rows[start:stop][chosen])
        head = f"{rows.dtype.str} {rows.shape} {len(chosen)} "
        return hashlib.sha256(head.encode() + chosen.tobytes() + rows.tobytes()).hexdigest()


@written_late("token_ids")
class Request:
    """A prompt and the tokens appended to it.

    `cache_salt` and `tenant` each keep the request apart from all requests with another one or none: `tenant` is for
    who was authenticated, `cache_salt` for what a client may choose to narrow that further. `adapter`, `media`,
    `prompt_embeds` and `encoder_input` enter the names of the blocks they touch. With `reads_cache` False nothing is
    taken from the cache, though full blocks are still added to it (prompt log-probabilities need every position
    computed). `max_tokens` is the most tokens that will be appended, which lets a scheduler refuse at once what can
    never fit.

    Tokens are hashed when a cache first asks, or earlier and on any thread by `block_hashes(cache.hasher)`; each block
    once.
    """

    __slots__ = (
        "_hasher", "_is_keyed", "_names", "adapter", "cache_salt", "encoder_input", "keeper", "max_tokens", "media",
        "num_preemptions", "num_prompt_tokens", "prompt_embeds", "reads_cache", "request_id", "tenant", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: RequestId,
        prompt_token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        adapter: Adapter | None = None,
        media: Sequence[MediaItem] = (),
        prompt_embeds: PromptEmbeds | None = None,
        encoder_input: EncoderInput | None = None,
        reads_cache: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.keeper: Keeper | None = None
        """The batch that writes down its tokens when they are read, if there is one."""
        self.token_ids = self._plain_ids(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.adapter = adapter
        self.media = tuple(sorted(media, key=lambda item: item.offset))
        self.prompt_embeds = prompt_embeds
        self.encoder_input = encoder_input
        self.reads_cache = reads_cache
        self.max_tokens = max_tokens
        self.num_preemptions = 0
        # Whether blocks after the first can have extra keys.
        self._is_keyed = any((adapter, media, prompt_embeds, encoder_input))
        self._hasher: BlockHasher | None = None
        self._names: list[bytes] = []
        self._validate()

    def _plain_ids(self, token_ids: Iterable[int]) -> list[int]:
        try:
            return plain_ids(token_ids)
        except UsageError as error:
            raise UsageError(f"request {self.request_id!r}: {error}") from None

    def _validate(self) -> None:
        who = f"request {self.request_id!r}"
        if not self.token_ids:
            raise UsageError(f"{who} has an empty prompt: at least 1 token is needed to compute logits from")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"{who} has max_tokens {self.max_tokens}: at least 1, or None for as many as fit")
        for word, key in self._texts():
            if not key:
                raise UsageError(f"{who} has an empty {word}: give a text of its own, or None to share with everyone")
            try:
                key.encode()
            except UnicodeEncodeError as error:
                raise UsageError(f"{who}: its {word} {key!r} is no valid text ({error.reason})") from None
        for item in self.media:
            if item.offset < 0 or item.length < 1 or item.offset + item.length > self.num_tokens:
                raise UsageError(f"{who}: {item} lies outside its prompt of {self.num_tokens} tokens")
        if self.encoder_input is not None and self.encoder_input.num_tokens < 1:
            raise UsageError(f"{who} has an encoder input of {self.encoder_input.num_tokens} tokens: at least 1")
        if self.prompt_embeds is not None:
            self._validate_embeds(who, self.prompt_embeds)

    def _validate_embeds(self, who: str, embeds: PromptEmbeds) -> None:
        rows, choice = embeds.rows.shape, embeds.is_embedded.shape
        if len(rows) != 2 or rows[0] != self.num_prompt_tokens or choice != (self.num_prompt_tokens,):
            raise UsageError(
                f"{who} has {self.num_prompt_tokens} prompt tokens, rows of shape {rows}, a choice of shape {choice}: "
                f"({self.num_prompt_tokens}, hidden size) and ({self.num_prompt_tokens},) are needed"
            )

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and appended ones."""
        return len(self.token_ids)

    @property
    def num_encoder_tokens(self) -> int:
        """What cross attention keeps of it; 0 without an encoder."""
        return self.encoder_input.num_tokens if self.encoder_input is not None else 0

    def _texts(self) -> Iterator[tuple[str, str]]:
        """All that enters a name as text, and what it is."""
        if self.cache_salt is not None:
            yield "cache_salt", self.cache_salt
        if self.tenant is not None:
            yield "tenant", self.tenant
        if self.adapter is not None:
            yield from (("adapter name", self.adapter.name), ("adapter id", self.adapter.unique_id))
        for item in self.media:
            yield "media identifier", item.identifier
        if self.encoder_input is not None:
            yield "encoder input", self.encoder_input.identifier

    def append(self, token_id: int) -> None:
        """The request grows by one token."""
        if type(token_id) is not int or not 0 <= token_id < 1 << 63:
            token_id = self._plain_ids((token_id,))[0]
        self.token_ids.append(token_id)

    def block_hashes(self, hasher: BlockHasher, next_block: bytes | None = None, /) -> list[bytes]:
        """The names of all full blocks so far. The list grows with the request; do not change it.

        `next_block` may be given when exactly one has no name yet: its tokens, as `hasher.encode` gives them.
        """
        if self._hasher is not hasher and self._hasher != hasher:
            self._hasher, self._names = hasher, []
        names = self._names
        first, stop = len(names), len(self.token_ids) // hasher.block_size
        if first == stop:
            return names
        parent = names[first - 1] if first else None
        # Threads that hash the same request at once write the same names to the same places.
        if next_block is not None and stop - first == 1:
            keys = next(self._extra_keys(first, stop, hasher.block_size), None) if self._is_keyed or not first else None
            names[first:stop] = (hasher.name(next_block, parent, keys),)
        else:
            names[first:stop] = self._names_of(hasher, first, stop, parent)
        return names

    def _names_of(self, hasher: BlockHasher, first: int, stop: int, parent: bytes | None) -> list[bytes]:
        """The names of blocks first .. stop - 1, which follow the block named `parent`."""
        size = hasher.block_size
        keys = self._extra_keys(first, stop, size) if self._is_keyed or not first else ()
        return hasher.names(self.token_ids[first * size : stop * size], parent, keys)

    @property
    def has_own_names(self) -> bool:
        """Whether its blocks are named after its tokens and keys, as here; a subclass may name them otherwise."""
        return type(self).block_hashes is Request.block_hashes and type(self)._extra_keys is Request._extra_keys

    def common_keys(self) -> tuple[int, bytes | None]:
        """Blocks that begin at this token or later all have the same extra keys, and these keys in CBOR."""
        keys = (*self._adapter_keys(), *self._encoder_keys())
        return max(self._end_of_keys(), 1), cbor(keys) if keys else None

    def plain_name(self, hasher: BlockHasher, num_blocks: int = 1, /) -> bytes | None:
        """The name of block `num_blocks` as if the request had no extra keys; None while it is not full."""
        names = hasher.names(self.token_ids[: num_blocks * hasher.block_size])
        return names[-1] if len(names) == num_blocks else None

    def _extra_keys(self, first: int, stop: int, size: int) -> Iterator[tuple[ExtraKey, ...]]:
        """The extra keys of each of blocks first .. stop - 1; ends where no further block can have any."""
        last = stop * size if self.adapter or self.encoder_input else self._end_of_keys()
        for at in range(first * size, min(stop * size, last), size):
            keys = (*self._adapter_keys(), *self._encoder_keys(), *self._media_keys(at, at + size))
            yield (*keys, *self._embeds_keys(at, at + size), *(self._owner_keys() if at == 0 else ()))

    def _end_of_keys(self) -> int:
        """The first token that has no key of its own, nor any after it."""
        embedded = self.num_prompt_tokens if self.prompt_embeds is not None else 1
        return max([embedded, *(item.offset + item.length for item in self.media)])

    def _adapter_keys(self) -> Iterator[ExtraKey]:
        if self.adapter:
            yield ("lora", self.adapter.name, self.adapter.unique_id)

    def _encoder_keys(self) -> Iterator[ExtraKey]:
        if self.encoder_input is not None:
            yield ("encoder", self.encoder_input.identifier)

    def _embeds_keys(self, start: int, stop: int) -> Iterator[ExtraKey]:
        if self.prompt_embeds is not None and start < self.num_prompt_tokens:
            yield ("prompt_embeds", self.prompt_embeds.digest(start, stop))

    def _media_keys(self, start: int, stop: int) -> Iterator[ExtraKey]:
        for item in self.media:
            if item.offset < stop and item.offset + item.length > start:
                yield ("mm", item.identifier, item.offset - start)

    def _owner_keys(self) -> Iterator[ExtraKey]:
        if self.tenant is not None:
            yield ("tenant", self.tenant)
        if self.cache_salt is not None:
            yield ("cache_salt", self.cache_salt)
