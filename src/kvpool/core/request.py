"""What the cache must know of a request: its tokens, whatever else changes their meaning, and its blocks' names.

Owns: the tokens and the names already computed from them.
Knows nothing of: blocks, scheduling, time.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvpool.core.hashing import BlockHasher, ExtraKey
from kvpool.errors import UsageError
from kvpool.types import BlockHash, RequestId


def require_token_ids(token_ids: Sequence[int]) -> None:
    """UsageError that names the first of these that is no token id: a whole number of 0 .. 2**63 - 1."""
    if not _are_token_ids(token_ids):
        wrong = next(token_id for token_id in token_ids if not _are_token_ids((token_id,)))
        raise UsageError(f"token ids are whole numbers of 0 .. 2**63 - 1, not {wrong!r}")


def _are_token_ids(token_ids: Sequence[int]) -> bool:
    try:
        numbers = np.frombuffer(array("q", token_ids), dtype=np.int64)
    except (TypeError, OverflowError):
        return False
    return bool(numbers.min(initial=0) >= 0)


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

    num_preemptions: int
    max_tokens: int | None
    """The most tokens that will be appended; None: not known. A scheduler sets it to what fits."""

    def block_hashes(self, hasher: BlockHasher, next_block: bytes | None = None, /) -> Sequence[BlockHash]:
        """The names of all full blocks so far, each hashed once.

        `next_block` may be given when exactly one has no name yet: its tokens, as `hasher.encode` gives them.
        """

    def plain_name(self, hasher: BlockHasher, /) -> BlockHash | None:
        """The first block's name if the request had no extra keys; None when it is not full or not known."""


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


class Request:
    """A prompt and the tokens appended to it.

    `cache_salt` and `tenant` each keep the request apart from all requests with another one or none: `tenant` is for
    who was authenticated, `cache_salt` for what a client may choose to narrow that further. `adapter` and `media` enter
    the names of the blocks they touch. With `reads_cache` False nothing is taken from the cache, though full blocks
    are still added to it (prompt log-probabilities need every position computed). `max_tokens` is the most tokens that
    will be appended, which lets a scheduler refuse at once what can never fit.

    Tokens are hashed when a cache first asks, or earlier and on any thread by `block_hashes(cache.hasher)`; each block
    once.
    """

    __slots__ = (
        "_hasher", "_is_keyed", "_names", "adapter", "cache_salt", "max_tokens", "media", "num_preemptions",
        "num_prompt_tokens", "reads_cache", "request_id", "tenant", "token_ids",
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
        reads_cache: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = self._whole_numbers(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.adapter = adapter
        self.media = tuple(sorted(media, key=lambda item: item.offset))
        self.reads_cache = reads_cache
        self.max_tokens = max_tokens
        self.num_preemptions = 0
        # Whether blocks after the first can have extra keys.
        self._is_keyed = adapter is not None or bool(media)
        self._hasher: BlockHasher | None = None
        self._names: list[bytes] = []
        self._validate()

    def _whole_numbers(self, token_ids: Iterable[int]) -> list[int]:
        if isinstance(token_ids, bytes | bytearray | str):
            raise UsageError(f"request {self.request_id!r}: its prompt is {type(token_ids).__name__}, not token ids")
        try:
            return array("q", token_ids).tolist()
        except (TypeError, OverflowError) as error:
            raise UsageError(
                f"request {self.request_id!r}: token ids are whole numbers of 0 .. 2**63 - 1 ({error})"
            ) from None

    def _validate(self) -> None:
        who = f"request {self.request_id!r}"
        if not self.token_ids:
            raise UsageError(f"{who} has an empty prompt: at least 1 token is needed to compute logits from")
        if min(self.token_ids) < 0:
            raise UsageError(f"{who} has the token id {min(self.token_ids)}: token ids are 0 or more")
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

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and appended ones."""
        return len(self.token_ids)

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

    def append(self, token_id: int) -> None:
        """The request grows by one token."""
        if type(token_id) is not int or not 0 <= token_id < 1 << 63:
            require_token_ids((token_id,))
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

    def plain_name(self, hasher: BlockHasher) -> bytes | None:
        """The name of the first block as if the request had no extra keys; None while it is not full."""
        first = hasher.names(self.token_ids[: hasher.block_size])
        return first[0] if first else None

    def _extra_keys(self, first: int, stop: int, size: int) -> Iterator[tuple[ExtraKey, ...]]:
        """The extra keys of each of blocks first .. stop - 1; ends where no further block can have any."""
        last = stop * size if self.adapter else max((i.offset + i.length for i in self.media), default=1)
        for at in range(first * size, min(stop * size, last), size):
            yield (*self._adapter_keys(), *self._media_keys(at, at + size), *(self._owner_keys() if at == 0 else ()))

    def _adapter_keys(self) -> Iterator[ExtraKey]:
        if self.adapter:
            yield ("lora", self.adapter.name, self.adapter.unique_id)

    def _media_keys(self, start: int, stop: int) -> Iterator[ExtraKey]:
        for item in self.media:
            if item.offset < stop and item.offset + item.length > start:
                yield ("mm", item.identifier, item.offset - start)

    def _owner_keys(self) -> Iterator[ExtraKey]:
        if self.tenant is not None:
            yield ("tenant", self.tenant)
        if self.cache_salt is not None:
            yield ("cache_salt", self.cache_salt)
