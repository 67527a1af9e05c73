"""Length distributions for `kvpool size --for`: a trace, a table of lengths with counts, or a few in a word.

Knows nothing of: what is done with them.
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from kvpool.errors import ConfigError, TraceError
from kvpool.plan.lengths import Lengths
from kvpool.replay.readers import open_trace

_INLINE = re.compile(r"\d+(\+\d+)?(:\d+)?(,\d+(\+\d+)?(:\d+)?)*")
_COLUMNS = {
    "prompt": ("prompt", "prompt_tokens", "input", "input_tokens", "length", "tokens"),
    "output": ("output", "output_tokens"),
    "count": ("count", "requests", "weight"),
}


def read_lengths(text: str) -> Lengths:
    """From `2000+500:50,8000:10` (prompt + output : how often), a CSV table with a column count, or a trace.

    ConfigError for what cannot be read.
    """
    if _INLINE.fullmatch(text):
        return Lengths.counted(map(_inline, text.split(",")))
    path = Path(text)
    try:
        table = _table(path)
        if table is not None:
            return Lengths.counted(table)
        return Lengths.of((request.num_prompt_tokens, request.num_output_tokens) for request in open_trace(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--for {text}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except TraceError as error:
        raise ConfigError(f"--for {error}; or give a table with a column count, or 2000+500:50,8000:10") from None


def _inline(part: str) -> tuple[tuple[int, int], int]:
    lengths, _, count = part.partition(":")
    prompt, _, output = lengths.partition("+")
    return (int(prompt), int(output or 0)), int(count or 1)


def _table(path: Path) -> list[tuple[tuple[int, int], int]] | None:
    """The rows of a table with a column of lengths and one of counts; None for anything else."""
    with path.open("rb") as file:
        first = file.readline(4096)
    names = [name.strip().lower() for name in first.decode("utf-8", "replace").split(",")]
    at = {what: next((names.index(n) for n in known if n in names), None) for what, known in _COLUMNS.items()}
    if at["prompt"] is None or at["count"] is None:
        return None
    return list(_rows(path, at["prompt"], at["output"], at["count"]))


def _rows(path: Path, prompt: int, output: int | None, count: int) -> Iterator[tuple[tuple[int, int], int]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        next(rows)
        for number, row in enumerate(rows, 2):
            try:
                yield (int(row[prompt]), 0 if output is None else int(row[output])), int(row[count])
            except (IndexError, ValueError):
                raise ConfigError(
                    f"--for {path}, line {number}: {','.join(row)!r} is no row of whole numbers"
                ) from None
