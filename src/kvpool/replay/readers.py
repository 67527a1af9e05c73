"""Opening a trace of any known format: what it is, told from its first lines, and its requests as a stream.

Knows nothing of: what is done with the requests.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, TraceError
from kvpool.replay.chat import ChatParser, Tokenizer
from kvpool.replay.formats import (
    AZURE_COLUMNS,
    AzureParser,
    BailianParser,
    MooncakeParser,
    TauParser,
    TokensParser,
    columns,
)
from kvpool.replay.lines import BadLineError, Line, Reading, read_lines
from kvpool.replay.records import decoder, in_order
from kvpool.replay.sessions import SessionParser, merged
from kvpool.replay.trace import TraceRequest

# A bad line at the top must not hide what the trace is.
NUM_LINES_LOOKED_AT = 10


@dataclass(eq=False)
class Trace:
    """The requests of a trace file, in order of arrival.

    Can be iterated any number of times: each pass opens the file anew and holds no more of it than a line (of agent
    sessions: those that overlap in time). A pass raises TraceError at a bad line, or with `skip_bad` counts it in
    `num_skipped`, which starts at 0 with each pass. A trace can be pickled, if its tokenizer can.
    `block_size` is the number of tokens that a block id stands for; None when the format has no ids.
    """

    path: Path
    format: str
    block_size: int | None
    skip_bad: bool = False
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    session_gap_s: float = 60.0
    num_skipped: int = field(default=0, init=False)
    seed = None

    @property
    def name(self) -> str:
        """The name of the file, without its folder."""
        return self.path.name

    def __iter__(self) -> Iterator[TraceRequest]:
        self.num_skipped = 0
        requests = FORMATS[self.format].read(self, Reading(read_lines(self.path), self._reject))
        return self._not_empty(requests)

    def _reject(self, line: Line, error: BadLineError) -> None:
        if not self.skip_bad:
            way_out = "correct it, or pass --skip-bad (skip_bad=True) to count and skip such lines"
            raise TraceError(f"{self.path}:{line.number}: {error}; {way_out}") from error
        self.num_skipped += 1

    def _not_empty(self, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
        first = next(requests, None)
        if first is not None:
            yield first
            yield from requests
        elif self.num_skipped == 0:
            raise TraceError(f"{self.path}: holds no requests")


Read = Callable[[Trace, Reading], Iterator[TraceRequest]]


@dataclass(frozen=True, slots=True)
class Format:
    """How one format is told and read.

    A record is of the first format in `FORMATS` whose `marks` are all among its fields. `block_size` is what its ids
    stand for where the first record does not state a `block_size`; None when the format has no ids.
    """

    name: str
    marks: tuple[str, ...]
    block_size: int | None
    read: Read


def _one_a_line(parser: Callable[[int | None], Callable[[Line], TraceRequest]]) -> Read:
    """How to read a format with block ids, by the parser that is made from its block size."""
    return lambda trace, reading: reading.parsed(in_order(parser(trace.block_size)))


def _read_chat(trace: Trace, reading: Reading) -> Iterator[TraceRequest]:
    assert trace.tokenizer is not None, "open_trace refuses a chat trace without one"
    return reading.parsed(in_order(ChatParser(trace.tokenizer)))


def _read_sessions(trace: Trace, reading: Reading) -> Iterator[TraceRequest]:
    return merged(reading.parsed(SessionParser(trace.block_size, trace.session_gap_s)))


def _read_tokens(_trace: Trace, reading: Reading) -> Iterator[TraceRequest]:
    return reading.parsed(in_order(TokensParser()))


def _read_azure(_trace: Trace, reading: Reading) -> Iterator[TraceRequest]:
    header = next(reading.lines)
    return reading.parsed(in_order(AzureParser(header)))


FORMATS = {
    format.name: format
    for format in (
        Format("chat", ("messages",), None, _read_chat),
        Format("agent-sessions", ("requests", "block_size"), 64, _read_sessions),
        Format("token-ids", ("input_tok_ids",), None, _read_tokens),
        Format("bailian", ("chat_id",), 16, _one_a_line(BailianParser)),
        Format("tau", ("session_id", "turn", "input_length"), 16, _one_a_line(TauParser)),
        Format("mooncake", ("hash_ids",), 512, _one_a_line(MooncakeParser)),
        Format("azure-csv", AZURE_COLUMNS, None, _read_azure),
    )
}


def open_trace(
    path: str | Path,
    *,
    skip_bad: bool = False,
    tokenizer: Tokenizer | None = None,
    session_gap_s: float = 60.0,
) -> Trace:
    """The trace in a file, plain or gzip, whatever the file is called. TraceError when it cannot be read as one.

    `skip_bad`: count bad lines and go on. `tokenizer`: from messages to token ids; only chats need it.
    `session_gap_s`: between the starts of agent sessions, which do not say when they started.
    """
    if not 0 <= session_gap_s < inf:
        raise ConfigError(f"session_gap_s is {session_gap_s}: must be a finite number of seconds, 0 or more")
    path = Path(path)
    format, block_size = _recognised(path, _first_lines(path))
    if format.name == "chat" and tokenizer is None:
        way_out = "pass tokenizer=load_tokenizer(folder), on the command line --tokenizer FOLDER"
        raise TraceError(f"{path}: is a chat trace, and its text needs a tokenizer: {way_out}")
    return Trace(path, format.name, block_size, skip_bad, tokenizer, session_gap_s)


def _first_lines(path: Path) -> list[Line]:
    with closing(read_lines(path)) as lines:
        head = list(islice(lines, NUM_LINES_LOOKED_AT))
    if not head:
        raise TraceError(f"{path}: is empty; a trace has one record on each line")
    return head


def _recognised(path: Path, head: list[Line]) -> tuple[Format, int | None]:
    for record in map(_record_of, head):
        for format in FORMATS.values():
            if record.keys() >= set(format.marks):
                return format, _block_size(format, record)
    known = ", ".join(f"{format.name} ({' '.join(format.marks)})" for format in FORMATS.values())
    raise TraceError(f"{path}:{head[0].number}: unknown format: {_seen(head[0])}; known, by their fields: {known}")


def _record_of(line: Line) -> dict[str, Any]:
    """The fields of a line; the columns of the first if that is a CSV header, without values."""
    try:
        return _decode_object(line.text)
    except BadLineError:
        return dict.fromkeys(columns(line.text)) if line.number == 1 else {}


_decode_object = decoder(dict[str, Any])


def _block_size(format: Format, record: dict[str, Any]) -> int | None:
    stated = record.get("block_size")
    is_size = type(stated) is int and stated > 0
    return stated if format.block_size and is_size else format.block_size


def _seen(line: Line) -> str:
    try:
        fields = ", ".join(islice(_decode_object(line.text), 20))
    except BadLineError as error:
        return f"{line.text[:60]!r}: {error}"
    return f"a record with the fields {fields or '(none)'}"
