"""Coding-agent traces: one session a line, unpacked into one stream of requests.

A session counts its blocks and its seconds from its own start. Here each gets a range of ids of its own, and starts a
fixed gap after the one before, so sessions overlap. A sub-agent runs beside its session and shares the session's
blocks, so within a session, too, the order of the file is not the order of time.

Owns: the sessions that have started and not ended. Knows nothing of: files.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.replay.lines import BadLineError, Line
from kvpool.replay.records import BlockRecord, Record, check_lengths, check_time, decoder
from kvpool.replay.trace import TraceRequest


class Entry(BlockRecord, frozen=True, kw_only=True, rename={"num_prompt_tokens": "in", "num_output_tokens": "out"}):
    """A request, or a sub-agent: a list of requests whose `t` counts from the sub-agent's own."""

    t: float
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    requests: "list[Entry] | None" = None

    def check(self, block_size: int | None) -> None:
        """BadLineError unless it is a request whose lengths and ids can be true together."""
        if self.num_prompt_tokens is None or self.num_output_tokens is None:
            raise BadLineError("missing field `in` or `out`")
        check_lengths(self.num_prompt_tokens, self.num_output_tokens)
        self.check_ids(self.num_prompt_tokens, block_size)


class SessionRecord(Record, frozen=True, kw_only=True):
    id: str | int
    block_size: int
    requests: list[Entry]
    hash_id_scope: str = "local"


@dataclass(frozen=True, slots=True)
class Session:
    """A session in its place in the trace: `index`-th from 0, its ids above `id_shift`, requests in order of time."""

    record: SessionRecord
    index: int
    start_s: float
    id_shift: int
    requests: list[tuple[float, Entry]]

    def pending(self) -> "Iterator[Pending]":
        """Its requests, still packed, in order."""
        for turn, (time_s, entry) in enumerate(self.requests):
            yield Pending(self.start_s + time_s, self.index, turn, entry, self)


class Pending(NamedTuple):
    """A request that has not arrived yet. The first three fields order it, and no two share them."""

    arrival_s: float
    session_index: int
    turn: int
    entry: Entry
    session: Session

    def request(self) -> TraceRequest:
        record, entry = self.session.record, self.entry
        return TraceRequest(
            request_id=f"{record.id}/{self.turn}",
            arrival_s=self.arrival_s,
            num_prompt_tokens=entry.num_prompt_tokens or 0,
            num_output_tokens=entry.num_output_tokens or 0,
            block_ids=entry.ids(self.session.id_shift),
            tenant=entry.owner or record.owner,
            session=str(record.id),
            turn=self.turn,
        )


class SessionParser:
    """The parser of one file: a bad request makes its whole session, which is the line, bad."""

    def __init__(self, block_size: int | None, gap_s: float) -> None:
        self._block_size = block_size
        self._gap_s = gap_s
        self._decode = decoder(SessionRecord)
        self._seen: set[str] = set()
        self._id_end = 0

    def __call__(self, line: Line) -> Session:
        record = self._decode(line.text)
        self._check(record)
        requests = sorted(self._flattened(record.requests, 0.0), key=lambda request: request[0])
        return self._placed(record, requests)

    def _check(self, record: SessionRecord) -> None:
        if str(record.id) in self._seen:
            raise BadLineError(f"session {record.id} was given by an earlier line")
        if record.block_size != self._block_size:
            raise BadLineError(f"block_size is {record.block_size}, in a trace of {self._block_size}")
        if record.hash_id_scope != "local":
            raise BadLineError(f"hash_id_scope is {record.hash_id_scope!r}: only 'local' is known")

    def _flattened(self, entries: list[Entry], start_s: float) -> Iterator[tuple[float, Entry]]:
        for index, entry in enumerate(entries):
            try:
                check_time(entry.t)
                if entry.requests is None:
                    entry.check(self._block_size)
                    yield start_s + entry.t, entry
                else:
                    yield from self._flattened(entry.requests, start_s + entry.t)
            except BadLineError as error:
                raise BadLineError(f"requests[{index}]: {error}") from error

    def _placed(self, record: SessionRecord, requests: list[tuple[float, Entry]]) -> Session:
        index, id_shift = len(self._seen), self._id_end
        self._seen.add(str(record.id))
        self._id_end += max((entry.end() for _, entry in requests), default=0)
        return Session(record, index, index * self._gap_s, id_shift, requests)


def merged(sessions: Iterable[Session]) -> Iterator[TraceRequest]:
    """All requests in order of arrival, at equal times the earlier session first.

    Takes a session only when its start has come, and unpacks a request only when it is yielded.
    """
    pending: list[Pending] = []
    for session in sessions:
        while pending and pending[0].arrival_s <= session.start_s:
            yield heapq.heappop(pending).request()
        for request in session.pending():
            heapq.heappush(pending, request)
    while pending:
        yield heapq.heappop(pending).request()
