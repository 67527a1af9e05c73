"""Prompts for a server, from what a trace or a workload says of them: as long, and sharing the same prefixes.

Knows nothing of: servers, times.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.replay.trace import TraceRequest

_TEXT = (
    "the of and to in is it that for as with was on be at by this have from or one had not but what all were when we "
    "there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down "
    "only way find use may water long little very after words called just where most know get through back much go "
    "good new write our me man too any day same right look think also around another came come work three word must "
    "because does part even place well such here take why help put different away again off went old number great tell "
    "men say small every found still between name should home big give air line set own under read last never us left "
    "end along while might next sound below saw something thought both few those always show large often together ask "
    "house world going want school important until form food keep children feet land side without boy once animal life "
    "enough took four head above kind began almost live page got earth need far hand high year mother light country"
)
WORDS = _TEXT.split()
"""Common ones, most of which are one token of any vocabulary."""

_OWN = 1 << 63
_MOST_TOKENS = 1 << 24


class Prompts:
    """`letters` are token ids or words that prompts are made of; `block_size` is what the trace's ids stand for.

    The same id gives the same tokens, whichever request has it; tokens without a name are no other request's.
    """

    def __init__(self, letters: Sequence[int] | Sequence[str], block_size: int | None) -> None:
        self.are_texts = isinstance(letters[0], str)
        self._array = np.array(letters)
        self._block_size = block_size

    def prompt(self, request: TraceRequest, serial: int, most: int | None = None) -> list[int] | str:
        """Token ids, or a text of as many words. `serial` tells requests apart; `most` cuts at so many tokens."""
        numbers = self._numbers(request, serial)[:most]
        letters: list[int] | list[str] = self._array[numbers % np.uint64(len(self._array))].tolist()
        return " ".join(map(str, letters)) if self.are_texts else [int(each) for each in letters]

    def _numbers(self, request: TraceRequest, serial: int) -> npt.NDArray[np.uint64]:
        """A number for each token; equal ones where the content is."""
        if request.prompt_token_ids is not None:
            return np.asarray(request.prompt_token_ids, np.uint64)
        length, size = request.num_prompt_tokens, self._block_size or 1
        blocks = np.asarray([] if self._block_size is None else request.block_ids or (), np.uint64)
        named = (blocks[:, None] * np.uint64(size) + np.arange(size, dtype=np.uint64)).ravel()[:length]
        first_own = _OWN + serial * _MOST_TOKENS
        own = np.arange(first_own, first_own + length - len(named), dtype=np.uint64)
        return _scattered(np.concatenate([named, own]))


def _scattered(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finish: neighbours become unlike each other."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
