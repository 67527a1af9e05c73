"""What a caller can be told, and when.

A shortage of blocks is not an error: `allocate` answers None. A broken invariant is not one of these either: that is
our fault, and an AssertionError with the invariant's number.
"""


class KVPoolError(Exception):
    """Every error that kvpool raises on purpose."""


class ConfigError(KVPoolError, ValueError):
    """A configuration that cannot work. Raised at construction; names the numbers and the nearest that works."""


class UsageError(KVPoolError, ValueError):
    """The caller broke the protocol of a call. Names request, block and counts; nothing was changed."""


class RefusedError(KVPoolError, ValueError):
    """A request that this cache can never serve, however long it waits. Raised when it arrives, with the numbers."""


class AbortedError(KVPoolError, RuntimeError):
    """A request ends without its answer: its step could not be computed, or the engine stops. Says which."""


class WorkerDied(KVPoolError, RuntimeError):  # noqa: N818
    """Whoever computes steps is gone, and with it all that the cache's blocks contained.

    The next `execute` starts it anew, or raises this again. `at_start`: that has just failed. `how` it ended, without
    what it wrote: clients may be told that.
    """

    def __init__(self, message: str, *, how: str | None = None, at_start: bool = False) -> None:
        super().__init__(message)
        self.how = how or message
        self.at_start = at_start


class TraceError(KVPoolError, ValueError):
    """A trace that cannot be read. Names the file and, where there is one, the line."""


class MissingExtraError(KVPoolError, ImportError):
    """An optional library is not installed. Names the `pip install` that brings it."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed: pip install 'kvpool[{extra}]'")
        self._arguments = (library, extra)

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        """Errors travel between processes."""
        return type(self), self._arguments
