"""What a connection asks of an answer: that work ends when the client is gone, and that events reach it one by one.

Knows nothing of: engines, texts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from kvpool.errors import KVPoolError, MissingExtraError
from kvpool.serving.api_errors import ApiError, as_api_error, timed_out

try:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise MissingExtraError("starlette", "serve") from error

T = TypeVar("T")
_FAREWELL_S = 1.0
_DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


async def body_of(request: Request, max_bytes: int) -> bytes:
    """The whole body. ApiError when it is larger.

    What is too large is passed over first: clients read when they have written, and one that cannot write to the end
    never learns why. No more than some times the limit.
    """
    told = request.headers.get("content-length", "")
    announced = int(told) if told.isdigit() else 0
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if max(announced, num_bytes) <= max_bytes:
            parts.append(part)
        elif num_bytes > _PASSED_OVER * max_bytes:
            break
    if max(announced, num_bytes) > max_bytes:
        raise _too_large(max(announced, num_bytes), max_bytes)
    return b"".join(parts)


_PASSED_OVER = 8
"""Times the limit."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """The result of the work, which is cancelled when the client goes away or the time is over.

    ClientGoneError and ApiError say so.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError if gone.done() else timed_out(timeout_s)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, each sent when it is made. What goes wrong on the way is the last event."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], timeout_s: float, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send), self._timeout_s)
        except ClientGoneError:
            return
        except KVPoolError as error:
            await _say_goodbye(send, as_api_error(error))
        except ApiError as error:
            await _say_goodbye(send, error)
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            await send(_part(b"data: " + event + b"\n\n"))
        await send(_part(_DONE, is_last=True))


async def _say_goodbye(send: Send, error: ApiError) -> None:
    """A client that does not read is not waited for."""
    with suppress(TimeoutError):
        await asyncio.wait_for(send(_part(b"data: " + error.body() + b"\n\n" + _DONE, is_last=True)), _FAREWELL_S)


def _part(content: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": not is_last}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(num_bytes: int, max_bytes: int) -> ApiError:
    return ApiError(
        f"the body has {num_bytes} bytes or more, and {max_bytes} are read: send less, or have the server started with "
        "a larger --max-body-mib",
        status=413,
        code="body_too_large",
        headers={"connection": "close"},
    )
