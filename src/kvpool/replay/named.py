"""A request whose blocks a trace has named already: nothing is hashed, and no token is needed.

Owns: the names of one request's blocks, at the cache's block size.
Knows nothing of: the cache.

A trace's id names a block and all before it, as a hash of ours does. So ids stand for names as they are; a smaller
block is a numbered part of the trace's block, a larger one has the name of its last part. Blocks that the trace does
not name (outputs, the unfilled end of a prompt) get names that no other request has: negative numbers.
"""

from array import array
from collections.abc import Sequence

from kvpool.core.hashing import BlockHasher
from kvpool.core.late import Keeper, written_late
from kvpool.errors import ConfigError, UsageError
from kvpool.limits import SHORT_NAME_BYTES
from kvpool.types import BlockHash, RequestId

_BLOCKS_PER_REQUEST = 1 << 40
_TOKEN_MASK = (1 << 20) - 1


def names_at(block_ids: Sequence[int], trace_block_size: int, block_size: int) -> Sequence[BlockHash]:
    """The names of consecutive blocks of `block_size` tokens, where `block_ids` name blocks of `trace_block_size`."""
    if block_size == trace_block_size:
        return _fitting(block_ids)
    if trace_block_size % block_size == 0:
        parts = trace_block_size // block_size
        return _fitting([block_id * parts + part for block_id in block_ids for part in range(parts)])
    if block_size % trace_block_size == 0:
        joined = block_size // trace_block_size
        return _fitting(block_ids[joined - 1 :: joined])
    nearest = max(d for d in range(1, block_size + 1) if trace_block_size % d == 0)
    raise ConfigError(
        f"block_size is {block_size}, and the trace names blocks of {trace_block_size} tokens: one must divide the "
        f"other; {nearest} or {trace_block_size} work"
    )


def _fitting(numbers: Sequence[int]) -> Sequence[BlockHash]:
    """The same where all have 64 bits, as they do in all but a few traces."""
    try:
        array("q", numbers)
    except OverflowError:
        return [
            number if -1 << 63 <= number < 1 << 63 else number.to_bytes(SHORT_NAME_BYTES, "big", signed=True)
            for number in numbers
        ]
    return numbers


@written_late("_token_ids")
class NamedRequest:
    """A prompt of `num_prompt_tokens` tokens; `names` are those of its first blocks, each of `block_size` tokens.

    `serial` tells requests apart.
    """

    __slots__ = (
        "_block_size", "_names", "_serial", "_token_ids",
        "keeper", "max_tokens", "num_preemptions", "num_prompt_tokens", "request_id",
    )  # fmt: skip

    reads_cache = True
    num_encoder_tokens = 0

    def __init__(
        self,
        request_id: RequestId,
        num_prompt_tokens: int,
        names: Sequence[BlockHash],
        block_size: int,
        *,
        serial: int,
        max_tokens: int | None = None,
    ) -> None:
        if num_prompt_tokens < 1:
            raise UsageError(f"request {request_id!r} has {num_prompt_tokens} prompt tokens: at least 1")
        self.request_id = request_id
        self.keeper: Keeper | None = None
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.num_preemptions = 0
        self._serial = serial
        self._block_size = block_size
        self._names: list[BlockHash] = list(names)
        self._token_ids: list[int] | None = None
        self._name_blocks(num_prompt_tokens // block_size)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens if self._token_ids is None else len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Stand-ins, made when first asked for: equal where the names are equal, and nowhere else."""
        if self._token_ids is None:
            self._token_ids = self._stand_ins()
        return self._token_ids

    def _stand_ins(self) -> list[int]:
        """One number for all tokens of a block: whoever mixes in the position tells any two of them apart."""
        tokens: list[int] = []
        for name in self._names:
            tokens += [hash((name, self._block_size)) & _TOKEN_MASK] * self._block_size
        own = hash((self._serial, -1)) & _TOKEN_MASK
        return tokens + [own] * (self.num_prompt_tokens - len(tokens))

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def block_hashes(self, _hasher: BlockHasher, _next_block: bytes | None = None, /) -> list[BlockHash]:
        """The trace's names, then one of its own for every further full block."""
        if self._token_ids is not None:
            self._name_blocks(len(self._token_ids) // self._block_size)
        return self._names

    def _name_blocks(self, num_full: int) -> None:
        names = self._names
        if num_full > len(names):
            first_own = -1 - self._serial * _BLOCKS_PER_REQUEST
            names += _fitting([first_own - block for block in range(len(names), num_full)])

    def plain_name(self, _hasher: BlockHasher, _num_blocks: int = 1, /) -> BlockHash | None:
        return None
