"""What every HTTP request passes: it gets an id, and shows its key where keys are asked for.

Knows nothing of: what is asked for.
"""

import hashlib
import hmac
from collections.abc import Collection
from uuid import uuid4

from kvpool.errors import MissingExtraError
from kvpool.serving.api_errors import ApiError
from kvpool.serving.call import Sender

try:
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise MissingExtraError("starlette", "serve") from error

OPEN_PATHS = {"/health", "/metrics"}
_MOST_ID_LETTERS = 128


class Gate:
    """Around an ASGI app. The app finds a `Sender` in its scope's state."""

    def __init__(self, app: ASGIApp, api_keys: Collection[str] = (), admin_key: str | None = None) -> None:
        self._app = app
        self._admin_key = None if admin_key is None else admin_key.encode()
        self._needs_key = bool(api_keys)
        self._keys = [key.encode() for key in api_keys] + ([self._admin_key] if self._admin_key else [])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id", ""))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        key = self._key(headers.get("authorization", ""))
        if self._needs_key and key is None and scope["path"] not in OPEN_PATHS:
            error = ApiError(
                "a known API key is needed: send it as `Authorization: Bearer KEY`", status=401, code="invalid_api_key"
            )
            answer = Response(error.body(), error.status, {"www-authenticate": "Bearer"}, "application/json")
            await answer(scope, receive, send_with_id)
            return
        tenant = hashlib.sha256(key).hexdigest() if key is not None else None
        is_admin = key is not None and key == self._admin_key
        scope["state"] = {**scope.get("state", {}), "sender": Sender(request_id, tenant, is_admin)}
        await self._app(scope, receive, send_with_id)

    def _key(self, authorization: str) -> bytes | None:
        """The key that was shown if it is one of ours. How long this takes does not tell how near it came."""
        scheme, _, shown = authorization.partition(" ")
        given = shown.strip().encode("utf-8", "surrogateescape")
        known = [key for key in self._keys if hmac.compare_digest(key, given)]
        return known[0] if known and scheme.lower() == "bearer" else None


def _request_id(given: str) -> str:
    """The client's own where it can be repeated in a header, or a new one."""
    is_plain = given.isascii() and given.isprintable() and 0 < len(given) <= _MOST_ID_LETTERS
    return given if is_plain else uuid4().hex
