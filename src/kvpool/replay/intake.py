"""From a trace's line to the request that the cache sees.

Owns: a number for each request, and for each block of each tenant where tenants are kept apart.
Knows nothing of: the cache.
"""

from collections.abc import Sequence

from kvpool.core.request import Request, RequestLike
from kvpool.errors import ConfigError
from kvpool.replay.named import NamedRequest, names_at
from kvpool.replay.settings import ReplaySettings, Source
from kvpool.replay.trace import TraceRequest
from kvpool.types import BlockHash


class Intake:
    """Makes requests: of tokens where the trace has them, else of the trace's names, else like no other.

    `block_size` is the cache's: the tokens that have a name of their own.
    """

    def __init__(self, source: Source, settings: ReplaySettings, block_size: int) -> None:
        self._trace_block_size = source.block_size
        self._block_size = block_size
        self._raw = settings.raw
        self._separate_tenants = settings.separate_tenants
        self._num_requests = 0
        self._own: dict[tuple[str | None, BlockHash], int] = {}

    def request(self, traced: TraceRequest) -> RequestLike:
        """A new request for this line. Raw: its prompt is as many full blocks as the trace gives ids."""
        max_tokens = max(traced.num_output_tokens, 1)
        if traced.prompt_token_ids is not None:
            tenant = traced.tenant if self._separate_tenants else None
            return Request(traced.request_id, traced.prompt_token_ids, tenant=tenant, max_tokens=max_tokens)
        self._num_requests += 1
        names = self._names(traced)
        return NamedRequest(
            traced.request_id,
            max(len(names) * self._block_size, 1) if self._raw else traced.num_prompt_tokens,
            names,
            self._block_size,
            serial=self._num_requests,
            max_tokens=max_tokens,
        )

    def _names(self, traced: TraceRequest) -> Sequence[BlockHash]:
        if traced.block_ids is None or self._trace_block_size is None:
            if self._raw:
                raise ConfigError(
                    "raw counting counts a trace's block ids, and this one has none: it gives lengths only"
                )
            return ()
        names = names_at(traced.block_ids, self._trace_block_size, self._block_size)
        if not self._raw:
            names = names[: traced.num_prompt_tokens // self._block_size]
        if self._separate_tenants:
            return [self._own.setdefault((traced.tenant, name), len(self._own)) for name in names]
        return names
