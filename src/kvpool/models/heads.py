"""How many heads a layer has, and how wide they are, by the fields of a configuration.

Knows nothing of: what is kept of them, and their weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.models.fields import Fields


def num_key_value_heads(fields: Fields) -> int:
    """One where all query heads share it; otherwise what the file says, or as many as there are attention heads."""
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    if fields.flag("multi_query_attention"):
        return fields.whole("multi_query_group_num")
    if fields.has("num_key_value_heads"):
        return fields.whole("num_key_value_heads")
    fields.assume("as many KV heads as attention heads, since the configuration has no number")
    return fields.whole("num_attention_heads")


def head_dim(fields: Fields) -> int:
    """What the file says, or hidden size through attention heads."""
    if fields.has("head_dim"):
        return fields.whole("head_dim")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if hidden % heads:
        raise fields.wrong("hidden_size", f"{heads} attention heads do not divide it, and there is no head_dim")
    return hidden // heads


def own(fields: Fields, names: Mapping[str, tuple[str, ...]], name: str) -> int | None:
    """What layers of one word have of their own, where the file says it."""
    path = next((path for path in names.get(name, ()) if fields.has(path)), None)
    return None if path is None else fields.whole(path)


def listed_heads(fields: Fields, index: int) -> int | None:
    """Where the KV heads are a list, the entry for a layer; 0 for a layer without attention; None elsewhere."""
    if not is_list(fields.get("num_key_value_heads")):
        return None
    return whole_entry(fields, "num_key_value_heads", index)


def is_list(value: object) -> bool:
    """Whether a field has an entry for each layer."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def entry(fields: Fields, name: str, index: int) -> Any:
    """What a list has for layer `index`. ConfigError when it is no list, or too short."""
    entries = fields.sequence(name)
    if index >= len(entries):
        raise fields.wrong(
            name, f"an entry for layer {index} is needed, of {len(entries)} the last is {len(entries) - 1}"
        )
    return entries[index]


def whole_entry(fields: Fields, name: str, index: int) -> int:
    """What a list has for layer `index`, a whole number of 0 or more. ConfigError for anything else."""
    value = entry(fields, name, index)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise fields.wrong(name, f"a whole number for layer {index} is needed")
    return value
