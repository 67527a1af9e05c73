"""What a checkpoint's quantisation says about the cache.

Knows nothing of: how many weights there are.
"""

from collections.abc import Mapping
from typing import Any

UNKNOWN = "unknown"


def kv_dtype_of_checkpoint(quantization: Any) -> str | None:
    """The KV dtype that the checkpoint was calibrated for, as vLLM takes it for `auto`; None where it says nothing."""
    if not isinstance(quantization, Mapping):
        return None
    inner = quantization.get("quantization")
    places = (quantization, inner) if isinstance(inner, Mapping) else (quantization,)
    found = (place.get(name) for place in places for name in ("kv_cache_scheme", "kv_cache_quant_algo"))
    scheme = next(filter(None, found), None)
    if isinstance(scheme, Mapping):
        scheme = f"{scheme.get('type')}{scheme.get('num_bits')}"
    return None if scheme is None else _BY_SCHEME.get(str(scheme).lower(), UNKNOWN)


_BY_SCHEME = {"fp8": "fp8", "float8": "fp8", "nvfp4": "nvfp4", "float4": "nvfp4", "int8": "int8"}
