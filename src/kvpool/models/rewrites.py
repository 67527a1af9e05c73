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
