"""What sparse models keep beside keys and values, or in their place: index keys and compressed latents.

A DeepSeek V4 layer keeps the latents of its latest tokens, and one latent for each 4 or 128 tokens before; while these
are not complete, a running state of the compressor. A latent of 512 is 448 fp8 elements, 64 in 16 bits, 7 scales and a
byte: 584 B, on every rank, whatever the KV dtype. Pages are multiples of 576 B (vLLM 0.20 and later).

Knows nothing of: which layers are sparse.
"""

from collections.abc import Iterator

from kvpool.models.dtypes import element_bytes, served_dtype
from kvpool.models.fields import Fields
from kvpool.plan.kinds import FullAttention, SlidingWindow
from kvpool.plan.spec import Latent, TokenKind

PAGE_MULTIPLE = 576


def index_keys(fields: Fields) -> tuple[Latent]:
    """One index key a token for all heads, in the model's dtype (MiniMax M3)."""
    dim = fields.whole("sparse_attention_config.sparse_index_dim")
    return (Latent(dim, 0, element_bytes=element_bytes(served_dtype(fields)), page_multiple=2),)


def latest(fields: Fields) -> tuple[Latent]:
    """The latents of the latest tokens, of all layers."""
    return (_latent(fields, 1, SlidingWindow(fields.whole("sliding_window"))),)


def by_4(fields: Fields) -> tuple[Latent, ...]:
    """One latent for 4 tokens and its index key, and their compressors' states: of 8 tokens, for keys and weights."""
    index = fields.whole("index_head_dim")
    return (
        _latent(fields, 4, FullAttention()),
        Latent(index, 0, element_bytes=1, scale_bytes=4, compression=4, page_multiple=PAGE_MULTIPLE),
        *_compressors(4 * fields.whole("head_dim"), 4 * index, window=8),
    )


def by_128(fields: Fields) -> tuple[Latent, ...]:
    """One latent for 128 tokens, and its compressor's state: of these tokens."""
    return (_latent(fields, 128, FullAttention()), *_compressors(2 * fields.whole("head_dim"), window=128))


def _latent(fields: Fields, compression: int, kind: TokenKind) -> Latent:
    rope_dim = fields.whole("qk_rope_head_dim")
    width = fields.whole("head_dim") - rope_dim
    if width < 1 or width % 64:
        raise fields.wrong("head_dim", f"{rope_dim} of it are rotated, and a scale stands for each 64 of the others")
    return Latent(
        width,
        rope_dim,
        element_bytes=1,
        rope_element_bytes=2,
        scale_bytes=width // 64 + 1,
        compression=compression,
        page_multiple=PAGE_MULTIPLE,
        kind=kind,
    )


def _compressors(*widths: int, window: int) -> Iterator[Latent]:
    """Of fp32 numbers a token."""
    for width in widths:
        yield Latent(width, 0, element_bytes=4, page_multiple=PAGE_MULTIPLE, kind=SlidingWindow(window))
