"""Requests for replay tests."""

from collections.abc import Iterator, Sequence

from kvpool.replay.trace import TraceRequest


class Listed:
    """A source of requests that a test wrote down."""

    name = "listed"
    seed = None
    num_skipped = 0

    def __init__(self, requests: Sequence[TraceRequest], block_size: int | None) -> None:
        self.block_size = block_size
        self._requests = requests

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)
