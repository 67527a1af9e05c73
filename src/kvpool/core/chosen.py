"""The block pool that the cache uses: the native one where it is there and wanted, otherwise the Python one."""

from typing import cast

from kvpool._native import NativeBlockPool
from kvpool.core.block_pool import BlockPool

ChosenPool = cast("type[BlockPool]", NativeBlockPool) if NativeBlockPool is not None else BlockPool
"""Both have the same verbs and give the same answers; see `tests/model/test_native_twin.py`."""
