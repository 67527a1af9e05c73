"""What one step computes: the value between the scheduler and whoever runs the model.

Knows nothing of: blocks, and how the requests were chosen.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from kvpool.core.request import RequestLike

NextTokens: TypeAlias = Callable[[Sequence[RequestLike]], Sequence[int]]
"""What a model would say next, for each of these requests."""


@dataclass(slots=True)
class Batch:
    """What one step computes: tokens starts[i] .. starts[i] + counts[i] - 1 of requests[i], which have room.

    The first `num_decoding` requests decode, one token each. The last `num_admitted` were admitted in this step; the
    tokens before their start are their hit. `loads` are requests whose tokens start .. stop - 1 are to be loaded from
    outside; they are computed further once the scheduler is told that these are there.
    """

    requests: list[RequestLike] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    num_decoding: int = 0
    num_admitted: int = 0
    loads: list[tuple[RequestLike, int, int]] = field(default_factory=list)

    def add(self, request: RequestLike, start: int, count: int) -> None:
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)

    def sample(self, next_tokens: NextTokens) -> list[int | None]:
        """A token for each request that has none left to compute after this batch, None for the others."""
        first = self.num_decoding
        chunks = zip(self.requests[first:], self.starts[first:], self.counts[first:], strict=True)
        is_done = [start + count == request.num_tokens for request, start, count in chunks]
        done = [request for request, done in zip(self.requests[first:], is_done, strict=True) if done]
        given = iter(next_tokens(self.requests[:first] + done))
        sampled: list[int | None] = list(islice(given, first))
        return sampled + [next(given) if done else None for done in is_done]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[tuple[RequestLike, int, int]]:
        return zip(self.requests, self.starts, self.counts, strict=True)
