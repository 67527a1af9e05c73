"""The lines of a trace file, and what becomes of the bad ones.

Owns: the open file while it is read. Knows nothing of: what a line says.
"""

import gzip
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvpool.errors import TraceError

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

T = TypeVar("T")


class BadLineError(ValueError):
    """What is wrong with one line. Whoever reads the file adds its name and the number of the line."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that says something: stripped, never empty, numbered from 1 as editors do."""

    number: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """One pass over the lines of a trace. `reject` is told of each bad line, and raises unless the pass may go on."""

    lines: Iterator[Line]
    reject: Callable[[Line, BadLineError], None]

    def parsed(self, parse: Callable[[Line], T]) -> Iterator[T]:
        """What `parse` makes of each remaining line, without the rejected ones."""
        for line in self.lines:
            try:
                value = parse(line)
            except BadLineError as error:
                self.reject(line, error)
            else:
                yield value


def read_lines(path: Path) -> Generator[Line, None, None]:
    """The lines of a text file, plain or gzip, one at a time; TraceError when it cannot be read to its end."""
    number = 0
    try:
        with _opened(path) as file:
            for number, raw in enumerate(file, 1):
                text = (raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw).strip()
                if text:
                    yield Line(number, text)
    except EOFError as error:
        raise TraceError(f"{path}: the gzip data is cut off after line {number}; fetch the file again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: the gzip data is damaged after line {number} ({error})") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    _refuse_pipe(path)
    with path.open("rb") as file:
        if file.peek(2)[:2] != GZIP_MAGIC:
            _refuse_binary(path, file.peek())
            yield file
            return
        with gzip.open(file) as unzipped:
            _refuse_binary(path, unzipped.peek(4096))
            yield unzipped


def _refuse_pipe(path: Path) -> None:
    # A trace is opened again for each pass, and opening a pipe that nobody writes to waits for ever.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceError(f"{path}: is not a regular file, and a trace is read more than once; save it to a file first")


def _refuse_binary(path: Path, head: bytes) -> None:
    # Before any line is asked for: a binary file may be one line of many gigabytes.
    if b"\0" in head:
        raise TraceError(f"{path}: is binary (starts with {head[:8]!r}); a trace is JSONL or CSV text, plain or gzip")
