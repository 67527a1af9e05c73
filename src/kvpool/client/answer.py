"""One answer as it comes: its events, its text, its times, and what the server counted.

Knows nothing of: sockets.
"""

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from kvpool.errors import KVPoolError, MissingExtraError

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("msgspec", "client") from error

_DONE = b"[DONE]"
_MOST_LETTERS = 300


class AnswerError(KVPoolError):
    """A server that does not answer, or answers with an error. `status` is that of HTTP where there is one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server counted. `num_cached` is None where it does not say."""

    num_prompt: int
    num_outputs: int
    num_cached: int | None


@dataclass(slots=True)
class Answer:
    """Filled in as events come. All times are of the monotonic clock."""

    sent_s: float = field(default_factory=monotonic)
    piece_at_s: list[float] = field(default_factory=list)
    """When each piece of text came."""
    usage: Usage | None = None
    finish: str | None = None
    finished_s: float | None = None
    """When the server said that this is all: tokens without a text may have come behind the last piece."""

    @property
    def first_token_s(self) -> float | None:
        """From sending to the first text, or to the end of an answer without any."""
        first_s = self.piece_at_s[0] if self.piece_at_s else self.finished_s
        return None if first_s is None else first_s - self.sent_s

    @property
    def last_token_s(self) -> float | None:
        """From sending to the end."""
        last_s = self.finished_s or (self.piece_at_s[-1] if self.piece_at_s else None)
        return None if last_s is None else last_s - self.sent_s

    def take(self, data: bytes) -> str:
        """The text of an event. AnswerError when it is an error, or nothing that is known."""
        if data == _DONE:
            return ""
        try:
            chunk = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise AnswerError(f"the server sent an event that is no part of an answer: {error}") from None
        if chunk.error is not None:
            raise AnswerError(told(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage.plain()
        return "".join(self._text(choice) for choice in chunk.choices)

    def _text(self, choice: "_Choice") -> str:
        text = choice.text or (choice.delta.content if choice.delta else None) or ""
        if text:
            self.piece_at_s.append(monotonic())
        if choice.finish_reason:
            self.finish, self.finished_s = choice.finish_reason, monotonic()
        return text


def told(error: Any) -> str:
    """What an error says, in whichever form servers wrap it."""
    while isinstance(error, dict):
        error = next((error[name] for name in ("error", "message", "detail") if error.get(name)), str(error))
    text = " ".join(str(error).split())
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    def plain(self) -> Usage:
        details = self.prompt_tokens_details
        return Usage(self.prompt_tokens, self.completion_tokens or 0, details.cached_tokens if details else None)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)
