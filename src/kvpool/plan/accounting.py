"""What a request of a length takes, and how many tokens fit, as releases of vLLM count it.

Knows nothing of: memory, models.
"""

from kvpool.plan.demand import size_of
from kvpool.plan.deployment import Deployment
from kvpool.plan.kinds import ChunkedLocal, CrossAttention, LayerKind, SlidingWindow, StateSpace, cdiv
from kvpool.plan.layout import Group, Layout
from kvpool.plan.rules import Rule


def vllm_blocks(layout: Layout, rule: Rule, deployment: Deployment, num_tokens: int, num_encoder_tokens: int) -> int:
    """The blocks of one request, never less than 1: by groups, or all groups' bytes through the first one's page."""
    counting = Counting(layout, rule, deployment, num_tokens, num_encoder_tokens)
    if not rule.sums_bytes:
        return max(sum(counting.blocks(group.kind) for group in layout.groups), 1)
    taken = sum(counting.blocks(group.kind) * _page_bytes(group) for group in layout.groups)
    return max(cdiv(taken, _page_bytes(layout.groups[0])), 1)


def vllm_tokens(
    layout: Layout, rule: Rule, deployment: Deployment, num_blocks: int, max_model_len: int, concurrency: float
) -> int:
    """The figure of the line "GPU KV cache size"."""
    if rule.tokens == "length":
        return int(concurrency * max_model_len)
    mode = cache_mode(layout, rule, deployment)
    smallest = min(_manager_block_size(kind, mode, max_model_len) for kind in layout.kinds)
    return num_blocks // len(layout.groups) * smallest


def _manager_block_size(kind: LayerKind, mode: str, max_model_len: int) -> int:
    """Without prefix caching a block of states stands for a whole request."""
    if isinstance(kind, StateSpace) and mode == "none":
        return max_model_len
    return size_of(kind)


def _page_bytes(group: Group) -> int:
    """Of the group, padding layers too."""
    return sum(page.page_bytes for page in group.pages) + group.num_padding_layers * group.page_bytes


def cache_mode(layout: Layout, rule: Rule, deployment: Deployment) -> str:
    """What states keep for prefix caching: nothing in a model of states alone, unless told otherwise."""
    has_others = any(not isinstance(kind, StateSpace) for kind in layout.kinds)
    return deployment.mamba_cache_mode or ("align" if rule.caches_states and has_others else "none")


def vllm_needed_bytes(layout: Layout, rule: Rule, counting: "Counting", block_bytes: int) -> int:
    """What a release wants to see free for one request, of a stage whose blocks take `block_bytes`."""
    null_block = block_bytes if rule.subtracts_null_block else 0
    match rule.capacity:
        case "layers":
            pages = sum(counting.blocks(g.kind) * sum(page.page_bytes for page in g.pages) for g in layout.groups)
            return pages * block_bytes // layout.block_bytes + null_block
        case "first":
            return counting.blocks(layout.groups[0].kind) * block_bytes + null_block
        case _:
            return sum(counting.blocks(kind) for kind in layout.kinds) * block_bytes + null_block


class Counting:
    """What a release charges one request of so many tokens in each group."""

    def __init__(
        self, layout: Layout, rule: Rule, deployment: Deployment, num_tokens: int, num_encoder_tokens: int
    ) -> None:
        self._num_tokens = num_tokens
        self._chunk = rule.in_flight_steps * deployment.max_num_batched_tokens
        self._state_mode = cache_mode(layout, rule, deployment)
        self._encoder = deployment.max_num_batched_tokens if rule.encoder_is_batch else num_encoder_tokens

    def blocks(self, kind: LayerKind) -> int:
        """Of one request in one group."""
        size, length = size_of(kind), self._num_tokens
        match kind:
            case SlidingWindow(window=window):
                return cdiv(min(window - 1 + self._chunk, length), size) + 1
            case ChunkedLocal(chunk_size=chunk):
                return cdiv(min(chunk + self._chunk, length), size)
            case StateSpace(num_scratch_blocks=scratch):
                return {"none": 1, "align": 2, "all": cdiv(length, size)}[self._state_mode] + scratch
            case CrossAttention():
                return cdiv(self._encoder, size)
        return cdiv(length, size)
