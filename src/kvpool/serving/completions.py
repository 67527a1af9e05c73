"""The form of `/v1/completions`: prompts as texts or token ids, answers as text."""

from collections.abc import Sequence
from typing import Any

from kvpool.serving.bodies import CompletionBody
from kvpool.serving.call import Call
from kvpool.serving.choice import Piece, completion_logprobs, prompt_logprobs
from kvpool.serving.tokenizer import Tokenizer

_MAX_TOKENS = 16
"""What OpenAI's interface gives when it is not told."""


class CompletionForm:
    name = chunk_name = "text_completion"
    id_prefix = "cmpl"
    prompt_field = "prompt"

    def __init__(self, body: CompletionBody) -> None:
        self.body = body
        self._prompts = body.prompts()
        self.num_prompts = len(self._prompts)
        self.max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self.num_logprobs = body.logprobs
        self.num_prompt_logprobs = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs

    def encoded(self, tokenizer: Tokenizer) -> Sequence[Sequence[int]]:
        adds = self.body.add_special_tokens is not False
        return [
            tokenizer.encode(prompt, add_special_tokens=adds) if isinstance(prompt, str) else prompt
            for prompt in self._prompts
        ]

    def choice(self, call: Call, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        echo = self._echo(call, index)
        told = {
            "index": index,
            "text": echo + "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(call, index, pieces, len(echo)),
            "finish_reason": pieces[-1].finish,
        }
        if self.body.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(call.tokenizer, call.stream.prompt_logprobs[index])
        return told

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:
        if not self.body.echo:
            return None
        return {"index": index, "text": self._echo(call, index), "logprobs": None, "finish_reason": None}

    def chunk(self, call: Call, index: int, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.num_logprobs is not None:
            logprobs = completion_logprobs(
                call.tokenizer,
                piece.logprobs,
                [each.token_id for each in piece.logprobs],
                call.choices[index].num_letters,
            )
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def _echo(self, call: Call, index: int) -> str:
        """The prompt as text, where it is asked for."""
        if not self.body.echo:
            return ""
        prompt = self._prompts[call.prompt_of(index)]
        return prompt if isinstance(prompt, str) else call.tokenizer.decode(prompt, skip_special_tokens=False)

    def _logprobs(self, call: Call, index: int, pieces: Sequence[Piece], num_letters: int) -> Any:
        if self.num_logprobs is None:
            return None
        told = [each for piece in pieces for each in piece.logprobs]
        ids = [each.token_id for each in told]
        if not self.body.echo:
            return completion_logprobs(call.tokenizer, told, ids, num_letters)
        prompt = call.prompts[call.prompt_of(index)]
        before = [None, *call.stream.prompt_logprobs[index]]
        return completion_logprobs(call.tokenizer, [*before, *told], [*prompt, *ids], 0)
