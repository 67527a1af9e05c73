"""Text as tokens come: what is told is never taken back, and no character is told by halves.

Owns: the last tokens of one request, as many as decoding the next one needs.
"""

from collections.abc import Sequence

from kvpool.serving.tokenizer import Tokenizer

_HALF = "\ufffd"
_NUM_CONTEXT = 8
_MOST_HELD = 64


class Detokenizer:
    """The text of the tokens that are added, in pieces. `prompt_ids` decide how the first piece is spaced.

    Tokens mean something together: a space before a word, a byte of a character. So the last few are decoded anew with
    each token, and the text that is new is told, but for a last character that may not be whole yet.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = _context(tokenizer, prompt_ids)
        self._num_told = len(self._decoded().rstrip(_HALF))
        self._num_before = len(self._ids)
        """The ids before this place are context, and can be dropped when others can take their part."""
        self._num_clean = len(self._ids)

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token_id)
        text = self._decoded()
        whole = text.rstrip(_HALF)
        if len(self._ids) - self._num_clean > _MOST_HELD:
            whole = text
        told = whole[self._num_told :]
        self._num_told += len(told)
        if len(whole) == len(text):
            self._num_clean = len(self._ids)
            self._shorten()
        return told

    def finish(self) -> str:
        """What was held back: a character that did not become whole."""
        text = self._decoded()[self._num_told :]
        self._num_told += len(text)
        return text

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids)

    def _shorten(self) -> None:
        """Drop the old context once enough tokens with a text of their own came after it."""
        if len(self._ids) - self._num_before < _NUM_CONTEXT:
            return
        rest = self._ids[self._num_before :]
        text = self._tokenizer.decode(rest)
        if text.strip(_HALF):
            self._ids, self._num_told = rest, len(text)
        self._num_before = len(self._ids)


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The end of the prompt, from where a character begins if there is such a place."""
    for num_ids in range(_NUM_CONTEXT, _NUM_CONTEXT + 4):
        context = list(prompt_ids[-num_ids:])
        if not tokenizer.decode(context).startswith(_HALF):
            return context
    return list(prompt_ids[-_NUM_CONTEXT:])
