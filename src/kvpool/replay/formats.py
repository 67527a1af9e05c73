"""The formats of one request a line. Each class is the parser of one file: made for one pass, called line by line.

Knows nothing of: how a format is recognised, whether bad lines are skipped.
"""

from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

from kvpool.replay.lines import BadLineError, Line
from kvpool.replay.records import BlockRecord, Record, TokenId, check_lengths, decoder
from kvpool.replay.trace import TraceRequest

T = TypeVar("T")


class LengthsAndIds(BlockRecord, frozen=True, kw_only=True):
    """What Mooncake, Bailian and tau records share. The unit of `timestamp` is the format's."""

    timestamp: float
    input_length: int
    output_length: int

    def check(self, block_size: int | None) -> None:
        """BadLineError unless lengths and ids can be true together."""
        check_lengths(self.input_length, self.output_length)
        self.check_ids(self.input_length, block_size)


class MooncakeParser:
    """Mooncake: milliseconds. A line has no name of its own, so its number is the request's."""

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size
        self._decode = decoder(LengthsAndIds)

    def __call__(self, line: Line) -> TraceRequest:
        record = self._decode(line.text)
        record.check(self._block_size)
        return TraceRequest(
            request_id=str(line.number),
            arrival_s=record.timestamp / 1000,
            num_prompt_tokens=record.input_length,
            num_output_tokens=record.output_length,
            block_ids=record.ids(),
            tenant=record.owner,
        )


class BailianRecord(LengthsAndIds, frozen=True, kw_only=True):
    chat_id: int
    parent_chat_id: int
    turn: int


class BailianParser:
    """Qwen-Bailian: seconds. A request is a chat; a session is named by the chat at the root of its parents."""

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size
        self._decode = decoder(BailianRecord)
        self._roots: dict[int, int] = {}

    def __call__(self, line: Line) -> TraceRequest:
        record = self._decode(line.text)
        record.check(self._block_size)
        return TraceRequest(
            request_id=str(record.chat_id),
            arrival_s=record.timestamp,
            num_prompt_tokens=record.input_length,
            num_output_tokens=record.output_length,
            block_ids=record.ids(),
            tenant=record.owner,
            session=str(self._root_of(record)),
            turn=record.turn,
        )

    def _root_of(self, record: BailianRecord) -> int:
        chat, parent = record.chat_id, record.parent_chat_id
        if chat in self._roots:
            raise BadLineError(f"chat_id {chat} was given to an earlier line")
        # A parent that the trace does not show still holds its children together.
        self._roots[chat] = chat if parent == -1 else self._roots.get(parent, parent)
        return self._roots[chat]


class TauRecord(LengthsAndIds, frozen=True, kw_only=True):
    session_id: str | int
    turn: int


class TauParser:
    """Turns of agent runs: seconds. A request is named by its session and turn."""

    def __init__(self, block_size: int | None) -> None:
        self._block_size = block_size
        self._decode = decoder(TauRecord)
        self._seen: set[str] = set()

    def __call__(self, line: Line) -> TraceRequest:
        record = self._decode(line.text)
        record.check(self._block_size)
        return TraceRequest(
            request_id=self._name(record),
            arrival_s=record.timestamp,
            num_prompt_tokens=record.input_length,
            num_output_tokens=record.output_length,
            block_ids=record.ids(),
            tenant=record.owner,
            session=str(record.session_id),
            turn=record.turn,
        )

    def _name(self, record: TauRecord) -> str:
        name = f"{record.session_id}/{record.turn}"
        if name in self._seen:
            raise BadLineError(f"turn {record.turn} of session {record.session_id} was given by an earlier line")
        self._seen.add(name)
        return name


class TokensRecord(Record, frozen=True, kw_only=True):
    input_toks: int
    output_toks: int
    arrival_time_ns: int
    input_tok_ids: list[TokenId]
    output_tok_ids: list[TokenId]


class TokensParser:
    """Token ids of prompt and output: nanoseconds."""

    def __init__(self) -> None:
        self._decode = decoder(TokensRecord)

    def __call__(self, line: Line) -> TraceRequest:
        record = self._decode(line.text)
        check_lengths(record.input_toks, record.output_toks)
        _check_num_tokens("input", record.input_toks, record.input_tok_ids)
        _check_num_tokens("output", record.output_toks, record.output_tok_ids)
        return TraceRequest(
            request_id=str(line.number),
            arrival_s=record.arrival_time_ns / 1e9,
            num_prompt_tokens=record.input_toks,
            num_output_tokens=record.output_toks,
            prompt_token_ids=record.input_tok_ids,
            output_token_ids=record.output_tok_ids,
            tenant=record.owner,
        )


def _check_num_tokens(side: str, stated: int, token_ids: list[int]) -> None:
    if stated != len(token_ids):
        raise BadLineError(f"{side}_toks is {stated}, but there are {len(token_ids)} {side}_tok_ids")


AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureParser:
    """Azure's CSV, below its header: dates and lengths, no content. Time counts from the first good row."""

    def __init__(self, header: Line) -> None:
        self._columns = columns(header.text)
        self._start: datetime | None = None

    def __call__(self, line: Line) -> TraceRequest:
        time, prompt, output = self._cells(line.text)
        arrival = _converted("TIMESTAMP", datetime.fromisoformat, time)
        num_prompt_tokens = _converted("ContextTokens", int, prompt)
        num_output_tokens = _converted("GeneratedTokens", int, output)
        check_lengths(num_prompt_tokens, num_output_tokens)
        return TraceRequest(str(line.number), self._since_start(arrival), num_prompt_tokens, num_output_tokens)

    def _cells(self, text: bytes) -> list[str]:
        cells = columns(text)
        if len(cells) != len(self._columns):
            raise BadLineError(f"{len(cells)} cells, where the header has {len(self._columns)}")
        return [cells[self._columns.index(column)] for column in AZURE_COLUMNS]

    def _since_start(self, arrival: datetime) -> float:
        self._start = self._start or arrival
        try:
            return (arrival - self._start).total_seconds()
        except TypeError as error:
            raise BadLineError("some rows have a time zone and some have none") from error


def columns(text: bytes) -> list[str]:
    """The cells of a CSV row whose cells hold no commas."""
    return [cell.strip(' "') for cell in text.decode(errors="replace").split(",")]


def _converted(column: str, convert: Callable[[str], T], cell: str) -> T:
    try:
        return convert(cell)
    except ValueError as error:
        raise BadLineError(f"{column} is {cell!r}: {error}") from error
