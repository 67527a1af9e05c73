"""How large a block pool may be, whatever it is made of."""

import operator
from collections.abc import Iterable
from typing import Any

from kvpool.errors import ConfigError, UsageError

MAX_BLOCKS = 2**31 - 1
MAX_GROUPS = 256
DIGEST_BYTES = 32
SHORT_NAME_BYTES = 20


def whole_number(name: str, value: Any) -> int:
    """A setting as a plain number, of numpy's too. ConfigError for what is none."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {value!r}: a whole number is needed") from None


def require_names(names: Iterable[Any]) -> None:
    """UsageError that names the first of these that cannot name a block."""
    for name in names:
        if (type(name) is not bytes or len(name) != DIGEST_BYTES) and not _is_short_name(name):
            raise UsageError(
                f"{name!r} is no name of a block: {DIGEST_BYTES} bytes, at most {SHORT_NAME_BYTES}, or a whole number "
                "of 64 bits"
            )


def _is_short_name(name: Any) -> bool:
    if isinstance(name, bytes):
        return len(name) in (*range(SHORT_NAME_BYTES + 1), DIGEST_BYTES)
    try:
        return -(2**63) <= operator.index(name) < 2**64
    except TypeError:
        return False


def require_pool_size(num_blocks: int, num_groups: int) -> None:
    """ConfigError unless a pool can have so many blocks, shared by so many groups."""
    if num_blocks < 2:
        raise ConfigError(f"num_blocks is {num_blocks}: at least 2 are needed, the null block and one to use")
    if num_blocks > MAX_BLOCKS:
        raise ConfigError(f"num_blocks is {num_blocks}: at most {MAX_BLOCKS}, block ids are int32")
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ConfigError(f"num_groups is {num_groups}: from 1 to {MAX_GROUPS} share a pool")
