"""What the records of every trace format have in common: decoding, and the limits that their numbers keep.

Knows nothing of: any one format, files.
"""

from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import Annotated, Any, TypeVar

from kvpool.errors import MissingExtraError
from kvpool.replay.lines import BadLineError, Line
from kvpool.replay.trace import TraceRequest

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("msgspec", "replay") from error

T = TypeVar("T")

# Beyond any model. One absurd number in a line must not make its block ids fill the memory.
MAX_TOKENS = 100_000_000

# A digest of 128 bits; a name has room for that many and for the parts of a block.
MAX_ID = 1 << 128


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON object of a trace. Fields that a format does not name are ignored."""

    tenant: str | int | None = None
    user: str | int | None = None

    @property
    def owner(self) -> str | None:
        """Whose request it is: `tenant`, else `user`, else nobody's."""
        return text_or_none(self.user if self.tenant is None else self.tenant)


# Token ids are 0 or more, and travel in arrays of int64.
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

# Ids count from 0.
BlockIndex = Annotated[int, msgspec.Meta(ge=0)]


class BlockRecord(Record, frozen=True, kw_only=True):
    """A record with the ids of a prompt's blocks: `hash_ids` in full, else `hash_runs` packed as [first, count]."""

    hash_ids: list[BlockIndex] | None = None
    hash_runs: list[tuple[int, int]] | None = None

    def check_ids(self, num_tokens: int, block_size: int | None) -> None:
        """BadLineError unless there are as many ids as `num_tokens` have full, or started, blocks, each of them once.

        An id names a block and all before it, so a prompt cannot have it in two places. Expands nothing.
        """
        assert block_size is not None, "a trace with block ids has a block size"
        full, partial = num_tokens // block_size, -(-num_tokens // block_size)
        num_ids = self._num_ids()
        if num_ids not in (full, partial):
            wanted = f"{full}" if full == partial else f"{full} or {partial}"
            raise BadLineError(f"{num_ids} block ids for {num_tokens} tokens; blocks of {block_size} give {wanted}")
        if self.end() > MAX_ID:
            raise BadLineError(f"block id {self.end() - 1} is too large: at most 128 bits")
        repeated = self._repeated()
        if repeated is not None:
            raise BadLineError(f"block id {repeated} comes twice in one prompt; an id stands for all before it, too")

    def _repeated(self) -> int | None:
        """An id that comes twice, if any does."""
        if self.hash_ids is not None:
            if len(set(self.hash_ids)) == len(self.hash_ids):
                return None
            return next(block_id for block_id in self.hash_ids if self.hash_ids.count(block_id) > 1)
        runs = sorted(self.hash_runs or ())
        return next((after[0] for before, after in pairwise(runs) if after[0] < before[0] + before[1]), None)

    def ids(self, shift: int = 0) -> list[int]:
        """The ids in order, each moved up by `shift`."""
        if self.hash_ids is not None:
            return [block_id + shift for block_id in self.hash_ids] if shift else self.hash_ids
        expanded: list[int] = []
        for first, count in self.hash_runs or ():
            expanded.extend(range(first + shift, first + shift + count))
        return expanded

    def end(self) -> int:
        """One more than the largest id; 0 without ids."""
        if self.hash_ids is not None:
            return max(self.hash_ids, default=-1) + 1
        return max((first + count for first, count in self.hash_runs or ()), default=0)

    def _num_ids(self) -> int:
        if self.hash_ids is not None:
            return len(self.hash_ids)
        if self.hash_runs is not None:
            return _num_packed(self.hash_runs)
        raise BadLineError("missing field `hash_ids` (or `hash_runs`)")


def _num_packed(runs: list[tuple[int, int]]) -> int:
    for first, count in runs:
        if first < 0 or count < 1:
            raise BadLineError(f"run [{first}, {count}]: ids count from 0 and a run holds at least 1")
    return sum(count for _, count in runs)


def decoder(record: type[T]) -> Callable[[bytes], T]:
    """A function from JSON text to `record`; BadLineError when the text is not JSON or does not have that shape."""
    decode = msgspec.json.Decoder(record).decode

    def decoded(text: bytes) -> T:
        try:
            return decode(text)
        except msgspec.ValidationError as error:
            raise BadLineError(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadLineError(f"not JSON ({error})") from error

    return decoded


def check_lengths(num_prompt_tokens: int, num_output_tokens: int) -> None:
    """BadLineError unless there is a prompt, and neither number is absurd."""
    if not 1 <= num_prompt_tokens <= MAX_TOKENS:
        raise BadLineError(f"a prompt of {num_prompt_tokens} tokens: must be 1 to {MAX_TOKENS:,}")
    if not 0 <= num_output_tokens <= MAX_TOKENS:
        raise BadLineError(f"an output of {num_output_tokens} tokens: must be 0 to {MAX_TOKENS:,}")


def check_time(time_s: float) -> None:
    """BadLineError unless `time_s` is a number of seconds from a start."""
    if not 0 <= time_s < inf:
        raise BadLineError(f"a time of {time_s} s: must be a finite number, 0 or more")


def in_order(parse: Callable[[Line], TraceRequest]) -> Callable[[Line], TraceRequest]:
    """`parse` for the lines of one file, which also refuses a request that arrives before the one above it.

    A refused line leaves no trace: the next is compared with the last good one.
    """
    last_s: float | None = None

    def parsed(line: Line) -> TraceRequest:
        nonlocal last_s
        request = parse(line)
        arrival_s = request.arrival_s
        if last_s is not None and arrival_s < last_s:
            raise BadLineError(
                f"arrives at {arrival_s} s, after a request that arrives at {last_s} s: not in order of time"
            )
        check_time(arrival_s)
        last_s = arrival_s
        return request

    return parsed


def text_or_none(name: str | int | None) -> str | None:
    """A name as text, whichever way the trace wrote it. BadLineError when it is empty: nobody's has no name at all."""
    if name == "":
        raise BadLineError("the tenant or user is an empty text; leave it out where there is none")
    return None if name is None else str(name)


def json_text(value: Any) -> str:
    """Compact JSON."""
    return msgspec.json.encode(value).decode()
