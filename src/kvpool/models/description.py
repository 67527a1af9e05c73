"""All that a configuration says of a model: what its layers keep, its weights, the widths that activations depend on.

Knows nothing of: devices, memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.models.fields import Config, Fields
from kvpool.models.formats import WeightScheme, weight_scheme
from kvpool.models.huggingface import layer_words, open_config, read_model
from kvpool.models.parameters import count_parameters
from kvpool.models.weights import Parameters
from kvpool.plan.model import Model
from kvpool.plan.overhead import ModelShape


@dataclass(frozen=True, slots=True)
class CountedWeights:
    """The weights, and how they are kept."""

    parameters: Parameters
    scheme: WeightScheme
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """What a cache needs is always known; the weights of some models, and their widths, are not."""

    model: Model
    weights: CountedWeights | None
    widths: ModelShape | None
    why_no_weights: str = ""

    def counted(self) -> CountedWeights:
        """The weights. ConfigError when they are not known."""
        if self.weights is None:
            raise ConfigError(f"the weights of {self.model.name} are not known: {self.why_no_weights}; give --weights")
        return self.weights

    def shape(self) -> ModelShape:
        """The widths. ConfigError when they are not known."""
        if self.widths is None:
            raise ConfigError(f"the widths of {self.model.name} are not known: {self.why_no_weights}; give --overhead")
        return self.widths


def describe(
    config: Config,
    *,
    name: str | None = None,
    kv_dtype: str = "auto",
    dtype: str | None = None,
    model_type: str | None = None,
) -> Description:
    """Of a decoded `config.json`. ConfigError as `read_model`; what is not known of the weights is told when asked."""
    model = read_model(config, name=name, kv_dtype=kv_dtype, dtype=dtype, model_type=model_type)
    try:
        fields, family = open_config(config, dtype=dtype, model_type=model_type)
        parameters = count_parameters(fields, family, layer_words(fields, family))
        weights = CountedWeights(parameters, weight_scheme(fields), tuple(fields.assumed))
        return Description(model, weights, _widths(fields, len(model.layers)))
    except ConfigError as error:
        return Description(model, None, None, str(error))


def _widths(fields: Fields, num_layers: int) -> ModelShape:
    experts = fields.whole_or("num_experts_per_tok", 0)
    width = "moe_intermediate_size" if experts and fields.has("moe_intermediate_size") else "intermediate_size"
    return ModelShape(
        fields.whole("hidden_size"),
        _widest(fields, width),
        fields.whole("vocab_size"),
        num_layers,
        experts,
    )


def _widest(fields: Fields, name: str) -> int:
    """Of a list, an entry for each layer, the largest; four times the hidden size where nothing is said."""
    value = fields.get(name)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return max((entry for entry in value if isinstance(entry, int)), default=1)
    return fields.whole_or(name, 4 * fields.whole("hidden_size"), 1)
