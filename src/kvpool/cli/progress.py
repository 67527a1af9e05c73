"""A bar for long runs, on standard error, and only where a person is watching."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpool.errors import MissingExtraError

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
except ImportError as error:
    raise MissingExtraError("rich", "replay") from error


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A function to call with the number done so far. Shows nothing when standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda number: progress.update(task, completed=number)
