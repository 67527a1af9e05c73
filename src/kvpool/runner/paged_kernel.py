"""Attention by a kernel that reads pages itself, where torch has one: FlashAttention 3 on Hopper, 4 on Blackwell.

torch offers them where the library is installed (`flash_attn_interface`, `flash_attn.cute`). All else is computed by
`kvpool.runner.attention`, which reads pages into one piece first.

Knows nothing of: requests, layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvpool.runner.attention import Rule

_IMPLEMENTATIONS: Mapping[int, str] = {9: "FA3", 10: "FA4"}
"""By the major compute capability on which they read pages."""
_DTYPES = frozenset({torch.float16, torch.bfloat16})
_LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of a call, one behind the other, as kernels are told them: int32, on the device."""

    starts: torch.Tensor
    """Of each row's queries, and where the last one ends."""
    lengths: torch.Tensor
    """Tokens of each row, with the new ones."""
    tables: torch.Tensor
    """Blocks: (rows, blocks)."""
    most_queries: int
    most_keys: int


@dataclass(frozen=True, slots=True)
class PagedKernel:
    """`function` is called as `torch.nn.attention.varlen.varlen_attn` is."""

    function: Callable[..., Any]
    dtypes: frozenset[torch.dtype] = _DTYPES

    def takes(self, query: torch.Tensor, pages: Sequence[torch.Tensor], rule: Rule) -> bool:
        """Keys and values as queries are, heads of one size, and nothing beside plain attention."""
        is_known = query.dtype in self.dtypes and query.shape[-1] <= _LARGEST_HEAD and rule.is_plain
        return is_known and all(page.dtype == query.dtype and page.shape[-1] == query.shape[-1] for page in pages)

    def attend(
        self, query: torch.Tensor, pages: Sequence[torch.Tensor], rows: Ragged, window: int | None, rule: Rule
    ) -> torch.Tensor:
        """Queries (tokens, heads, dim) of all rows, to outputs of the same shape."""
        key, value = pages
        out: torch.Tensor = self.function(
            query,
            key,
            value,
            rows.starts,
            None,
            rows.most_queries,
            rows.most_keys,
            scale=rule.scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[2],
            seqused_k=rows.lengths,
            block_table=rows.tables,
        )
        return out


def find_kernel(device: torch.device) -> PagedKernel | None:
    """None where this device or what is installed has none."""
    if device.type != "cuda":
        return None
    implementation = _IMPLEMENTATIONS.get(torch.cuda.get_device_capability(device)[0])
    if implementation is None:
        return None
    try:
        from torch.nn.attention import activate_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn

        activate_flash_attention_impl(implementation)
    except (ImportError, RuntimeError, ValueError):
        # An older torch, or no such library.
        return None
    return PagedKernel(varlen_attn)
