"""The turns of one chat: what was said, what is sent, and what each answer took.

Owns: the messages.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any

from kvpool.cli.console import Console, plain
from kvpool.cli.wrapped import Wrapped
from kvpool.client.answer import Answer, AnswerError
from kvpool.client.server import Server
from kvpool.errors import ConfigError

_CHAT = "/v1/chat/completions"
_HELP = """\
/reset      forget what was said
/salt TEXT  share cache entries only with those who send the same text; without TEXT with everybody
/help       this
/quit       end the chat, as Ctrl-D does
Ctrl-C      end an answer, and go on with the chat"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is."""

    url: str
    api_key: str | None = None
    socket: str | None = None

    def server(self) -> Server:
        """Not for longer than one event loop."""
        return Server(self.url, api_key=self.api_key, socket=self.socket)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one line."""

    ends: bool = False
    has_failed: bool = False
    is_cancelled: bool = False


class Chat:
    """Answers go to standard output, what is told of them to standard error."""

    def __init__(self, place: Place, system: str | None, salt: str | None, max_tokens: int, temperature: float) -> None:
        self._place = place
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)
        self._salt = salt
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._model = ""
        self._notes = Console(stderr=True, highlight=False)

    async def find_model(self, name: str | None) -> str:
        """What to ask for: `name`, or the first that the server has. ConfigError when it does not answer."""
        async with self._place.server() as server:
            try:
                names = await server.models()
            except AnswerError as error:
                raise ConfigError(str(error)) from None
        if name is not None and name not in names:
            raise ConfigError(f"{name} is not served at {self._place.url}: {', '.join(names[:8])} may be asked for")
        self._model = name or names[0]
        return self._model

    def take(self, line: str) -> Result:
        """A command, or a turn that is answered."""
        text = line.strip()
        if text.startswith("/"):
            return self._command(*text.partition(" ")[::2])
        return self._turn(text) if text else Result()

    def _command(self, name: str, rest: str) -> Result:
        match name:
            case "/quit" | "/exit":
                return Result(ends=True)
            case "/reset":
                self._messages = list(self._first)
                self._note("nothing was said yet")
            case "/salt":
                self._salt = rest.strip() or None
                self._note("cache entries are shared with the same salt only" if self._salt else "no salt")
            case "/help":
                self._note(_HELP)
            case _:
                self._note(f"{name} is no command here:\n{_HELP}")
                return Result(has_failed=True)
        return Result()

    def _turn(self, text: str) -> Result:
        """One answer. What was said stays said where at least a part of an answer came."""
        self._messages.append({"role": "user", "content": text})
        answer, pieces, result = Answer(), list[str](), Result()
        try:
            asyncio.run(self._ask(answer, pieces))
        except KeyboardInterrupt:
            result = Result(is_cancelled=True)
        except AnswerError as error:
            self._note(f"{error}")
            result = Result(has_failed=True)
        if pieces:
            self._messages.append({"role": "assistant", "content": "".join(pieces)})
        elif result.has_failed or result.is_cancelled:
            self._messages.pop()
        if not result.has_failed:
            self._note(facts(answer, self._notes.width, is_cancelled=result.is_cancelled))
        return result

    async def _ask(self, answer: Answer, pieces: list[str]) -> None:
        shown = _shown()
        try:
            async with self._place.server() as server:
                async for piece in server.stream(_CHAT, self._body(), answer):
                    pieces.append(piece)
                    shown.add(piece)
                    sys.stdout.flush()
        finally:
            shown.finish()
            sys.stdout.flush()

    def _body(self) -> bytes:
        fields: dict[str, Any] = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._salt is not None:
            fields["cache_salt"] = self._salt
        return json.dumps(fields).encode()

    def _note(self, text: str) -> None:
        self._notes.print(f"[dim]{plain_lines(text)}[/]")


def facts(answer: Answer, width: int, *, is_cancelled: bool = False) -> str:
    """What a turn took, in the longest words that fit into a line."""
    first_s = f"{answer.first_token_s:.2f} s" if answer.first_token_s is not None else "-"
    usage = answer.usage
    if usage is None:
        why = "cancelled" if is_cancelled else "no counts"
        return f"{why}, first token after {first_s}"
    cached = "-" if usage.num_cached is None else f"{usage.num_cached:,}"
    computed = "-" if usage.num_cached is None else f"{usage.num_prompt - usage.num_cached:,}"
    prompt, outputs = f"{usage.num_prompt:,}", f"{usage.num_outputs:,}"
    end = " (cut at --max-tokens)" if answer.finish == "length" else ""
    forms = (
        f"prompt {prompt} tokens: {cached} cached, {computed} computed; answer {outputs}{end}, first after {first_s}",
        f"{prompt} tokens: {cached} cached, {computed} computed; {outputs} out, first {first_s}",
        f"{cached} cached + {computed}, {outputs} out, {first_s}",
    )
    return next((form for form in forms if len(form) < width), forms[-1])


def plain_lines(text: str) -> str:
    """A text of ours or of a server's, line by line without markup."""
    return "\n".join(map(plain, text.split("\n")))


class _Piped:
    """Text for whoever reads the pipe: as it is, with a line's end behind it."""

    def add(self, text: str) -> None:
        sys.stdout.write(text)

    def finish(self) -> None:
        sys.stdout.write("\n")


def _shown() -> "Wrapped | _Piped":
    if not sys.stdout.isatty():
        return _Piped()
    return Wrapped(sys.stdout.write, Console().width)
