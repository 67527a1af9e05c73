"""What a client can be told in the form that OpenAI's clients expect: `{"error": {message, type, param, code}}`.

Knows nothing of: engines.
"""

from collections.abc import Mapping

from kvpool.errors import AbortedError, KVPoolError, MissingExtraError, RefusedError, UsageError

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("msgspec", "serve") from error

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
NO_RETRY = {"x-should-retry": "false"}
"""What OpenAI's clients read: sending it again would only cost the same again."""


class ApiError(Exception):
    """An answer that is an error. `param` is the field of the body that is wrong, if it is one."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        told = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": told})


def as_api_error(error: KVPoolError) -> ApiError:
    """What a client is told of an error of the library."""
    match error:
        case RefusedError() | UsageError():
            return ApiError(str(error), code="invalid_value")
        case AbortedError():
            return ApiError(str(error), status=503, code="aborted")
        case _:
            return ApiError(str(error), status=500)


def timed_out(timeout_s: float) -> ApiError:
    return ApiError(
        f"the request took longer than the {timeout_s:g} s that this server gives one: ask for fewer tokens, or have "
        "the server started with a larger --timeout",
        status=504,
        code="timeout",
        headers=NO_RETRY,
    )
