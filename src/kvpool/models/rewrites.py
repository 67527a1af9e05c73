"""Configuration files that say a layer's heads and kind in a shape of their own, told in the usual fields.

Knows nothing of: what the usual fields lead to.
"""

from collections.abc import Mapping
from typing import Any

from kvpool.errors import ConfigError
from kvpool.models.fields import Config


def block_configs(config: Config) -> Config:
    """A block of its own for each layer (Nemotron-NAS): KV heads, and the width of the MLP; 0 for what is left out."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise ConfigError("the configuration lacks block_configs, an object for each layer: a model is not guessed at")
    sizes = {name: _whole(config, name) for name in ("num_attention_heads", "hidden_size")}
    rest = {name: value for name, value in config.items() if name != "block_configs"}
    return {
        **rest,
        "num_key_value_heads": [_kv_heads(block, sizes["num_attention_heads"], at) for at, block in enumerate(blocks)],
        "intermediate_size": [_mlp_width(block, sizes["hidden_size"], at) for at, block in enumerate(blocks)],
    }


def _whole(config: Config, name: str) -> int:
    if not isinstance(config.get(name), int) or config[name] < 1:
        raise ConfigError(f"the configuration lacks {name}: a model is not guessed at")
    return int(config[name])


def _part(block: Mapping[str, Any], name: str, index: int) -> Mapping[str, Any] | None:
    """The attention or the MLP of a block; None where it is left out. ConfigError for what is not known to be kept."""
    part = block.get(name)
    if not isinstance(part, Mapping):
        raise ConfigError(f"block_configs[{index}] lacks {name}: a model is not guessed at")
    for field in ("window_length", "num_sink_tokens", "sparsify", "replace_with_linear"):
        if part.get(field):
            raise ConfigError(f"block_configs[{index}].{name}.{field} is {part[field]!r}: not known what that keeps")
    return None if part.get("no_op") else part


def _kv_heads(block: Mapping[str, Any], num_attention_heads: int, index: int) -> int:
    attention = _part(block, "attention", index)
    if attention is None:
        return 0
    size = attention.get("n_heads_in_group")
    if not isinstance(size, int) or size < 1 or num_attention_heads % size:
        raise ConfigError(
            f"block_configs[{index}].attention.n_heads_in_group is {size!r}: "
            f"a divisor of the {num_attention_heads} attention heads is needed"
        )
    return num_attention_heads // size


def _mlp_width(block: Mapping[str, Any], hidden_size: int, index: int) -> int:
    """Two thirds of so many times the hidden size, up to a multiple of 256."""
    mlp = _part(block, "ffn", index)
    if mlp is None:
        return 0
    times = mlp.get("ffn_mult")
    if isinstance(times, bool) or not isinstance(times, int | float) or not 0 < times < 1_000:
        raise ConfigError(f"block_configs[{index}].ffn.ffn_mult is {times!r}: a number above 0 is needed")
    return -(-int(2 * times * hidden_size / 3) // 256) * 256


def two_halves(config: Config) -> Config:
    """A layer with attention in each of its halves (LongCat) is two layers."""
    if config.get("num_layers") is None:
        return config
    return {**config, "num_hidden_layers": 2 * _whole(config, "num_layers")}


def own_global_heads(config: Config) -> Config:
    """Full layers have KV heads of their own only where keys serve as values (Gemma 4), and dimensions layer by layer.

    ConfigError where single layers differ in something else.
    """
    rest = dict(config)
    if not config.get("attention_k_eq_v"):
        rest.pop("num_global_key_value_heads", None)
    single = rest.pop("per_layer_config", None)
    dims = {str(fields.get("head_dim")) for fields in (single or {}).values() if isinstance(fields, Mapping)}
    if single and (len(dims) != 1 or any(set(fields) - {"head_dim"} for fields in single.values())):
        raise ConfigError("per_layer_config gives single layers more than one head_dim: what they keep is not known")
    return {**rest, "global_head_dim": int(dims.pop())} if single else rest


def encoder_only(config: Config) -> Config:
    """ConfigError for an encoder that is used as a decoder: it keeps what it was not made to keep."""
    for name in ("is_decoder", "add_cross_attention"):
        if config.get(name):
            raise ConfigError(
                f"{name} is true in a {config.get('model_type')!r} model: what its layers keep is not known"
            )
    return config


def twice_as_wide_heads(config: Config) -> Config:
    """Attention over two streams (Zamba 2): a head is twice as wide as usual, unless the file says how wide."""
    if config.get("attention_head_dim") is not None:
        return config
    return {**config, "attention_head_dim": 2 * _whole(config, "hidden_size") // _whole(config, "num_attention_heads")}
