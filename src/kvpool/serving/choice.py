"""From the tokens of one request to its text and what is told beside it.

Knows nothing of: HTTP, other requests.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.engine.sampling import Logprobs
from kvpool.serving.detokenizer import Detokenizer
from kvpool.serving.stop_strings import StopStrings
from kvpool.serving.stream import Finish, Output
from kvpool.serving.tokenizer import Tokenizer

_LEAST = -9999.0
"""What OpenAI's interface says of what cannot be: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added: the text that is certain now, log-probabilities of tokens that are part of the text."""

    text: str
    logprobs: Sequence[Logprobs]
    finish: Finish | None


class LetterCount:
    """Letters of tokens that come one after the other; one that several make up counts with the last of them."""

    def __init__(self, tokenizer: Tokenizer, num_letters: int = 0) -> None:
        self._tokenizer = tokenizer
        self._num_letters = num_letters
        self._decoder = getincrementaldecoder("utf-8")("ignore")

    def before(self, token_id: int) -> int:
        """How many there were before this token, the next one."""
        before = self._num_letters
        self._num_letters += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return before


class Choice:
    """The text of one request. `finish` is known with its last token, or when a stop string has appeared."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str]) -> None:
        self.finish: Finish | None = None
        self.num_tokens = 0
        self.num_letters = 0
        """Of the tokens before the last one: where its own begin."""
        self._letters = LetterCount(tokenizer)
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopStrings(stops)

    def take(self, output: Output) -> Piece:
        """The next token. Not after `finish`. A token that ends the request is no part of the text."""
        self.num_tokens += 1
        is_text = output.finish is not Finish.STOP
        text = self._stops.add(self._detokenizer.add(output.token_id)) if is_text else ""
        self.finish = output.finish
        if output.finish is not None:
            text += self._stops.add(self._detokenizer.finish())
        if self._stops.has_stopped:
            self.finish = Finish.STOP
        elif output.finish is not None:
            text += self._stops.finish()
        self.num_letters = self._letters.before(output.token_id)
        told = (output.logprobs,) if output.logprobs is not None and is_text else ()
        return Piece(text, told, self.finish)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone as text; `bytes:` and its bytes where it is no whole characters."""
    content = tokenizer.token_bytes(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def chat_logprobs(tokenizer: Tokenizer, told: Iterable[Logprobs]) -> Mapping[str, Any]:
    """In the form of chat completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": max(logprob, _LEAST),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            {**entry(each.token_id, each.logprob), "top_logprobs": [entry(*likely) for likely in each.top]}
            for each in told
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer, told: Sequence[Logprobs | None], token_ids: Sequence[int], offset: int
) -> Mapping[str, Any]:
    """In the form of completions: None for the first token of a prompt. `offset`: letters of the text before."""
    letters = LetterCount(tokenizer, offset)
    return {
        "tokens": [token_text(tokenizer, token_id) for token_id in token_ids],
        "token_logprobs": [max(each.logprob, _LEAST) if each is not None else None for each in told],
        "top_logprobs": [_likeliest(tokenizer, each) for each in told],
        "text_offset": [letters.before(token_id) for token_id in token_ids],
    }


def prompt_logprobs(tokenizer: Tokenizer, told: Iterable[Logprobs]) -> list[Mapping[str, Any] | None]:
    """For every token of a prompt: itself and the likeliest by id; None for the first, which nothing comes before."""
    answers: list[Mapping[str, Any] | None] = [None]
    for each in told:
        likely = {each.token_id: each.logprob, **dict(each.top)}
        answers.append(
            {
                str(token_id): {"logprob": max(logprob, _LEAST), "decoded_token": token_text(tokenizer, token_id)}
                for token_id, logprob in likely.items()
            }
        )
    return answers


def _likeliest(tokenizer: Tokenizer, told: Logprobs | None) -> Mapping[str, float] | None:
    if told is None or not told.top:
        return None
    likely = {**dict(told.top), told.token_id: told.logprob}
    return {token_text(tokenizer, token_id): max(logprob, _LEAST) for token_id, logprob in likely.items()}
