"""The weights of one layer's state: the projections around each kind of recurrence.

What belongs to groups of heads (B and C of Mamba 2) is replicated once there are more ranks than groups, as the state
itself is.

Knows nothing of: what the states keep, and which layers have them.
"""

from collections.abc import Callable, Iterator, Mapping

from kvpool.models import states
from kvpool.models.fields import Fields
from kvpool.models.traits import Traits, holds
from kvpool.models.weights import Linear, Part, Weight, norm

_PART = Part.STATE


def mamba1(fields: Fields, traits: Traits) -> Iterator[Weight]:
    """Mamba: ranks divide the channels."""
    hidden, channels, size = fields.whole("hidden_size"), _channels(fields), fields.whole("state_size")
    rank = _time_step_rank(fields, hidden)
    has_bias = _biased(fields)
    yield from Linear(_PART, "mixer.in_proj", 2 * channels, hidden, channels, has_bias)
    yield from _convolution(fields, channels, channels)
    yield from Linear(_PART, "mixer.x_proj", rank + 2 * size, channels, channels, is_row=True)
    yield from Linear(_PART, "mixer.dt_proj", channels, rank, channels, has_bias=True)
    yield Weight(_PART, "mixer.A_log", channels * (size + 1), num_units=channels)
    yield from Linear(_PART, "mixer.out_proj", hidden, channels, channels, has_bias, is_row=True)
    if traits.inner_norms:
        yield norm("mixer.dt_layernorm", rank + 2 * size)


def _channels(fields: Fields) -> int:
    if fields.has("state_channels"):
        return fields.whole("state_channels")
    return fields.whole("state_expand") * fields.whole("hidden_size")


def _time_step_rank(fields: Fields, hidden: int) -> int:
    """A sixteenth of the hidden size where the file says "auto" or nothing."""
    for name in ("time_step_rank", "mamba_dt_rank"):
        if isinstance(fields.get(name), int):
            return fields.whole(name)
    return -(-hidden // 16)


def _biased(fields: Fields) -> bool:
    return any(fields.flag(name) for name in ("use_bias", "mamba_proj_bias"))


def _convolution(fields: Fields, channels: int, num_units: int) -> Iterator[Weight]:
    """A kernel for each channel, and a bias unless the file says that there is none."""
    yield Weight(_PART, "mixer.conv1d", channels * fields.whole("conv_kernel", 2), num_units=num_units)
    said = [fields.flag(name) for name in ("use_conv_bias", "mamba_conv_bias") if fields.has(name)]
    if all(said):
        yield Weight(_PART, "mixer.conv1d.bias", channels, num_units=num_units)


def mamba2(fields: Fields, traits: Traits) -> Iterator[Weight]:
    """Mamba 2: ranks divide the heads, and groups as far as they go."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("state_heads")
    groups, size = fields.whole("state_groups"), fields.whole("state_size")
    has_head_dim = isinstance(fields.get("state_head_dim"), int)
    inner = heads * fields.whole("state_head_dim") if has_head_dim else _channels(fields)
    shared = 2 * groups * size
    has_bias = _biased(fields)
    yield from Linear(_PART, "mixer.in_proj", 2 * inner + heads, hidden, heads, has_bias)
    yield from Linear(_PART, "mixer.in_proj", shared, hidden, groups, has_bias)
    yield from _convolution(fields, inner, heads)
    yield from _convolution(fields, shared, groups)
    yield Weight(_PART, "mixer.A_log", 3 * heads, num_units=heads)
    if holds(traits.state_norm, fields):
        yield norm("mixer.norm", inner, num_units=heads)
    yield from Linear(_PART, "mixer.out_proj", hidden, inner, heads, has_bias, is_row=True)


def gated_delta_net(fields: Fields, _: Traits) -> Iterator[Weight]:
    """Gated delta nets: queries, keys, values and a gate, and two numbers for each value head."""
    hidden = fields.whole("hidden_size")
    key_heads, value_heads = fields.whole("linear_num_key_heads"), fields.whole("linear_num_value_heads")
    keys = key_heads * fields.whole("linear_key_head_dim")
    value_dim = fields.whole("linear_value_head_dim")
    values, kernel = value_heads * value_dim, fields.whole("conv_kernel", 2)
    yield from Linear(_PART, "linear_attn.in_proj_qkvz", 2 * keys, hidden, key_heads)
    yield from Linear(_PART, "linear_attn.in_proj_qkvz", 2 * values, hidden, value_heads)
    yield from Linear(_PART, "linear_attn.in_proj_ba", 2 * value_heads, hidden, value_heads)
    yield Weight(_PART, "linear_attn.conv1d", 2 * keys * kernel, num_units=key_heads)
    yield Weight(_PART, "linear_attn.conv1d", values * kernel, num_units=value_heads)
    yield Weight(_PART, "linear_attn.A_log", 2 * value_heads, num_units=value_heads)
    yield norm("linear_attn.norm", value_dim)
    yield from Linear(_PART, "linear_attn.out_proj", hidden, values, value_heads, is_row=True)


def kimi_delta(fields: Fields, _: Traits) -> Iterator[Weight]:
    """Kimi delta attention: queries, keys and values, and two gates through a narrow middle."""
    hidden, heads, dim = fields.whole("hidden_size"), fields.whole("linear_num_heads"), fields.whole("linear_head_dim")
    inner, kernel = heads * dim, fields.whole("conv_kernel", 2)
    for name in ("q_proj", "k_proj", "v_proj"):
        yield from Linear(_PART, f"self_attn.{name}", inner, hidden, heads)
    yield Weight(_PART, "self_attn.conv1d", 3 * inner * kernel, num_units=heads)
    for name in ("f", "g"):
        yield from Linear(_PART, f"self_attn.{name}_a_proj", dim, hidden)
        yield from Linear(_PART, f"self_attn.{name}_b_proj", inner, dim, heads)
    yield from Linear(_PART, "self_attn.b_proj", heads, hidden, heads)
    yield Weight(_PART, "self_attn.A_log", inner + heads, num_units=heads)
    yield norm("self_attn.o_norm", dim)
    yield from Linear(_PART, "self_attn.o_proj", hidden, inner, heads, is_row=True)


def lightning(fields: Fields, _: Traits) -> Iterator[Weight]:
    """Lightning attention: queries, keys and values, and a gate of the outputs."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    inner = heads * fields.whole("head_dim")
    yield from Linear(_PART, "self_attn.qkv_proj", 3 * inner, hidden, heads)
    yield from Linear(_PART, "self_attn.output_gate", inner, hidden, heads)
    yield norm("self_attn.norm", inner, num_units=heads)
    yield from Linear(_PART, "self_attn.out_proj", hidden, inner, heads, is_row=True)


def short_conv(fields: Fields, _: Traits) -> Iterator[Weight]:
    """A gated short convolution (LFM2)."""
    hidden, has_bias = fields.whole("hidden_size"), fields.flag("conv_bias")
    yield from Linear(_PART, "conv.in_proj", 3 * hidden, hidden, hidden, has_bias)
    yield Weight(_PART, "conv.conv", hidden * (fields.whole("conv_kernel", 2) + has_bias), num_units=hidden)
    yield from Linear(_PART, "conv.out_proj", hidden, hidden, hidden, has_bias, is_row=True)


RECURRENCES: Mapping[object, Callable[[Fields, Traits], Iterator[Weight]]] = {
    states.mamba1: mamba1,
    states.mamba2: mamba2,
    states.gated_delta_net: gated_delta_net,
    states.kimi_delta: kimi_delta,
    states.lightning: lightning,
    states.short_conv: short_conv,
}
"""By what the layer keeps."""
