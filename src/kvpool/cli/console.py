"""What all commands print with: tables that keep every digit, and names from files that stay text.

Knows nothing of: what is in a table.
"""

from kvpool.errors import MissingExtraError

try:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError as error:
    raise MissingExtraError("rich", "replay") from error

__all__ = ["Console", "Table", "plain", "show", "table"]

_WIDEST = 1000


def table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show(console: Console, table: Table) -> None:
    """Print a table whole: in a terminal that is too narrow its lines wrap, and no digit is lost."""
    needed = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    wide = Console(stderr=console.stderr, highlight=False, width=max(console.width, needed))
    wide.print(table)


def plain(name: str) -> str:
    """A name from a file: shown as it is, without becoming markup or moving the cursor."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in name))
