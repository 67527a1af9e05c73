"""Ends a text where one of some strings appears in it, however the text is cut into pieces.

Owns: the end of the text that may be the beginning of such a string.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop string whose end comes first ends the text before it; of several that end there, the longest."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        self._held = ""
        self.has_stopped = False

    def add(self, text: str) -> str:
        """The text that certainly belongs to the answer. Nothing after a stop."""
        if self.has_stopped:
            return ""
        held = self._held + text
        ends = [(held.find(string) + len(string), string) for string in self._strings if string in held]
        if ends:
            end, string = min(ends, key=lambda found: found[0])
            self.has_stopped, self._held = True, ""
            return held[: end - len(string)]
        told = len(held) - self._num_beginning(held)
        self._held = held[told:]
        return held[:told]

    def finish(self) -> str:
        """What was held back and belongs to the text after all."""
        held, self._held = self._held, ""
        return held

    def _num_beginning(self, text: str) -> int:
        """The longest end of the text that begins a stop string."""
        most = min(len(text), max(map(len, self._strings), default=1) - 1)
        for num_letters in range(most, 0, -1):
            if any(string.startswith(text[-num_letters:]) for string in self._strings):
                return num_letters
        return 0
