"""`kvpool chat`: a chat in a terminal, or a line a turn through a pipe, that tells what each turn took."""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from kvpool.cli.chat_turns import Chat, Place
from kvpool.cli.console import Console
from kvpool.cli.model_options import HOW, add_model_options, exit_on_sigterm, local_model
from kvpool.cli.numbers import count
from kvpool.errors import ConfigError, UsageError

API_KEY = "KVPOOL_API_KEY"
_INTERRUPTED, _TERMINATED = 130, 143
_HERE = "http://kvpool"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said of it."""
    parser.description = (
        "Chat with a model that is loaded here (--model), or with a server that runs (--url). After each turn one line "
        "tells how much of the prompt came from the cache. A line that is piped in is a turn; answers go to standard "
        "output, all else to standard error."
    )
    parser.add_argument("--model", metavar="MODEL", help=f"{HOW}; with --url, one of the server's models (its first)")
    parser.add_argument("--url", metavar="URL", help="of a server with OpenAI's interface: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help=f"for that server; or {API_KEY}")
    parser.add_argument("--system", metavar="TEXT", help="instructions before the first turn")
    parser.add_argument("--salt", metavar="TEXT", help="share cache entries only with those who send the same text")
    parser.add_argument("--max-tokens", type=count, default=512, metavar="N", help="of an answer (512)")
    parser.add_argument("--temperature", type=float, default=0.3, metavar="T", help="0 for the likeliest answer (0.3)")
    add_model_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if (options.model is None) and (options.url is None):
        raise ConfigError("give one of the two: --model demo for a model that is loaded here, or --url of a server")
    with _place(options) as place:
        chat = Chat(place, options.system, options.salt, options.max_tokens, options.temperature)
        name = asyncio.run(chat.find_model(options.model if options.url else None))
        if sys.stdin.isatty():
            return _talk(chat, name)
        return _answer_all(chat)


def _talk(chat: Chat, name: str) -> int:
    """Turns of a person, until Ctrl-D. What went wrong in a turn is told, and the chat goes on."""
    notes = Console(stderr=True, highlight=False)
    notes.print(f"[dim]{name}. /help tells what can be said beside the chat; Ctrl-D ends it.[/]")
    if find_spec("readline"):
        # Its import alone gives `input` a history and keys.
        __import__("readline")
    while True:
        try:
            if chat.take(input("> ")).ends:
                return 0
        except KeyboardInterrupt:
            notes.print("\n[dim]Ctrl-D ends the chat[/]")
        except EOFError:
            notes.print()
            return 0


def _answer_all(chat: Chat) -> int:
    """A line a turn. 1 when one was not answered."""
    has_failed = False
    for number, line in enumerate(sys.stdin, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in line):
            raise UsageError(f"line {number} of standard input is no UTF-8")
        result = chat.take(line)
        if result.ends:
            break
        if result.is_cancelled:
            return _INTERRUPTED
        has_failed |= result.has_failed
    return int(has_failed)


@contextmanager
def _place(options: argparse.Namespace) -> Iterator[Place]:
    """Where answers come from: a server that runs, or one that is made for this chat."""
    if options.url is not None:
        yield Place(options.url, options.api_key or os.environ.get(API_KEY))
        return
    exit_on_sigterm(_TERMINATED)
    here = local_model()
    with (
        here.opened_model(options) as (model, _),
        here.serving_here(here.server_of(model, options, here.ServerConfig(model.name))) as path,
    ):
        yield Place(_HERE, socket=str(path))
