"""The native core, where it is built and wanted: a block pool and hashing that give the same answers, faster.

It is taken when it is there. With KVPOOL_NATIVE=0 in the environment everything is pure Python, with KVPOOL_NATIVE=1
an import fails where it is not built. What is None here is done by the modules of `kvpool.core`.
"""

import logging
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from kvpool._native.sources import digest
from kvpool.errors import ConfigError

_LOG = logging.getLogger(__name__)


def _built(wish: str) -> tuple[Any | None, str | None]:
    """The module with the compiled parts; None, and why, where it is not built or not wanted."""
    if wish not in ("", "0", "1"):
        raise ConfigError(f"KVPOOL_NATIVE is {wish!r}: 0 for pure Python, 1 to insist on the native core, or unset")
    if wish == "0":
        return None, "KVPOOL_NATIVE is 0"
    try:
        pool = import_module("kvpool._native.pool")
        if pool.SOURCES not in ("", digest(Path(__file__).parent) or pool.SOURCES):
            raise ImportError("it was built from other sources than those beside it")
        return pool, None
    except ImportError as error:
        if wish == "1":
            raise ImportError(
                f"KVPOOL_NATIVE is 1, and the native core cannot be imported ({error}): install a C++ compiler and "
                "then kvpool again (pip install --force-reinstall --no-deps), or unset KVPOOL_NATIVE"
            ) from error
        return None, f"the native core is not built, or not from these sources ({error})"


_POOL, WHY_PURE = _built(os.environ.get("KVPOOL_NATIVE", ""))
if WHY_PURE:
    _LOG.debug("pure Python: %s", WHY_PURE)
_SHA: str = _POOL.features()["sha256"] if _POOL is not None else "none"
_HASHER = _POOL if _SHA != "none" else None

NativeBlockPool: type | None = _POOL and _POOL.NativeBlockPool
"""`kvpool.core.block_pool.BlockPool` in C++."""

NativeRows: Callable[..., Any] | None = _POOL and _POOL.Rows
"""The rows of a decode batch over such a pool; see `_core.pyi`."""

hash_blocks: Callable[..., list[bytes] | None] | None = _HASHER and _HASHER.hash_blocks
hash_encoded: Callable[..., bytes] | None = _HASHER and _HASHER.hash_encoded
encode_blocks: Callable[..., list[bytes] | None] | None = _HASHER and _HASHER.encode_blocks
"""See `_core.pyi`. None too where the processor has no instructions for SHA-256: hashlib is faster then."""


def features() -> dict[str, str]:
    """What is in use: `core` is native or pure, `sha256` names the processor's instructions for it, or is hashlib."""
    return {"core": "native" if _POOL else "pure", "sha256": _SHA if _HASHER else "hashlib"}
