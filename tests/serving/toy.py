"""A worker without a model, whose text shows what was kept where, and a tokenizer of bytes."""

import threading
from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from kvpool import KVCacheManager
from kvpool.engine.sampling import Logprobs
from kvpool.engine.step_input import SamplingRows, StepAnswer, StepInput, Worker
from kvpool.errors import UsageError, WorkerDied
from kvpool.serving.tokenizer import Message

EOS = 256
VOCAB_SIZE = 260
_LETTERS = 26
_UNWRITTEN = -1


class ToyWorker:
    """Its next token is a letter made of a hash of all tokens before, as they stand in its own paged memory.

    New tokens are written to their slots, and read back through the block tables: with wrong bookkeeping the text
    differs, or AssertionError says what was read. A row that samples mixes its seed and place into the hash.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._block_size = cache.block_size
        self._memory = np.full((cache.num_blocks * cache.block_size, 2), _UNWRITTEN, np.int64)
        self.num_steps = 0

    def forget(self) -> None:
        self._memory[:] = _UNWRITTEN

    def execute(self, step: StepInput) -> StepAnswer:
        self.num_steps += 1
        slots = step.slots[0]
        assert (slots >= self._block_size).all(), "a token is written to the null block"
        self._memory[slots] = np.stack([step.token_ids, step.positions], axis=1)
        tokens = np.full(step.num_rows, -1, np.int64)
        for row, stop in enumerate(np.cumsum(step.counts).tolist()):
            history = self._history(step, row, int(step.positions[stop - 1]) + 1)
            if step.gives[row]:
                tokens[row] = next_token(history, *_choice(step.sampling, row))
        if step.sampling is None:
            return StepAnswer(tokens, {}, {})
        return StepAnswer(tokens, _logprobs(step.sampling, tokens), _prompt_logprobs(step.sampling, step.counts))

    def _history(self, step: StepInput, row: int, num_tokens: int) -> list[int]:
        at = np.arange(num_tokens)
        blocks = step.block_tables[0][row][at // self._block_size].astype(np.int64)
        kept: npt.NDArray[np.int64] = self._memory[blocks * self._block_size + at % self._block_size]
        assert (kept[:, 1] == at).all(), f"row {row} reads what was not written for its place"
        tokens: list[int] = kept[:, 0].tolist()
        return tokens


def next_token(history: Sequence[int], seed: int = 0, place: int = 0) -> int:
    """A letter, or a space now and then. A prompt that ends with `!` is answered with the end."""
    if history[-1] == ord("!"):
        return EOS
    mixed = 0
    for token in history:
        mixed = (mixed * 1_000_003 + token + 1) % (1 << 61)
    mixed = (mixed + seed * 7_919 + place * 104_729) % (1 << 61)
    letter = (mixed >> 7) % (_LETTERS + 1)
    return ord(" ") if letter == _LETTERS else ord("a") + letter


def continued(prompt: str, num_tokens: int, seed: int | None = None) -> str:
    """What the worker says after a prompt: the text that any right bookkeeping gives."""
    history = list(prompt.encode())
    for place in range(num_tokens):
        history.append(next_token(history, *(() if seed is None else (seed, place))))
    return bytes(history[len(prompt.encode()) :]).decode()


def _choice(sampling: SamplingRows | None, row: int) -> tuple[int, int]:
    if sampling is None or sampling.temperature[row] == 0:
        return 0, 0
    return int(sampling.seeds[row]), int(sampling.num_outputs[row])


def _logprobs(sampling: SamplingRows, tokens: npt.NDArray[np.int64]) -> dict[int, Logprobs]:
    asked = [(row, int(num_top)) for row, num_top in enumerate(sampling.num_logprobs) if num_top >= 0]
    return {row: told_of(int(tokens[row]), num_top) for row, num_top in asked if tokens[row] >= 0}


def _prompt_logprobs(sampling: SamplingRows, counts: npt.NDArray[np.int64]) -> dict[int, Sequence[Logprobs]]:
    told: dict[int, Sequence[Logprobs]] = {}
    for row, stop in enumerate(np.cumsum(counts).tolist()):
        num_top = int(sampling.num_prompt_logprobs[row])
        targets = [int(token) for token in sampling.targets[stop - int(counts[row]) : stop] if token >= 0]
        if num_top >= 0 and targets:
            told[row] = [told_of(token, num_top) for token in targets]
    return told


def told_of(token_id: int, num_top: int) -> Logprobs:
    """Probabilities that only depend on the token."""
    return Logprobs(token_id, -0.5, [((token_id + at) % EOS, -0.5 - at) for at in range(num_top)])


class HeldWorker:
    """Computes no more steps than it is allowed to, until it is let go, which the end of a `with` block does too."""

    def __init__(self, inner: Worker) -> None:
        self._inner = inner
        self._allowed = threading.Semaphore(0)
        self._is_held = True
        self.num_steps = 0

    def allow(self, num_steps: int) -> None:
        self._allowed.release(num_steps)

    def let_go(self) -> None:
        self._is_held = False
        self._allowed.release()

    def __enter__(self) -> "HeldWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def execute(self, step: StepInput) -> StepAnswer:
        if self._is_held:
            self._allowed.acquire()
        self.num_steps += 1
        return self._inner.execute(step)


class FailingWorker:
    """Raises what it is given for the steps of these numbers, counted from 1; a dead worker forgets everything."""

    def __init__(self, inner: ToyWorker, failures: dict[int, Exception]) -> None:
        self._inner = inner
        self._failures = failures
        self.num_steps = 0

    def execute(self, step: StepInput) -> StepAnswer:
        self.num_steps += 1
        error = self._failures.pop(self.num_steps, None)
        if error is None:
            return self._inner.execute(step)
        if isinstance(error, WorkerDied):
            self._inner.forget()
        raise copy(error)  # a new one: this one would keep all that led to it


class ByteTokenizer:
    """A token a byte; 256 ends an answer, the ids above are special and have no text."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return bytes(token_id for token_id in token_ids if token_id < EOS).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if messages[0]["role"] == "nobody":
            raise UsageError("the model's chat template does not take these messages: nobody speaks")
        turns = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        return self.encode(f"{turns}<assistant>")
