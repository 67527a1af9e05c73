"""How large a block pool may be, whatever it is made of."""

import operator
from typing import Any

from kvpool.errors import ConfigError

MAX_BLOCKS = 2**31 - 1
MAX_GROUPS = 256


def whole_number(name: str, value: Any) -> int:
    """A setting as a plain number, of numpy's too. ConfigError for what is none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}: a whole number is needed") from None


def require_pool_size(num_blocks: int, num_groups: int) -> None:
    """ConfigError unless a pool can have so many blocks, shared by so many groups."""
    if num_blocks < 2:
        raise ConfigError(f"num_blocks is {num_blocks}: at least 2 are needed, the null block and one to use")
    if num_blocks > MAX_BLOCKS:
        raise ConfigError(f"num_blocks is {num_blocks}: at most {MAX_BLOCKS}, block ids are int32")
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ConfigError(f"num_groups is {num_groups}: from 1 to {MAX_GROUPS} share a pool")
