"""Text as it comes, in a terminal: words are not cut at the right edge, and nothing moves the cursor.

Knows nothing of: where the text is from.
"""

import re
from collections.abc import Callable

from kvpool.errors import MissingExtraError

try:
    from rich.cells import cell_len
except ImportError as error:
    raise MissingExtraError("rich", "replay") from error

_WIDE = "\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
"""Letters of scripts that put no spaces between words: lines may end behind any of them."""
_PARTS = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")
_LONGEST = 30


class Wrapped:
    """Writes text at most `width` cells wide. A word is held back until it
    ends, unless it is a long one."""

    def __init__(self, write: Callable[[str], object], width: int) -> None:
        self._write = write
        self._width = max(width, 1)
        self._column = 0
        self._space = ""
        self._word = ""

    def add(self, text: str) -> None:
        for part in _PARTS.findall("".join(letter if _is_plain(letter) else "?" for letter in text)):
            if part == "\n":
                self._end_word()
                self._write("\n")
                self._column, self._space = 0, ""
            elif part.isspace():
                self._end_word()
                self._space += part.replace("\t", "    ")
            else:
                self._word += part
                if cell_len(self._word) > _LONGEST or cell_len(part) > len(part):
                    self._end_word()

    def finish(self) -> None:
        """Write what was held back, and end the line."""
        self._end_word()
        self._write("\n")
        self._column, self._space = 0, ""

    def _end_word(self) -> None:
        if not self._word:
            return
        needed = cell_len(self._space) + cell_len(self._word)
        if self._column and self._column + needed > self._width:
            self._write("\n")
            self._column, self._space = 0, ""
        self._write(self._space + self._word)
        self._column += cell_len(self._space) + cell_len(self._word)
        self._space = self._word = ""


def _is_plain(letter: str) -> bool:
    return letter.isprintable() or letter in "\n\t"
