"""The HTTP interface: which path does what, and how errors are told.

Knows nothing of: sockets, steps.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time
from typing import Any, TypeAlias, TypeVar, cast

from kvpool.errors import KVPoolError, MissingExtraError
from kvpool.serving.api_errors import ApiError, as_api_error, timed_out
from kvpool.serving.async_engine import AsyncEngine, FullError
from kvpool.serving.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read, turns_of
from kvpool.serving.call import Call, Form, Sender
from kvpool.serving.chat import ChatForm
from kvpool.serving.choice import Piece
from kvpool.serving.completions import CompletionForm
from kvpool.serving.connection import ClientGoneError, EventStream, body_of, unless_gone
from kvpool.serving.gate import Gate
from kvpool.serving.tokenizer import Tokenizer

try:
    import msgspec
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtraError(error.name or "starlette", "serve") from error

_JSON = "application/json"
_CLIENT_GONE = 499
B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")
Answer: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`timeout_s` for a whole request, `drain_s` for all of them when the server stops.

    With `api_keys` a client must show one, and shares no cache entries with those of another key. What touches the
    entries of all takes `admin_key`, where there are keys. With `requires_cache_salt` a request without a salt is
    refused.
    """

    model_name: str
    api_keys: Collection[str] = ()
    admin_key: str | None = None
    requires_cache_salt: bool = False
    timeout_s: float = 600.0
    drain_s: float = 30.0
    retry_after_s: int = 1
    max_body_bytes: int = 16 << 20


def make_app(engine: AsyncEngine, tokenizer: Tokenizer, config: ServerConfig) -> Starlette:
    """An ASGI app; it starts the engine and stops it."""
    served = _Served(engine, tokenizer, config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    return Starlette(
        routes=[
            Route("/v1/completions", served.completions, methods=["POST"]),
            Route("/v1/chat/completions", served.chat, methods=["POST"]),
            Route("/v1/models", served.models),
            Route("/v1/models/{name:path}", served.model),
            Route("/tokenize", served.tokenize, methods=["POST"]),
            Route("/detokenize", served.detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", served.reset_prefix_cache, methods=["POST"]),
            Route("/health", served.health),
            Route("/metrics", served.metrics),
        ],
        middleware=[Middleware(Gate, api_keys=config.api_keys, admin_key=config.admin_key)],
        exception_handlers=cast(Any, {
            ApiError: _tell,
            KVPoolError: served.tell_own,
            HTTPException: _tell_http,
            ClientGoneError: _tell_nobody,
            ClientDisconnect: _tell_nobody,
            Exception: _tell_fault,
        }),
        lifespan=lifespan,
    )  # fmt: skip


class _Served:
    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._started_s = int(time())

    # -- generating

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionForm(await self._read(request, CompletionBody)))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatForm(await self._read(request, ChatBody)))

    async def _generate(self, request: Request, form: Form) -> Response:
        self._require_salt(form.body)
        sender: Sender = request.state.sender
        call = Call(self._engine, self._tokenizer, self._config.model_name, form, sender)
        is_handed_over = False
        try:
            work = _start(call) if form.body.stream else _whole(call)
            answer = await unless_gone(request.receive, work, self._config.timeout_s)
            if answer is not None:
                return _json(answer)
            is_handed_over = True
        finally:
            if not is_handed_over:
                call.close()
        return EventStream(_events(call), call.close, self._config.timeout_s, {})

    def _require_salt(self, body: Body) -> None:
        if self._config.requires_cache_salt and body.cache_salt is None:
            raise ApiError(
                "cache_salt is missing, and this server requires one: send a secret text that only those know who may "
                "share cache entries",
                param="cache_salt",
            )

    # -- around it

    async def models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._config.model_name:
            raise _unknown_model(name, self._config.model_name)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._config.model_name, "object": "model", "created": self._started_s, "owned_by": "kvpool"}
        return {**card, "max_model_len": self._engine.max_model_len}

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("either prompt or messages is needed, and not both", param="prompt")
        tokens = await self._on_input(request, lambda: self._tokens(body))
        return _json({"count": len(tokens), "max_model_len": self._engine.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeBody)
        size = self._tokenizer.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < size:
                raise ApiError(f"token id {token_id} is not of this model: 0 to {size - 1}", param="tokens")
        if len(body.tokens) > self._engine.max_model_len:
            raise ApiError(f"{len(body.tokens)} tokens: {self._engine.max_model_len} at most", param="tokens")
        text = await self._on_input(request, lambda: self._tokenizer.decode(body.tokens, skip_special_tokens=False))
        return _json({"prompt": text})

    async def reset_prefix_cache(self, request: Request) -> Response:
        sender: Sender = request.state.sender
        if (self._config.api_keys or self._config.admin_key) and not sender.is_admin:
            raise ApiError(
                "this would take the cache entries of all clients: the key that the server was started with as "
                "--admin-key is needed",
                status=403,
                code="admin_key_needed",
            )
        preempts = request.query_params.get("reset_running_requests", "").lower() in {"1", "true"}
        if not await self._engine.reset_prefix_cache(preempt_running=preempts):
            raise ApiError(
                "requests run, and hold blocks: try again when none do, or add ?reset_running_requests=true, which has "
                "them computed again",
                status=409,
            )
        return _json({"success": True})

    async def health(self, _: Request) -> Response:
        return Response(status_code=200 if self._engine.is_well else 503)

    async def metrics(self, _: Request) -> Response:
        return Response(self._engine.metrics.text(), media_type="text/plain; version=0.0.4")

    async def tell_own(self, request: Request, error: Exception) -> Response:
        if isinstance(error, FullError):
            headers = {"retry-after": str(self._config.retry_after_s)}
            told = ApiError(str(error), status=429, code="queue_full", headers=headers)
            self._engine.metrics.requests.labels("refused").inc()
        else:
            assert isinstance(error, KVPoolError)
            told = as_api_error(error)
        return await _tell(request, told)

    def _tokens(self, body: TokenizeBody) -> list[int]:
        if body.messages is not None:
            return self._tokenizer.encode_chat(turns_of(body.messages))
        return self._tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)

    async def _on_input(self, request: Request, make: Callable[[], T]) -> T:
        return await unless_gone(request.receive, self._engine.on_input(make), self._config.timeout_s)

    async def _read(self, request: Request, kind: type[B]) -> B:
        try:
            content = await asyncio.wait_for(body_of(request, self._config.max_body_bytes), self._config.timeout_s)
        except TimeoutError:
            raise timed_out(self._config.timeout_s) from None
        body = read(content, kind)
        model, name = getattr(body, "model", None), self._config.model_name
        if model is not None and model != name:
            raise _unknown_model(model, name)
        return body


def _unknown_model(name: object, served: str) -> ApiError:
    return ApiError(
        f"the model {name!r} is not served here: {served!r} is", status=404, param="model", code="model_not_found"
    )


async def _start(call: Call) -> None:
    await call.start()


async def _whole(call: Call) -> Answer:
    """The answer in one piece."""
    await call.start()
    pieces: list[list[Piece]] = [[] for _ in range(call.stream.num_requests)]
    async for index, piece in call.pieces():
        pieces[index].append(piece)
    choices = [call.form.choice(call, index, own) for index, own in enumerate(pieces)]
    return {**call.head, "object": call.form.name, "choices": choices, "usage": call.usage()}


async def _events(call: Call) -> AsyncIterator[bytes]:
    """The answer as it comes, in JSON."""
    head = {**call.head, "object": call.form.chunk_name}
    includes_usage = call.form.body.includes_usage
    if includes_usage:
        head["usage"] = None
    for index in range(call.stream.num_requests):
        opening = call.form.opening(call, index)
        if opening is not None:
            yield msgspec.json.encode({**head, "choices": [opening]})
    async for index, piece in call.pieces():
        if piece.text or piece.logprobs or piece.finish is not None:
            yield msgspec.json.encode({**head, "choices": [call.form.chunk(call, index, piece)]})
    if includes_usage:
        yield msgspec.json.encode({**head, "choices": [], "usage": call.usage()})


def _json(answer: Answer) -> Response:
    return Response(msgspec.json.encode(answer), media_type=_JSON)


async def _tell(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, error.headers, _JSON)


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail}"
    return await _tell(request, ApiError(told, status=error.status_code, headers=error.headers))


async def _tell_nobody(_: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=_CLIENT_GONE)


async def _tell_fault(request: Request, _: Exception) -> Response:
    return await _tell(request, ApiError("a fault of the server's own: its log has more", status=500))
