"""`kvpool`: which command was asked for, and how mistakes are told.

Exit codes: 0 done, 1 the answer is no (it does not fit), 2 the user's mistake (one line on standard error, never a
traceback).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from kvpool.cli import doctor
from kvpool.errors import KVPoolError, MissingExtraError

try:
    from kvpool.cli import replay, serve, size
except MissingExtraError as error:
    missing: MissingExtraError | None = error
else:
    missing = None

USER_MISTAKE = 2
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where help is."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_MISTAKE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(prog="kvpool", description="The KV cache manager for LLM serving.")
    parser.add_argument("--version", action="version", version=f"kvpool {version('kvpool')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    if missing is None:
        replay.add_command(commands)
        size.add_command(commands)
        serve.add_command(commands)
    doctor.add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if missing is not None and given[:1] != ["doctor"]:
        return _mistake(f"the command line needs more than the core: {missing} (kvpool doctor tells what is here)")
    if sys.stdout is None:
        return _mistake("standard output is closed, and results go there")
    options = _parser().parse_args(given)
    try:
        answer: int = options.run(options)
        sys.stdout.flush()
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
