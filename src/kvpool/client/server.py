"""A server that speaks OpenAI's interface, as asyncio programs see it.

Owns: the connections to it.
Knows nothing of: what is asked, and whose server it is.
"""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from kvpool.client.answer import Answer, AnswerError, told
from kvpool.errors import ConfigError, MissingExtraError

try:
    import httpx
    import msgspec
except ImportError as error:
    raise MissingExtraError(error.name or "httpx", "client") from error

_CONNECT_S = 10.0
_DATA = "data:"
_NOT_FOUND = 404


class Server:
    """Use it with `async with`. `url` is where the server is, with or without `/v1`; `socket` a Unix socket instead.

    What a server cannot or will not do raises AnswerError.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, socket: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            if httpx.URL(self.url).scheme not in ("http", "https") or not httpx.URL(self.url).host:
                raise httpx.InvalidURL("no scheme")
        except httpx.InvalidURL:
            raise ConfigError(f"{url!r} is no address of a server: http://127.0.0.1:8000 is one") from None
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key has letters that HTTP does not carry: plain ASCII is needed")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            transport=httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None)),
        )

    async def __aenter__(self) -> "Server":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def stream(self, path: str, body: bytes, answer: Answer) -> AsyncIterator[str]:
        """The pieces of text of a streamed answer, whose times and counts are kept in `answer`.

        Leaving it before its end closes the connection: a server that minds cancels the request then.
        """
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream("POST", path, content=body, headers=headers) as response:
                await _require_ok(response)
                async for line in response.aiter_lines():
                    if line.startswith(_DATA):
                        text = answer.take(line[len(_DATA) :].strip().encode())
                        if text:
                            yield text
        except httpx.HTTPError as error:
            raise AnswerError(self._why(error)) from None

    async def models(self) -> list[str]:
        """The names of what is served."""
        answer = await self._json("GET", "/v1/models")
        names = [str(model["id"]) for model in answer.get("data", ()) if isinstance(model, dict) and "id" in model]
        if not names:
            raise AnswerError(f"{self.url} lists no models at /v1/models")
        return names

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Token ids, without those that are put around a text."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens = (await self._json("POST", "/tokenize", body)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise AnswerError(f"{self.url}/tokenize gives no token ids")
        return tokens

    async def reset(self) -> None:
        """Have all cached content forgotten."""
        try:
            await self._json("POST", "/reset_prefix_cache")
        except AnswerError as error:
            if error.status == _NOT_FOUND:
                raise AnswerError(
                    f"{self.url} has no /reset_prefix_cache, so it cannot be told to forget (vLLM has it with "
                    "VLLM_SERVER_DEV_MODE=1)",
                    error.status,
                ) from None
            raise

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
            await _require_ok(response)
        except httpx.HTTPError as error:
            raise AnswerError(self._why(error)) from None
        except AnswerError as error:
            raise AnswerError(f"{self.url}{path}: {error}", error.status) from None
        try:
            answer = msgspec.json.decode(response.content) if response.content else {}
        except msgspec.DecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise AnswerError(f"{self.url}{path} does not answer with a JSON object")
        return answer

    def _why(self, error: httpx.HTTPError) -> str:
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                return f"nothing answers at {self.url}: {error or 'no connection in time'}"
            case httpx.TimeoutException():
                return f"{self.url} did not answer in time"
            case _:
                return f"{self.url} ended the connection: {error or type(error).__name__}"


async def _require_ok(response: httpx.Response) -> None:
    if response.is_success:
        return
    content = await response.aread()
    try:
        said = told(msgspec.json.decode(content))
    except msgspec.DecodeError:
        said = told(content.decode(errors="replace"))
    raise AnswerError(f"HTTP {response.status_code}: {said or response.reason_phrase}", response.status_code)
