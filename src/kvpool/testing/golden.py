"""The face of a serving history whose figures vLLM's own manager gave, block by block."""

from collections.abc import Sequence
from typing import Any

from kvpool.core.hit import Hit
from kvpool.core.manager import KVCacheManager
from kvpool.core.publication import Setting
from kvpool.core.request import Request
from kvpool.plan.kinds import FullAttention, LayerKind


class GoldenAdapter:
    """A cache under the calls of a first-come-first-served scheduler that publishes blocks as it allocates them."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache

    def request(self, name: str, tokens: list[int]) -> Request:
        return Request(name, tokens)

    def lookup(self, request: Request) -> tuple[Hit, int]:
        """The cached prefix and its number of tokens; changes nothing."""
        hit = self.cache.match(request)
        return hit, hit.num_tokens

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        hit: Hit | None = None,
        num_hit_tokens: int = 0,
        *,
        first: bool = False,
    ) -> bool:
        """Room for `num_new_tokens` after the computed ones, which become findable at once. False: nothing changed."""
        assert hit is None or hit.num_tokens == num_hit_tokens
        assert first or self.cache.table(request) is not None
        if first and self.cache.num_blocks_to_finish(request, num_new_tokens, hit) > self.cache.num_free_blocks:
            return False
        table = self.cache.allocate(request, num_new_tokens, hit)
        if table is None:
            return False
        self.cache.commit(request, table.num_computed + num_new_tokens)
        return True

    def computed(self, request: Request, num_tokens: int) -> None:
        """The request now has this many computed tokens; 0 once it was freed for a preemption."""
        table = self.cache.table(request)
        assert num_tokens == (table.num_computed if table is not None else 0)

    def append(self, request: Request, token: int) -> None:
        request.append(token)

    def block_ids(self, request: Request) -> list[list[int]]:
        table = self.cache.table(request)
        assert table is not None
        return table.block_ids

    def free(self, request: Request) -> None:
        self.cache.free(request)

    def step(self) -> None:
        """A new scheduler step begins: nothing to do."""


def golden_adapter(
    *, num_blocks: int, groups: Sequence[LayerKind] = (FullAttention(),), publication: Setting = 0, **options: Any
) -> GoldenAdapter:
    """An adapter over a new cache of `num_blocks` blocks of 16 tokens; other options are those of KVCacheManager.

    `publication` is 0, tails at boundaries alone, unless told: so were the histories made.
    """
    return GoldenAdapter(
        KVCacheManager(num_blocks, groups=groups, publication=publication, **{"events": False, **options})
    )
