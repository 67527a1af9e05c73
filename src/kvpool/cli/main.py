"""`kvpool`: which command was asked for, and how mistakes are told.

Exit codes: 0 done, 1 the answer is no (it does not fit), 2 the user's mistake (one line on standard error, never a
traceback).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from kvpool.errors import KVPoolError, MissingExtraError

COMMANDS = {
    "size": "how much of a model's cache fits: blocks, tokens, requests",
    "replay": "a trace or a workload through the cache: what hit rate, at what size",
    "serve": "a model behind OpenAI's HTTP interface",
    "chat": "a chat with a model or a server in this terminal",
    "bench": "load on one server or two: how soon, how fast, how much from the cache",
    "doctor": "what is installed here",
}
"""Each is a module beside this one, imported when its command is asked for: what one needs the others may lack."""

USER_MISTAKE = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where help is."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_MISTAKE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser_for(asked: str | None) -> argparse.ArgumentParser:
    """Knows all commands by name, and the options of the one that is asked for."""
    parser: argparse.ArgumentParser = _Parser(prog="kvpool", description="The KV cache manager for LLM serving.")
    parser.add_argument("--version", action="version", version=f"kvpool {version('kvpool')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name == asked:
            import_module(f"kvpool.cli.{name}").add_options(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if sys.stdout is None:
        return _mistake("standard output is closed, and results go there")
    try:
        options = parser_for(next(iter(given), None)).parse_args(given)
        answer: int = options.run(options)
        sys.stdout.flush()
    except MissingExtraError as error:
        return _mistake(f"{error} (kvpool doctor tells what is here)")
    except KVPoolError as error:
        return _mistake(str(error))
    except MemoryError:
        return _mistake("the machine's memory is too small for that: a smaller --num-blocks may fit")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        _discard_output()
    except OSError as error:
        _discard_output()
        return _mistake(f"cannot write the result: {error.strerror or error}")
    else:
        return answer
    return 0


def _discard_output() -> None:
    """What is still buffered goes nowhere, or the interpreter would complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _mistake(message: str) -> int:
    print(f"kvpool: {message}", file=sys.stderr)
    return USER_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
