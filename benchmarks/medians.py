"""Medians of repeated calls, and one table out."""

import statistics
import time
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def times_s(call: Callable[[], object], repeats: int) -> list[float]:
    """The time of each call, in seconds, after three that do not count."""
    times = []
    for repeat in range(repeats + 3):
        start = time.perf_counter()
        call()
        if repeat >= 3:
            times.append(time.perf_counter() - start)
    return times


def median_s(call: Callable[[], object], repeats: int = 100) -> float:
    """The median time of one call, in seconds."""
    return statistics.median(times_s(call, repeats))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The answer to the script's question."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
