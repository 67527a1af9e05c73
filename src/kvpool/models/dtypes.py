"""How many bytes an element takes: of a model, of its states, and of the cache.

Knows nothing of: layers, and how many elements there are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvpool.errors import ConfigError
from kvpool.models.fields import Fields
from kvpool.plan.spec import Attention, CachedSpec, Latent

ELEMENT_BYTES: Mapping[str, float] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp16": 2,
    "bf16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""By the names that configuration files use."""


ASKED_DTYPE = "asked dtype"
"""Not a name that a file has: where a dtype that was asked for stands among the fields."""


def element_bytes(dtype: str) -> float:
    """Bytes of one element. ConfigError for an unknown name."""
    name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
    if name not in ELEMENT_BYTES:
        raise ConfigError(f"dtype is {dtype!r}: {', '.join(ELEMENT_BYTES)} are known")
    return ELEMENT_BYTES[name]


def served_dtype(fields: Fields) -> str:
    """What a model is served in: what is asked for, or the file's dtype, or 16 bits where that is another width."""
    if fields.has(ASKED_DTYPE):
        return str(fields.get(ASKED_DTYPE)).removeprefix("torch.")
    dtype = fields.get("dtype")
    if dtype is None or dtype == "auto":
        fields.assume("dtype bfloat16, since the configuration has none")
        return "bfloat16"
    if not isinstance(dtype, str):
        raise fields.wrong("dtype", f"{', '.join(ELEMENT_BYTES)} are known")
    name = dtype.removeprefix("torch.")
    if element_bytes(name) != 2:
        fields.assume(f"dtype bfloat16: {name} weights are served in 16 bits")
        return "bfloat16"
    return name


@dataclass(frozen=True, slots=True)
class KVDtype:
    """How keys and values are kept.

    `element_bytes` None: as the model's own elements. `head_scale_bytes` stand beside the keys of each head and token,
    and beside its values; with `group_size` there is one scale byte for so many elements instead. A latent is split as
    `latent_scale_bytes` and `rope_element_bytes` say. A scale for a whole tensor takes nothing of a block.
    """

    name: str
    element_bytes: float | None
    source: str
    head_scale_bytes: int = 0
    group_size: int | None = None
    latent_scale_bytes: int = 0
    rope_element_bytes: float | None = None

    def keep(self, spec: CachedSpec, of_model: float) -> CachedSpec:
        """The spec with keys and values of this dtype; states stay as they are, and so do index caches."""
        size = of_model if self.element_bytes is None else self.element_bytes
        match spec:
            case Attention():
                scales = self.head_scale_bytes if self.group_size is None else -(-spec.head_dim // self.group_size)
                return replace(spec, element_bytes=size, scale_bytes=scales)
            case Latent():
                return replace(
                    spec,
                    element_bytes=size,
                    scale_bytes=self._latent_scales(spec),
                    rope_element_bytes=self.rope_element_bytes,
                )
            case _:
                return spec

    def _latent_scales(self, latent: Latent) -> int:
        if self.group_size is None:
            return self.latent_scale_bytes
        return -(-(latent.kv_lora_rank + latent.rope_dim) // self.group_size)


_PER_TENSOR = "one scale for a whole tensor, none in the blocks (vLLM's fp8 cache)"
_PER_HEAD = "an fp32 scale for every head and token, two for a latent (vLLM's per-token-head caches)"
KV_DTYPES: Mapping[str, KVDtype] = {
    dtype.name: dtype
    for dtype in (
        KVDtype("auto", None, "the model's own, or what its checkpoint was calibrated for"),
        KVDtype("float16", 2, "16 bits"),
        KVDtype("bfloat16", 2, "16 bits"),
        KVDtype("fp8", 1, _PER_TENSOR),
        KVDtype("fp8_e4m3", 1, _PER_TENSOR),
        KVDtype("fp8_e5m2", 1, _PER_TENSOR),
        KVDtype("fp8_per_token_head", 1, _PER_HEAD, head_scale_bytes=4, latent_scale_bytes=8),
        KVDtype("int8", 1, _PER_HEAD, head_scale_bytes=4, latent_scale_bytes=8),
        KVDtype("int8_per_token_head", 1, _PER_HEAD, head_scale_bytes=4, latent_scale_bytes=8),
        KVDtype("fp4", 0.5, "NVFP4: one fp8 scale for 16 elements", group_size=16),
        KVDtype("nvfp4", 0.5, "NVFP4: one fp8 scale for 16 elements", group_size=16),
        KVDtype(
            "fp8_ds_mla",
            1,
            "DeepSeek V3.2: four fp32 scales for 512 fp8 elements, the rotated part in 16 bits (656 B a token)",
            latent_scale_bytes=16,
            rope_element_bytes=2,
        ),
    )
}
_SPELLINGS = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "f16": "float16", "nvfp4_kv": "nvfp4"}


def kv_dtype(name: str) -> KVDtype:
    """By the name that vLLM's users type. ConfigError with the known names."""
    known = KV_DTYPES.get(_SPELLINGS.get(name.lower(), name.lower()))
    if known is None:
        raise ConfigError(f"KV dtype {name!r} is not known: {', '.join(KV_DTYPES)} are")
    return known
