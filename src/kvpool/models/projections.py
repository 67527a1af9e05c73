"""The weights of one layer's attention, in its several forms.

Knows nothing of: what stands beside attention in a layer, and how many layers there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.models.fields import Fields
from kvpool.models.heads import whole_entry
from kvpool.models.traits import Traits, holds
from kvpool.models.weights import Linear, Part, Weight, norm

_PART = Part.ATTENTION


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer. `has_keys` False: it reads those of an earlier layer. `has_values` False: keys serve."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    has_keys: bool = True
    has_values: bool = True


def attention(fields: Fields, traits: Traits, heads: Heads, name: str = "self_attn") -> Iterator[Weight]:
    """Multi-head, grouped or multi-query: queries, keys, values, outputs, and what the family puts beside them."""
    hidden, queries = fields.whole("hidden_size"), heads.num_heads
    has_bias = holds(traits.query_bias, fields)
    key_bias = has_bias if traits.key_bias is None else holds(traits.key_bias, fields)
    width = heads.num_heads * heads.head_dim * (2 if _has_output_gate(fields, traits) else 1)
    yield from Linear(_PART, f"{name}.q_proj", width, hidden, queries, has_bias)
    kv_heads = heads.num_kv_heads
    if heads.has_keys:
        yield from Linear(_PART, f"{name}.k_proj", kv_heads * heads.head_dim, hidden, kv_heads, key_bias)
    if heads.has_keys and heads.has_values:
        yield from Linear(_PART, f"{name}.v_proj", kv_heads * heads.head_dim_v, hidden, kv_heads, has_bias)
    output_bias = holds(traits.output_bias, fields)
    yield from Linear(_PART, f"{name}.o_proj", hidden, queries * heads.head_dim_v, queries, output_bias, is_row=True)
    yield from _beside(fields, traits, heads, name)


def _has_output_gate(fields: Fields, traits: Traits) -> bool:
    return fields.flag("attn_output_gate") if fields.has("attn_output_gate") else holds(traits.has_output_gate, fields)


def _beside(fields: Fields, traits: Traits, heads: Heads, name: str) -> Iterator[Weight]:
    if traits.qk_norm and holds(traits.has_qk_norm, fields):
        yield from _norms(traits, heads, name)
    if traits.has_head_gate:
        yield from Linear(_PART, f"{name}.g_proj", heads.num_heads, fields.whole("hidden_size"), heads.num_heads)
    if traits.has_sinks:
        yield Weight(_PART, f"{name}.sinks", heads.num_heads, num_units=heads.num_heads)


def _norms(traits: Traits, heads: Heads, name: str) -> Iterator[Weight]:
    queries, keys = (1, 1) if traits.qk_norm == "head" else (heads.num_heads, heads.num_kv_heads)
    yield norm(f"{name}.q_norm", queries * heads.head_dim, num_units=queries)
    if heads.has_keys:
        yield norm(f"{name}.k_norm", keys * heads.head_dim, num_units=keys)


def latent_attention(fields: Fields, *, has_index: bool) -> Iterator[Weight]:
    """MLA: ranks divide what comes out of the latents by heads; all of them have what leads into the latents."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    rank, rope = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim", 0)
    nope, values = fields.whole("qk_nope_head_dim"), fields.whole("v_head_dim")
    has_bias = fields.flag("attention_bias")
    yield from _latent_queries(fields, heads, nope + rope, has_bias)
    yield from Linear(_PART, "self_attn.kv_a_proj_with_mqa", rank + rope, hidden, has_bias=has_bias)
    yield norm("self_attn.kv_a_layernorm", rank)
    yield Weight(_PART, "self_attn.kv_b_proj", heads * (nope + values), rank, heads, is_absorbed=True)
    yield from Linear(_PART, "self_attn.o_proj", hidden, heads * values, heads, has_bias, is_row=True)
    if has_index:
        yield from _index(fields)


def _latent_queries(fields: Fields, heads: int, dim: int, has_bias: bool) -> Iterator[Weight]:
    hidden = fields.whole("hidden_size")
    if not fields.has("q_lora_rank"):
        yield from Linear(_PART, "self_attn.q_proj", heads * dim, hidden, heads)
        return
    rank = fields.whole("q_lora_rank")
    yield from Linear(_PART, "self_attn.q_a_proj", rank, hidden, has_bias=has_bias)
    yield norm("self_attn.q_a_layernorm", rank)
    yield from Linear(_PART, "self_attn.q_b_proj", heads * dim, rank, heads)


def _index(fields: Fields) -> Iterator[Weight]:
    """The branch that chooses the tokens to look at (DeepSeek V3.2): all ranks have all of it."""
    hidden, heads, dim = fields.whole("hidden_size"), fields.whole("index_n_heads"), fields.whole("index_head_dim")
    yield from Linear(_PART, "self_attn.indexer.wq_b", heads * dim, fields.whole("q_lora_rank"))
    yield from Linear(_PART, "self_attn.indexer.wk", dim, hidden)
    yield norm("self_attn.indexer.k_norm", dim, has_bias=True)
    yield from Linear(_PART, "self_attn.indexer.weights_proj", heads, hidden)


def block_index(fields: Fields, index: int) -> Iterator[Weight]:
    """The branch that chooses blocks of tokens (MiniMax M3), in the layers that have it."""
    frequency = "sparse_attention_config.sparse_attention_freq"
    if not fields.has(frequency) or not whole_entry(fields, frequency, index):
        return
    hidden, dim = fields.whole("hidden_size"), fields.whole("sparse_attention_config.sparse_index_dim")
    heads = fields.whole("sparse_attention_config.sparse_num_index_heads")
    yield from Linear(_PART, "self_attn.indexer.q_proj", heads * dim, hidden, heads)
    yield from Linear(_PART, "self_attn.indexer.k_proj", dim, hidden)
    yield norm("self_attn.indexer.q_norm", dim)
    yield norm("self_attn.indexer.k_norm", dim)


def compressed_attention(fields: Fields, ratio: int) -> Iterator[Weight]:
    """DeepSeek V4: one key that is the value too, outputs through a latent of groups, a compressor of old tokens."""
    hidden, heads, dim = fields.whole("hidden_size"), fields.whole("num_attention_heads"), fields.whole("head_dim")
    groups, rank, output_rank = fields.whole("o_groups"), fields.whole("q_lora_rank"), fields.whole("o_lora_rank")
    yield Weight(_PART, "self_attn.sinks", heads, num_units=heads)
    yield from _latent_queries(fields, heads, dim, has_bias=False)
    yield from Linear(_PART, "self_attn.kv_proj", dim, hidden)
    yield norm("self_attn.kv_norm", dim)
    yield from Linear(_PART, "self_attn.o_a_proj", groups * output_rank, heads * dim // groups, groups)
    yield from Linear(_PART, "self_attn.o_b_proj", hidden, groups * output_rank, groups, is_row=True)
    if not ratio:
        return
    yield from _compressor(hidden, dim, ratio, "self_attn.compressor")
    if ratio == _INDEXED_RATIO:
        index_heads, index_dim = fields.whole("index_n_heads"), fields.whole("index_head_dim")
        yield from _compressor(hidden, index_dim, ratio, "self_attn.compressor.indexer")
        yield from Linear(_PART, "self_attn.compressor.indexer.q_b_proj", index_heads * index_dim, rank)
        yield from Linear(_PART, "self_attn.compressor.indexer.weights_proj", index_heads, hidden)


_INDEXED_RATIO = 4
"""Layers that compress by so much choose among what they kept, and overlap what they compress."""


def _compressor(hidden: int, dim: int, ratio: int, name: str) -> Iterator[Weight]:
    width = dim * (2 if ratio == _INDEXED_RATIO else 1)
    yield Weight(_PART, f"{name}.position_bias", ratio * width)
    yield from Linear(_PART, f"{name}.kv_proj", width, hidden)
    yield from Linear(_PART, f"{name}.gate_proj", width, hidden)
    yield norm(f"{name}.kv_norm", dim)


def predicted_streams(fields: Fields) -> Iterator[Weight]:
    """Several streams of hidden states, of which a layer computes one and predicts the rest, and a short cut through a
    narrow middle (Gemma 3n)."""
    if fields.has("altup_num_inputs"):
        streams, hidden = fields.whole("altup_num_inputs"), fields.whole("hidden_size")
        yield from Linear(Part.MLP, "altup.modality_router", streams, hidden)
        yield Weight(Part.NORMS, "altup.coefs", streams * streams * (streams + 1))
        rank = fields.whole("laurel_rank")
        yield from Linear(Part.MLP, "laurel.linear_left", rank, hidden)
        yield from Linear(Part.MLP, "laurel.linear_right", hidden, rank)
        yield norm("altup.norms", 3 * hidden)


def stream_mixers(fields: Fields) -> Iterator[Weight]:
    """Hyper connections: several streams of hidden states, mixed before and after each half of a layer."""
    streams, hidden = fields.whole("hc_mult"), fields.whole("hidden_size")
    outputs = (2 + streams) * streams
    for name in ("attn_hc", "ffn_hc"):
        yield Weight(Part.NORMS, f"{name}.fn", outputs * streams * hidden)
        yield Weight(Part.NORMS, f"{name}.base", outputs + 3)
