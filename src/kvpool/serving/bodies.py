"""What clients send: the fields that are read, the ones that would change an answer and are refused, and their limits.

Fields that are not named here change no answer, and are passed over.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvpool.engine.sampling import MOST_LOGPROBS, SamplingParams
from kvpool.errors import MissingExtraError
from kvpool.serving.api_errors import ApiError
from kvpool.serving.tokenizer import Message

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("msgspec", "serve") from error

MOST_CHOICES = 128
MOST_STOPS = 16
_SEEDS = 2**63
_MOST_TOP_K = 2**31

Prompt = str | list[int]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """What both endpoints read. None is as good as not sent."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, choice: int, num_logprobs: int | None, num_prompt_logprobs: int | None) -> SamplingParams:
        """How one of the choices is sampled: a seed that was given counts up with them."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=None if self.seed is None else (self.seed + choice) % _SEEDS,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
        )

    def validate(self) -> None:
        """ApiError that names the first field that is out of its limits."""
        _within("n", self.n, 1, MOST_CHOICES)
        _within("temperature", self.temperature, 0, 2)
        _within("prompt_logprobs", self.prompt_logprobs, 0, MOST_LOGPROBS)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ApiError(f"top_p is {self.top_p}: above 0 and up to 1, 1 for all tokens", param="top_p")
        if self.top_k is not None and not -1 <= self.top_k < _MOST_TOP_K:
            raise ApiError(f"top_k is {self.top_k}: 1 or more, 0 or -1 for all tokens", param="top_k")
        if len(self.stops) > MOST_STOPS:
            raise ApiError(f"stop has {len(self.stops)} strings: {MOST_STOPS} at most", param="stop")
        if self.cache_salt == "":
            raise ApiError("cache_salt is empty: send a text, or leave it out to share with all", param="cache_salt")
        if "" in self.stops:
            raise ApiError("stop has an empty string, which is everywhere: leave it out", param="stop")
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options come with stream true: set that, or leave them out", param="stream_options")


class CompletionBody(Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[Prompt]:
        """Texts or token ids, one each. ApiError unless `prompt` is one of the four forms."""
        match self.prompt:
            case str(text):
                return [text]
            case []:
                raise ApiError("prompt is an empty list: give a text, token ids, or a list of either", param="prompt")
            case [*items] if all(isinstance(item, int) for item in items):
                return [[item for item in items if isinstance(item, int)]]
            case [*items] if all(isinstance(item, str) for item in items) or all(
                isinstance(item, list) for item in items
            ):
                return [item for item in items if not isinstance(item, int)]
        raise ApiError("prompt mixes texts and token ids: send one kind in a request", param="prompt")

    def validate(self) -> None:
        super().validate()
        _within("max_tokens", self.max_tokens, 0 if self.echo else 1, None)
        _within("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.stream and self.echo and self.logprobs is not None:
            raise ApiError("echo with logprobs is not streamed: set stream to false", param="echo")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError("prompt_logprobs are not streamed: set stream to false", param="prompt_logprobs")


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def validate(self) -> None:
        super().validate()
        _within("max_tokens", self.max_tokens, 1, None)
        _within("max_completion_tokens", self.max_completion_tokens, 1, None)
        _within("top_logprobs", self.top_logprobs, 0, MOST_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs come with logprobs true: set that, or leave them out", param="top_logprobs")
        turns_of(self.messages)


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


B = TypeVar("B", bound=msgspec.Struct)


def read(body: bytes, kind: type[B]) -> B:
    """The body of a request. ApiError where it is no JSON of that form, or asks for what is not offered."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in fields.keys() & _REFUSED.keys():
            _refuse(name, msgspec.json.decode(fields[name]))
        read = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise ApiError(f"the body is not of the right form: {error}", param=path.rstrip("`") or _named(text)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {error}") from None
    if isinstance(read, Body):
        read.validate()
    return read


def turns_of(messages: Sequence[Message]) -> list[Message]:
    """The messages with their contents as text. ApiError where one is of another kind."""
    if not messages:
        raise ApiError("messages is empty: at least one turn is needed to answer to", param="messages")
    return [_turn(index, message) for index, message in enumerate(messages)]


def _named(message: str) -> str | None:
    """The field in `Object missing required field `prompt``."""
    return message.split("`")[1] if "field `" in message else None


def _within(name: str, value: float | None, least: float, most: float | None) -> None:
    if value is not None and not (least <= value and (most is None or value <= most)):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        raise ApiError(f"{name} is {value}: {limits}", param=name, code="invalid_value")


def _turn(index: int, message: Mapping[str, Any]) -> Message:
    if not isinstance(message.get("role"), str):
        raise ApiError(f"message {index} has no role: system, user or assistant", param=f"messages[{index}].role")
    return {**message, "content": _text(index, message.get("content"))}


def _text(index: int, content: object) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list() if all(_is_text(part) for part in content):
            return "".join(part["text"] for part in content)
    raise ApiError(
        f"the content of message {index} is neither text nor a list of text parts, and this model reads nothing else",
        param=f"messages[{index}].content",
    )


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


_NOT_SAMPLED = "leave it out: sampling here is by temperature, top_p, top_k and seed"
_NO_TOOLS = "leave it out, and describe tools in the messages"
_PLAIN_TEXT = "leave it out: answers are plain text, so check the form at your side"
_NO_TEMPLATE = "leave it out: the model's own chat template is used, or send a finished prompt to /v1/completions"
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys(("tools", "functions"), (([],), _NO_TOOLS)),
    **dict.fromkeys(("tool_choice", "function_call"), (("none", "auto"), _NO_TOOLS)),
    "response_format": (({"type": "text"},), _PLAIN_TEXT),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ((), _PLAIN_TEXT)
    ),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens"), ((0,), _NOT_SAMPLED)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), ((1,), _NOT_SAMPLED)),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids"), (({}, []), _NOT_SAMPLED)),
    "use_beam_search": ((False,), _NOT_SAMPLED),
    "best_of": ((1,), "leave it out: ask for n choices and take the best of them at your side"),
    "suffix": (("",), "leave it out: text is only ever continued at its end"),
    "modalities": ((["text"],), "leave it out: answers are text"),
    "audio": ((), "leave it out: answers are text"),
    "web_search_options": ((), "leave it out: nothing is looked up"),
    "reasoning_effort": ((), "leave it out: the model answers in one way"),
    "truncate_prompt_tokens": ((), "leave it out, and shorten the prompt at your side"),
    "include_stop_str_in_output": ((False,), "leave it out: the text ends before a stop string"),
    "skip_special_tokens": ((True,), "leave it out: special tokens are no part of the text"),
    **dict.fromkeys(("chat_template", "documents"), ((), _NO_TEMPLATE)),
    "chat_template_kwargs": (({},), _NO_TEMPLATE),
    "add_generation_prompt": ((True,), _NO_TEMPLATE),
    "continue_final_message": ((False,), _NO_TEMPLATE),
}
"""Fields that would change an answer, the values that would not, and the way out."""


def _refuse(name: str, value: object) -> None:
    harmless, way_out = _REFUSED[name]
    if value is not None and value not in harmless:
        shown = msgspec.json.encode(value).decode()
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        raise ApiError(f"{name} is {shown}, and is not offered: {way_out}", param=name, code="unsupported_parameter")
