"""The weights of one layer's MLP: dense, or a mixture of experts, and which layers have which.

Knows nothing of: attention, states, ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool.models.fields import Fields
from kvpool.models.heads import entry, is_list, whole_entry
from kvpool.models.traits import Traits, holds
from kvpool.models.weights import Linear, Part, Weight, norm

_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "ffn_config.moe_num_experts")
_NUM_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "ffn_config.moe_top_k")
_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "ffn_config.ffn_hidden_size", "intermediate_size")
_FIRST_WITH_EXPERTS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def _first(fields: Fields, names: Sequence[str]) -> str | None:
    return next((name for name in names if fields.has(name)), None)


def _whole(fields: Fields, names: Sequence[str]) -> int:
    name = _first(fields, names)
    if name is None:
        raise fields.missing(" or ".join(names))
    return fields.whole(name)


def num_experts(fields: Fields) -> int:
    """How many a layer with experts has; 0 where the model has none."""
    name = _first(fields, _NUM_EXPERTS)
    return 0 if name is None else fields.whole(name, least=0)


@dataclass(frozen=True, slots=True)
class _Projections:
    """A gate beside a projection up, and one down."""

    part: Part
    name: str
    hidden: int
    width: int
    is_gated: bool
    has_bias: bool = False
    num_copies: int = 1
    num_active: int | None = None

    def __iter__(self) -> Iterator[Weight]:
        for name in ("gate_proj", "up_proj") if self.is_gated else ("up_proj",):
            yield from self._linear(name, self.width, self.hidden)
        yield from self._linear("down_proj", self.hidden, self.width, is_row=True)

    def _linear(self, name: str, num_outputs: int, num_inputs: int, *, is_row: bool = False) -> Linear:
        return Linear(
            self.part,
            f"{self.name}.{name}",
            num_outputs,
            num_inputs,
            num_units=self.width,
            has_bias=self.has_bias,
            is_row=is_row,
            num_copies=self.num_copies,
            num_active=self.num_active,
        )


def dense_mlp(fields: Fields, traits: Traits, index: int, *, is_narrow: bool = True) -> Iterator[Weight]:
    """The MLP of layer `index`; nothing where its width is 0. `is_narrow` False: twice as wide (Gemma 4)."""
    width = _dense_width(fields, traits, index) * (1 if is_narrow else 2)
    if width:
        is_gated, has_bias = holds(traits.is_gated, fields), holds(traits.mlp_bias, fields)
        yield from _Projections(Part.MLP, "mlp", fields.whole("hidden_size"), width, is_gated, has_bias)


def _dense_width(fields: Fields, traits: Traits, index: int) -> int:
    widths = fields.get(traits.dense_width)
    if widths is None and traits.mlp_ratio is not None:
        return traits.mlp_ratio * fields.whole("hidden_size")
    if is_list(widths):
        return whole_entry(fields, traits.dense_width, index)
    width = fields.whole(traits.dense_width, least=0) // (2 if traits.mlp_halved else 1)
    return _adjusted(fields, width) if traits.mlp_adjusted else width


def _adjusted(fields: Fields, width: int) -> int:
    if fields.get("block_auto_adjust_ff_dim") is False:
        return width
    multiplier = fields.get("block_ffn_dim_multiplier") or 1
    if not isinstance(multiplier, int | float):
        raise fields.wrong("block_ffn_dim_multiplier", "a number is needed")
    narrow = int(multiplier * (2 * width // 3))
    multiple = fields.whole_or("block_multiple_of", 256, 1)
    return -(-narrow // multiple) * multiple


def experts(fields: Fields, traits: Traits) -> Iterator[Weight]:
    """Router, routed experts, shared experts; and the latent that experts work in, where there is one."""
    hidden, count = fields.whole("hidden_size"), num_experts(fields)
    latent = fields.whole("moe_latent_size") if fields.has("moe_latent_size") else hidden
    yield from Linear(Part.ROUTER, "mlp.gate", count, hidden, has_bias=traits.expert_bias)
    is_gated, active = holds(traits.is_gated, fields), _whole(fields, _NUM_ACTIVE)
    width, biased = _whole(fields, _WIDTH), traits.expert_bias
    yield from _Projections(Part.EXPERTS, "mlp.experts", latent, width, is_gated, biased, count, active)
    if latent != hidden:
        yield from Linear(Part.MLP, "mlp.fc1_latent_proj", latent, hidden)
        yield from Linear(Part.MLP, "mlp.fc2_latent_proj", hidden, latent)
    yield from shared_experts(fields, traits, width)


def shared_experts(fields: Fields, traits: Traits, width: int) -> Iterator[Weight]:
    """Those that all tokens go through, as one MLP."""
    hidden, total = fields.whole("hidden_size"), _shared_width(fields, traits, width)
    if total:
        yield from _Projections(
            Part.SHARED_EXPERTS, "mlp.shared_experts", hidden, total, holds(traits.is_gated, fields)
        )
        if traits.has_shared_gate:
            yield from Linear(Part.ROUTER, "mlp.shared_expert_gate", 1, hidden)


def _shared_width(fields: Fields, traits: Traits, width: int) -> int:
    name = _first(fields, _NUM_SHARED)
    count = None if name is None else fields.whole(name, least=0)
    if traits.shared_width is None:
        return (count or 0) * width
    if count is not None and not fields.has(traits.shared_width):
        return count * width
    return (1 if count is None else count) * fields.whole(traits.shared_width, least=0)


def experts_beside_mlp(fields: Fields, traits: Traits) -> Iterator[Weight]:
    """Gemma 4: experts beside the MLP, the router with scales of its input and of each expert, and three norms more."""
    hidden = fields.whole("hidden_size")
    yield from experts(fields, traits)
    yield Weight(Part.ROUTER, "mlp.gate.scale", hidden + num_experts(fields))
    yield norm("feedforward_layernorms", 3 * hidden)


def layers_with_experts(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Whether each layer has them: by a list, the first dense layers, a period, or all."""
    if not num_experts(fields):
        return [False] * num_layers
    listed = _listed(fields, num_layers)
    return listed if listed is not None else [_by_rule(fields, index) for index in range(num_layers)]


def _listed(fields: Fields, num_layers: int) -> Sequence[bool] | None:
    for name, experts_are in (("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)):
        if is_list(fields.get(name)):
            return [entry(fields, name, index) == experts_are for index in range(num_layers)]
    return None


def _by_rule(fields: Fields, index: int) -> bool:
    starts = (name for name in _FIRST_WITH_EXPERTS if fields.has(name))
    first = max((fields.whole(name, least=0) for name in starts), default=0)
    last = fields.whole_or("moe_layer_end_index", index)
    dense = fields.sequence("mlp_only_layers") if fields.has("mlp_only_layers") else ()
    if index in dense or not first <= index <= last:
        return False
    if fields.has("expert_layer_period"):
        return index % fields.whole("expert_layer_period") == fields.whole("expert_layer_offset", 0)
    step = fields.whole_or("decoder_sparse_step", fields.whole_or("interleave_moe_layer_step", 1, 1), 1)
    return (index + 1) % step == 0 and index % fields.whole_or("moe_layer_freq", 1, 1) == 0
