"""The form of `/v1/chat/completions`: turns of a chat through the model's template, answers as messages."""

from collections.abc import Sequence
from typing import Any

from kvpool.serving.bodies import ChatBody, turns_of
from kvpool.serving.call import Call
from kvpool.serving.choice import Piece, chat_logprobs, prompt_logprobs
from kvpool.serving.tokenizer import Tokenizer


class ChatForm:
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    prompt_field = "messages"
    num_prompts = 1

    def __init__(self, body: ChatBody) -> None:
        self.body = body
        self.max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self.num_prompt_logprobs = body.prompt_logprobs

    def encoded(self, tokenizer: Tokenizer) -> Sequence[Sequence[int]]:
        return [tokenizer.encode_chat(turns_of(self.body.messages))]

    def choice(self, call: Call, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        told = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
            "logprobs": self._logprobs(call, pieces),
            "finish_reason": pieces[-1].finish,
        }
        if self.body.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(call.tokenizer, call.stream.prompt_logprobs[index])
        return told

    def opening(self, call: Call, index: int) -> dict[str, Any] | None:  # noqa: ARG002
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, call: Call, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        logprobs = self._logprobs(call, [piece])
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish}

    def _logprobs(self, call: Call, pieces: Sequence[Piece]) -> Any:
        if self.num_logprobs is None:
            return None
        return chat_logprobs(call.tokenizer, [each for piece in pieces for each in piece.logprobs])
