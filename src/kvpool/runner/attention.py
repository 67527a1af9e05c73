"""Attention over pages.

Every function takes queries as (tokens, heads, head dim) and gives (tokens, heads, value dim). Scores and sums are in
the dtype of the queries; softmax is in fp32.

Knows nothing of: requests, models, where pages come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvpool.runner.products import has_product, product

TILE = 1 << 19
"""Scores that are computed at a time: they stay in the processor's caches."""
LEAST_TILED = 1 << 15
"""Of fewer scores a head, one call for all heads is faster."""

Attended = tuple[torch.Tensor, torch.Tensor]
"""Outputs, and the logarithm of the sum of the exponents of their scores: two of them can be merged."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a layer does beside plain attention: `softcap` bounds scores; `sinks`: a score for nothing, by head."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> Attended:
    """(batch, heads, queries, dim) each; `mask` is added to the scores. Every query looks at one key at least.

    The sum is (batch, heads, queries), in fp32. Sinks are not part of it: see `with_sinks`.
    """
    if rule.softcap is None and query.device.type == "cpu" and value.shape[-1] == query.shape[-1]:
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=rule.scale
        )
        return out, total
    scores = (query @ key.transpose(-1, -2)).float() * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    total = scores.logsumexp(-1)
    return (scores - total[..., None]).exp().to(value.dtype) @ value, total


def merged(one: Attended, other: Attended) -> Attended:
    """What attention to the keys of both gives."""
    total = torch.logaddexp(one[1], other[1])
    first, second = ((each - total).exp()[..., None].to(one[0].dtype) for each in (one[1], other[1]))
    return one[0] * first + other[0] * second, total


def with_sinks(attended: Attended, sinks: torch.Tensor | None) -> torch.Tensor:
    """Outputs (..., heads, queries, dim) when a part of the attention goes to nothing: `sinks` is a score a head."""
    out, total = attended
    if sinks is None:
        return out
    return out * torch.sigmoid(total - sinks.float()[:, None])[..., None].to(out.dtype)


def attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, rule: Rule
) -> torch.Tensor:
    """Tokens of one request: the keys are theirs and those of the tokens before them, the last one's last."""
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    if rule.is_plain and num_queries * group * num_keys >= LEAST_TILED and has_product(query):
        return _attend_tiles(query, key, value, window, rule.scale)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (query, key, value))
    if rule.is_plain and num_queries == num_keys and (window is None or num_keys <= window):
        out = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=num_queries > 1, scale=rule.scale, enable_gqa=group > 1
        )
        return out[0].transpose(0, 1)
    mask = chunk_mask(num_queries, num_keys, window, query)
    if rule.is_plain:
        out = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=rule.scale, enable_gqa=group > 1
        )
        return out[0].transpose(0, 1)
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    out = with_sinks(attend(queries, keys, values, mask, rule), rule.sinks)
    return out[0].transpose(0, 1)


def _attend_tiles(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scale: float
) -> torch.Tensor:
    """The same in fp32, some queries at a time, with those of one key head as rows of one matrix."""
    num_queries, num_heads, dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    group, before = num_heads // num_kv_heads, num_keys - num_queries
    grouped = query.view(num_queries, num_kv_heads, group, dim).transpose(0, 1).mul(scale)
    keys, values = (x.transpose(0, 1).contiguous() for x in (key, value))
    out = query.new_empty(num_queries, num_kv_heads, group, value.shape[-1])
    tile = max(TILE // (num_keys * group), 32)
    for start in range(0, num_queries, tile):
        stop = min(start + tile, num_queries)
        last = before + stop
        first = 0 if window is None else max(before + start - window + 1, 0)
        masked = stop - start if window is None else last - first
        mask = chunk_mask(stop - start, masked, window, query)
        for head in range(num_kv_heads):
            rows = grouped[head, start:stop].flatten(0, 1)
            scores = product(rows, keys[head, first:last])
            if mask is not None:
                scores.view(stop - start, group, -1)[..., -masked:].add_(mask[:, None])
            found = product(scores.softmax(-1), values[head, first:last].t())
            out[start:stop, head] = found.view(stop - start, group, -1)
    return out.flatten(1, 2)


def chunk_mask(num_queries: int, num_keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
    """Added to scores: 0 where the token looks, minus infinity elsewhere. None where all look at everything."""
    if num_queries == 1 and (window is None or num_keys <= window):
        return None
    at = torch.arange(num_keys - num_queries, num_keys, device=like.device)[:, None]
    other = torch.arange(num_keys, device=like.device)[None]
    looks = other <= at
    if window is not None:
        looks &= other > at - window
    return torch.zeros(looks.shape, dtype=like.dtype, device=like.device).masked_fill_(~looks, -torch.inf)


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows that begin with the same blocks: these rows, in order, and the blocks."""

    rows: torch.Tensor
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One-token rows of about equal length, and what each looks at alone.

    `rows` None: all of them. `block_ids` (rows, blocks): from the first that counts; `mask` (rows, 1, 1, tokens) is
    added to the scores; `unseen` are the places, over all rows, of tokens that nobody looks at: whatever stands there,
    NaN too, must not come through.
    """

    rows: torch.Tensor | None
    block_ids: torch.Tensor
    mask: torch.Tensor
    unseen: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What one-token rows look at, for all layers of one group and window. What several share is read once."""

    parts: tuple[Part, ...]
    shared: tuple[Shared, ...]


LEAST_SHARED_BLOCKS = 4


def plan_decode(
    tables: torch.Tensor, lengths: torch.Tensor, block_size: int, window: int | None, dtype: torch.dtype
) -> DecodePlan:
    """`tables` (rows, blocks) and `lengths`, the tokens of each row with its new one, on the CPU."""
    first = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0) // block_size
    shared: tuple[Shared, ...] = ()
    if window is None and len(lengths) > 1:
        shared = _shared_blocks(tables, lengths, block_size)
        for each in shared:
            first[each.rows] = each.block_ids.shape[0]
    last = (lengths + block_size - 1) // block_size
    # Rows of one part are filled up to the longest of it: less than twice as much is read as is looked at.
    sizes = [(count - 1).bit_length() for count in (last - first).tolist()]
    parts = []
    for size in sorted(set(sizes)):
        rows = torch.tensor([row for row, its in enumerate(sizes) if its == size])
        parts.append(_part(rows, tables[rows], lengths[rows], first[rows], last[rows], block_size, window, dtype))
    if len(parts) == 1:
        parts = [Part(None, parts[0].block_ids, parts[0].mask, parts[0].unseen)]
    return DecodePlan(tuple(parts), shared)


def _part(
    rows: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> Part:
    columns = first[:, None] + torch.arange(int((last - first).max()))
    block_ids = tables.gather(1, columns.clamp(max=tables.shape[1] - 1).long()).long()
    block_ids = block_ids.masked_fill(columns >= last[:, None], 0)
    positions = (columns[:, :, None] * block_size + torch.arange(block_size)).flatten(1)
    looks = positions < lengths[:, None]
    if window is not None:
        looks &= positions >= lengths[:, None] - window
    mask = torch.zeros(looks.shape, dtype=dtype).masked_fill_(~looks, -torch.inf)
    return Part(rows, block_ids, mask[:, None, None], (~looks).flatten().nonzero()[:, 0])


def _shared_blocks(tables: torch.Tensor, lengths: torch.Tensor, block_size: int) -> tuple[Shared, ...]:
    """Rows by their first blocks. The last token of a row is never in a shared block: that one is full."""
    found = []
    full = (lengths - 1) // block_size
    heads = tables[:, 0]
    for head in heads.unique().tolist():
        rows = (heads == head).nonzero()[:, 0]
        if len(rows) < 2:
            continue
        own = tables[rows, : int(full[rows].min())]
        same = (own == own[0]).all(0)
        count = int(same.long().cumprod(0).sum())
        if count >= LEAST_SHARED_BLOCKS:
            found.append(Shared(rows, own[0, :count]))
    return tuple(found)


def attend_decode(query: torch.Tensor, pages: Sequence[torch.Tensor], plan: DecodePlan, rule: Rule) -> torch.Tensor:
    """One token a row. Queries of one key head are rows of one matrix, so that keys are not repeated."""
    num_rows, num_heads, dim = query.shape
    num_kv_heads = pages[0].shape[-2]
    grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    out = query.new_empty(*grouped.shape[:3], pages[1].shape[-1])
    total = query.new_empty(grouped.shape[:3], dtype=torch.float32)
    for part in plan.parts:
        keys, values = (read(each, part.block_ids, query.dtype, part.unseen) for each in pages)
        own = grouped if part.rows is None else grouped[part.rows]
        attended = attend(own, keys.transpose(1, 2), values.transpose(1, 2), part.mask, rule)
        if part.rows is None:
            out, total = attended
        else:
            out[part.rows], total[part.rows] = attended
    for shared in plan.shared:
        rows = shared.rows
        keys, values = (read(each, shared.block_ids[None], query.dtype).transpose(1, 2) for each in pages)
        one = attend(grouped[rows].transpose(0, 1).flatten(1, 2)[None], keys, values, None, rule)
        first, its_total = (each[0].unflatten(1, (len(rows), -1)).transpose(0, 1) for each in one)
        out[rows], total[rows] = merged((out[rows], total[rows]), (first, its_total))
    out, total = out.flatten(1, 2), total.flatten(1, 2)
    return with_sinks((out[:, :, None], total[:, :, None]), rule.sinks)[:, :, 0]


def read(
    pages: torch.Tensor, block_ids: torch.Tensor, dtype: torch.dtype, unseen: torch.Tensor | None = None
) -> torch.Tensor:
    """What stands in these blocks: (rows, tokens, heads, dim) of pages (blocks, block size, heads, dim)."""
    found = pages.index_select(0, block_ids.flatten()).to(dtype)
    tokens = found.view(-1, *pages.shape[2:])
    if unseen is not None and len(unseen):
        tokens.index_fill_(0, unseen, 0)
    return tokens.view(block_ids.shape[0], -1, *pages.shape[2:])
