"""What a checkpoint's quantisation says about the cache.

Knows nothing of: how many weights there are.
"""

from collections.abc import Mapping
from typing import Any


def kv_dtype_of_checkpoint(quantization: Any) -> str | None:
    """The KV dtype that the checkpoint was calibrated for, as vLLM takes it for `auto`; None where it says nothing."""
    if not isinstance(quantization, Mapping):
        return None
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        scheme = f"{scheme.get('type')}{scheme.get('num_bits')}"
    return _BY_SCHEME.get(str(scheme).lower())


_BY_SCHEME = {"fp8": "fp8", "float8": "fp8", "nvfp4": "nvfp4", "float4": "nvfp4", "int8": "int8"}
