"""One HTTP request that generates: from its body to requests of the engine, from their outputs to pieces of text.

Owns: its stream.
Knows nothing of: the forms of answers, connections.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Protocol
from uuid import uuid4

from kvpool.engine.generation import Generation
from kvpool.errors import RefusedError
from kvpool.serving.api_errors import ApiError
from kvpool.serving.async_engine import AsyncEngine
from kvpool.serving.bodies import Body
from kvpool.serving.choice import Choice, Piece
from kvpool.serving.stream import Finish
from kvpool.serving.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Sender:
    """Whom a request came from: its id, and who was authenticated."""

    request_id: str
    tenant: str | None = None
    is_admin: bool = False


class Form(Protocol):
    """What the two kinds of completions differ in: what is asked for, and how it is answered."""

    name: str
    chunk_name: str
    id_prefix: str
    prompt_field: str

    @property
    def body(self) -> Body: ...

    @property
    def num_prompts(self) -> int: ...

    @property
    def max_tokens(self) -> int | None:
        """None for as many as fit."""

    @property
    def num_logprobs(self) -> int | None: ...

    @property
    def num_prompt_logprobs(self) -> int | None: ...

    def encoded(self, tokenizer: Tokenizer) -> Sequence[Sequence[int]]:
        """The token ids of each prompt. Takes a while."""

    def choice(self, call: "Call", index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A choice that is done, from all its pieces."""

    def opening(self, call: "Call", index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its first piece."""

    def chunk(self, call: "Call", index: int, piece: Piece) -> dict[str, Any]:
        """A piece of a choice in a stream."""


class Call:
    """Has a place in the queue from the start until `close`."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, model_name: str, form: Form, sender: Sender) -> None:
        self.tokenizer = tokenizer
        self.form = form
        self.prompts: Sequence[Sequence[int]] = ()
        self.choices: list[Choice] = []
        self.num_choices = form.body.num_choices
        num_requests = form.num_prompts * self.num_choices
        if num_requests > engine.max_waiting:
            raise ApiError(
                f"{form.num_prompts} prompts with n {self.num_choices} are {num_requests} requests, and "
                f"{engine.max_waiting} may wait: send them in several bodies",
                param="n" if self.num_choices > 1 else form.prompt_field,
            )
        self.head = {"id": f"{form.id_prefix}-{sender.request_id}", "created": int(time()), "model": model_name}
        self._engine = engine
        self._sender = sender
        self.stream = engine.open(num_requests)

    async def start(self) -> None:
        """Queue the requests. ApiError or KVPoolError where the engine does not take them."""
        try:
            await self._engine.send(self.stream, self._requests)
        except RefusedError as error:
            raise ApiError(str(error), param=self.form.prompt_field, code="context_length_exceeded") from None

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """The next piece of some choice, and which one it is."""
        async for output in self.stream.outputs():
            piece = self.choices[output.index].take(output)
            if piece.finish is not None and output.finish is None:
                self._engine.cancel(self.stream, output.index)
            yield output.index, Piece("", (), Finish.LENGTH) if self.form.max_tokens == 0 else piece

    def close(self) -> None:
        """Everything that is not done is cancelled."""
        self._engine.close(self.stream)
        for choice in self.choices:
            self._engine.metrics.requests.labels(choice.finish or "aborted").inc()

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, with what its first choice found in the cache."""
        first = range(0, len(self.stream.requests), self.num_choices)
        num_prompt = sum(self.stream.requests[index].num_prompt_tokens for index in first)
        num_outputs = 0 if self.form.max_tokens == 0 else sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_outputs,
            "total_tokens": num_prompt + num_outputs,
            "prompt_tokens_details": {"cached_tokens": sum(self.stream.cached[index] for index in first)},
        }

    def prompt_of(self, index: int) -> int:
        """The prompt that a choice continues."""
        return index // self.num_choices

    def _requests(self) -> Sequence[Generation]:
        self.prompts = self.form.encoded(self.tokenizer)
        for prompt in self.prompts:
            self._require_known(prompt)
        places = [(prompt, choice) for prompt in self.prompts for choice in range(self.num_choices)]
        self.choices = [Choice(self.tokenizer, prompt, self.form.body.stops) for prompt, _ in places]
        return [self._request(prompt, choice) for prompt, choice in places]

    def _request(self, prompt: Sequence[int], choice: int) -> Generation:
        body, most = self.form.body, self.form.max_tokens
        ends = () if body.ignore_eos else self.tokenizer.eos_token_ids
        return Generation(
            f"{self._sender.request_id}-{uuid4().hex}",
            prompt,
            body.sampling(choice, self.form.num_logprobs, self.form.num_prompt_logprobs),
            stop_token_ids=[*ends, *(body.stop_token_ids or ())],
            cache_salt=body.cache_salt,
            tenant=self._sender.tenant,
            max_tokens=max(most, 1) if most is not None else None,
        )

    def _require_known(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ApiError("the prompt is empty: at least 1 token is needed to continue from", param="prompt")
        size = self.tokenizer.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < size:
            wrong = next(token_id for token_id in prompt if not 0 <= token_id < size)
            raise ApiError(f"token id {wrong} is not of this model: 0 to {size - 1}", param="prompt")
