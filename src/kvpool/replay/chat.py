"""Chats in OpenAI's `messages` form, and the tokenizer that turns them into token ids.

Knows nothing of: files of traces.
"""

from collections.abc import Callable
from typing import Any

from kvpool.errors import ConfigError, MissingExtraError
from kvpool.replay.lines import BadLineError, Line
from kvpool.replay.records import Record, check_lengths, decoder, json_text, text_or_none
from kvpool.replay.trace import TraceRequest

Messages = list[dict[str, str]]
Tokenizer = Callable[[Messages], list[int]]

# Output tokens of a chat that has neither an answer nor `max_tokens`.
DEFAULT_OUTPUT_TOKENS = 128
# Between a chat without `timestamp` and the one before it.
DEFAULT_INTERVAL_S = 1.0

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ContentPart(Record, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class Message(Record, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None

    def plain(self) -> dict[str, str]:
        """The message as text alone: its content, and then its tool calls as compact JSON."""
        texts = [self._content(), json_text(self.tool_calls) if self.tool_calls else ""]
        return {"role": self.role, "content": "\n".join(filter(None, texts))}

    def _content(self) -> str:
        if isinstance(self.content, list):
            return "".join(map(_part_text, self.content))
        return self.content or ""


class ChatRecord(Record, frozen=True, kw_only=True):
    messages: list[Message]
    completion: str | None = None
    max_tokens: int | None = None
    timestamp: float | None = None
    session_id: str | int | None = None
    turn: int | None = None

    def split(self) -> tuple[Messages, Messages]:
        """The prompt's messages, and the answer as none or one more message."""
        messages = [message.plain() for message in self.messages]
        if self.completion is not None:
            return messages, [{"role": "assistant", "content": self.completion}]
        if messages and messages[-1]["role"] == "assistant":
            return messages[:-1], messages[-1:]
        return messages, []


class ChatParser:
    """Chats: seconds. The answer is `completion`, else a last message of the assistant, else `max_tokens` long.

    A chat without `timestamp` arrives one second after the one before it, the first at 0.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = decoder(ChatRecord)
        self._next_s = 0.0

    def __call__(self, line: Line) -> TraceRequest:
        record = self._decode(line.text)
        prompt, output = self._tokens(record)
        num_output_tokens = _num_output_tokens(record, output)
        check_lengths(len(prompt), num_output_tokens)
        return TraceRequest(
            request_id=str(line.number),
            arrival_s=self._arrival_s(record),
            num_prompt_tokens=len(prompt),
            num_output_tokens=num_output_tokens,
            prompt_token_ids=prompt,
            output_token_ids=output,
            tenant=record.owner,
            session=text_or_none(record.session_id),
            turn=record.turn,
        )

    def _tokens(self, record: ChatRecord) -> tuple[list[int], list[int] | None]:
        prompt, answer = record.split()
        if not prompt:
            raise BadLineError("messages hold no prompt: at least one must not be the answer")
        try:
            prompt_ids = self._tokenizer(prompt)
            # By number: at the seam a tokenizer may join what the prompt ends with and the answer begins with.
            return prompt_ids, self._tokenizer(prompt + answer)[len(prompt_ids) :] if answer else None
        except ValueError as error:
            raise BadLineError(f"the tokenizer refuses the messages ({error})") from error

    def _arrival_s(self, record: ChatRecord) -> float:
        arrival_s = self._next_s if record.timestamp is None else record.timestamp
        self._next_s = max(self._next_s, arrival_s + DEFAULT_INTERVAL_S)
        return arrival_s


def _num_output_tokens(record: ChatRecord, output: list[int] | None) -> int:
    if output is not None:
        return len(output)
    return DEFAULT_OUTPUT_TOKENS if record.max_tokens is None else record.max_tokens


def _part_text(part: ContentPart) -> str:
    if part.text is None:
        raise BadLineError(f"a content part of type {part.type!r} has no text, and only text can be tokenized")
    return part.text


class ChatTokenizer:
    """A Hugging Face tokenizer as a function from messages to token ids, by its chat template (ChatML if it has none).

    Messages that do not end with the assistant get the template's opening of its answer. ValueError when the template
    refuses the messages.
    """

    def __init__(self, tokenizer: Any, refusal: type[Exception]) -> None:
        self._tokenizer = tokenizer
        self._refusal = refusal
        self._template = None if tokenizer.chat_template else CHATML_TEMPLATE

    def __call__(self, messages: Messages) -> list[int]:
        answered = messages[-1]["role"] == "assistant"
        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, add_generation_prompt=not answered, tokenize=False
            )
        except self._refusal as error:
            raise ValueError(str(error)) from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(name_or_path: str, *, local_files_only: bool = True) -> ChatTokenizer:
    """The tokenizer of a local folder, or of a model by name from the local cache; nothing is fetched unless asked for.

    ConfigError when there is none; MissingExtraError without transformers. It can be pickled.
    """
    try:
        from jinja2 import TemplateError
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError(error.name or "transformers", "chat") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, local_files_only=local_files_only)
    except (OSError, ValueError) as error:
        raise ConfigError(_no_tokenizer(name_or_path, local_files_only)) from error
    return ChatTokenizer(tokenizer, TemplateError)


def _no_tokenizer(name_or_path: str, local_files_only: bool) -> str:
    way_out = "; local_files_only=False asks the hub, too" if local_files_only else ""
    return f"{name_or_path!r} is neither a folder nor a known model with a tokenizer that loads{way_out}"
