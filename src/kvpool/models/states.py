"""What the layers of a state keep, by the fields of a configuration: one function a kind of recurrence.

Every function answers the `State` of a layer; `conv_dtype` is the model's, the recurrent state may be wider. With k the
kernel, a convolution keeps k - 1 columns. The shapes are those of the kernels that vLLM and transformers run.

Knows nothing of: which layers have states.
"""

from kvpool.models.dtypes import element_bytes, served_dtype
from kvpool.models.fields import Fields
from kvpool.plan.spec import State


def _columns(fields: Fields) -> int:
    return fields.whole("conv_kernel", least=2) - 1


def _conv_bytes(fields: Fields, num_elements: int) -> int:
    return int(num_elements * element_bytes(served_dtype(fields)))


def _state_bytes(fields: Fields, num_elements: int, dtype: str | None = None) -> int:
    """Of a recurrent state: `dtype`, or the field that says it, or the model's."""
    return int(num_elements * element_bytes(dtype or fields.get("state_dtype") or served_dtype(fields)))


def mamba1(fields: Fields) -> tuple[State]:
    """Mamba: channels x (k - 1), and channels x state size."""
    if fields.has("state_channels"):
        channels = fields.whole("state_channels")
    else:
        channels = fields.whole("state_expand") * fields.whole("hidden_size")
    return (
        State(
            num_heads=channels,
            conv_bytes=_conv_bytes(fields, channels * _columns(fields)),
            recurrent_bytes=_state_bytes(fields, channels * fields.whole("state_size")),
        ),
    )


def mamba2(fields: Fields) -> tuple[State]:
    """Mamba 2: (heads x head dim + 2 x groups x state size) x (k - 1), and heads x head dim x state size."""
    heads, groups, size = fields.whole("state_heads"), fields.whole("state_groups"), fields.whole("state_size")
    head_dim = _head_dim(fields, heads)
    return (
        State(
            num_heads=heads,
            conv_bytes=_conv_bytes(fields, heads * head_dim * _columns(fields)),
            recurrent_bytes=_state_bytes(fields, heads * head_dim * size),
            num_groups=groups,
            group_bytes=_conv_bytes(fields, 2 * size * _columns(fields)),
        ),
    )


def _head_dim(fields: Fields, heads: int) -> int:
    """Channels through heads, where the field says "auto" or nothing."""
    if isinstance(fields.get("state_head_dim"), int):
        return fields.whole("state_head_dim")
    channels = fields.whole("state_expand") * fields.whole("hidden_size")
    if channels % heads:
        raise fields.wrong("state_heads", f"{channels} channels are no whole number for each of them")
    return channels // heads


def gated_delta_net(fields: Fields) -> tuple[State]:
    """Gated delta nets: (2 x key heads x key dim + value heads x value dim) x (k - 1), and value heads x dim x dim."""
    key_heads, value_heads = fields.whole("linear_num_key_heads"), fields.whole("linear_num_value_heads")
    key_dim, value_dim = fields.whole("linear_key_head_dim"), fields.whole("linear_value_head_dim")
    return (
        State(
            num_heads=value_heads,
            conv_bytes=_conv_bytes(fields, (2 * key_heads * key_dim + value_heads * value_dim) * _columns(fields)),
            recurrent_bytes=_state_bytes(fields, value_heads * key_dim * value_dim),
        ),
    )


def kimi_delta(fields: Fields) -> tuple[State]:
    """Kimi delta attention: three convolutions, of queries, keys and values, and heads x dim x dim in fp32."""
    heads, dim = fields.whole("linear_num_heads"), fields.whole("linear_head_dim")
    return (
        State(
            num_heads=heads,
            conv_bytes=_conv_bytes(fields, 3 * heads * dim * _columns(fields)),
            recurrent_bytes=_state_bytes(fields, heads * dim * dim, "float32"),
        ),
    )


def lightning(fields: Fields) -> tuple[State]:
    """Lightning attention: heads x dim x dim in fp32, no convolution."""
    heads, dim = fields.whole("num_attention_heads"), fields.whole("head_dim")
    return (State(num_heads=heads, recurrent_bytes=_state_bytes(fields, heads * dim * dim, "float32")),)


def short_conv(fields: Fields) -> tuple[State]:
    """A gated short convolution: hidden size x (k - 1), no recurrence (LFM2)."""
    channels = fields.whole_or("conv_dim", fields.whole("hidden_size"))
    return (State(num_heads=channels, conv_bytes=_conv_bytes(fields, channels * _columns(fields))),)


def real_gated_lru(fields: Fields) -> tuple[State]:
    """RG-LRU of Griffin: width x (k - 1), and one fp32 number a channel."""
    channels = fields.whole_or("lru_width", fields.whole("hidden_size"))
    return (
        State(
            num_heads=channels,
            conv_bytes=_conv_bytes(fields, channels * _columns(fields)),
            recurrent_bytes=_state_bytes(fields, channels, "float32"),
        ),
    )


def rwkv(fields: Fields) -> tuple[State]:
    """RWKV from version 5 on: heads x dim x dim in fp32, and the last token of both halves of a layer."""
    hidden = fields.whole("hidden_size")
    dim = fields.whole("head_dim")
    if hidden % dim:
        raise fields.wrong("head_dim", f"hidden size {hidden} is no multiple of it")
    return (
        State(
            num_heads=hidden // dim,
            conv_bytes=_conv_bytes(fields, 2 * hidden),
            recurrent_bytes=_state_bytes(fields, hidden * dim, "float32"),
        ),
    )


def rwkv4(fields: Fields) -> tuple[State]:
    """RWKV 4: three fp32 numbers a channel, and the last token of both halves of a layer."""
    channels = fields.whole_or("attention_hidden_size", fields.whole("hidden_size"))
    return (
        State(
            num_heads=channels,
            conv_bytes=_conv_bytes(fields, 2 * channels),
            recurrent_bytes=_state_bytes(fields, 3 * channels, "float32"),
        ),
    )
