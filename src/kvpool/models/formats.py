"""In how many bytes weights are kept, by what a configuration says of its quantisation.

Quantised are the matrices of layers. Embeddings, head, routers, norms, biases and towers stay in the model's own 16
bits, and so does what the configuration lists. Scales and zero points are counted.

Knows nothing of: how many weights there are, ranks.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.errors import ConfigError
from kvpool.models.dtypes import element_bytes, served_dtype
from kvpool.models.fields import Fields
from kvpool.models.weights import Part, Weight


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is kept: bits of an element, and of what stands beside each block of elements.

    A block is so many outputs by so many inputs; 0: all of them. A scale for a whole matrix takes nothing.
    """

    bits: int
    scale_bits: int = 0
    block_outputs: int = 1
    block_inputs: int = 0

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Of one matrix, rounded up."""
        bits = num_outputs * num_inputs * self.bits
        if self.scale_bits:
            blocks = -(-num_outputs // (self.block_outputs or num_outputs))
            bits += blocks * -(-num_inputs // (self.block_inputs or num_inputs)) * self.scale_bits
        return -(-bits // 8)


_NVFP4 = WeightFormat(4, scale_bits=8, block_inputs=16)
_MXFP4 = WeightFormat(4, scale_bits=8, block_inputs=32)
_FP8_TENSOR = WeightFormat(8)
_FP8_CHANNEL = WeightFormat(8, scale_bits=32)
_KEPT = (Part.EMBEDDINGS, Part.HEAD, Part.ROUTER, Part.TOWER, Part.NORMS)


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """The formats of a model's weights. None: as the model's own elements."""

    element_bytes: int
    dense: WeightFormat | None = None
    experts: WeightFormat | None = None
    kept: tuple[str, ...] = ()
    """Modules in the model's own elements: names, `*` patterns, or regular expressions after `re:`."""

    def num_bytes(self, weight: Weight, path: str) -> int:
        """Of one copy of a weight; `path` is its module: `model.layers.3.self_attn.q_proj`."""
        chosen = self.experts if weight.part == Part.EXPERTS else self.dense
        if chosen is None or weight.num_inputs == 1 or weight.part in _KEPT or self._keeps(path):
            return weight.num_outputs * weight.num_inputs * self.element_bytes
        return chosen.num_bytes(weight.num_outputs, weight.num_inputs)

    def _keeps(self, path: str) -> bool:
        return any(_is_named(path, name) for name in self.kept)


def _is_named(path: str, name: str) -> bool:
    """Whether a module, or one that it is in, is what a list calls `name`, in one of the spellings of checkpoints."""
    if name.startswith("re:"):
        return any(re.match(name[3:], spelling) for spelling in _spellings(path))
    if "*" in name:
        return any(fnmatch.fnmatchcase(f"{spelling}{end}", name) for spelling in _spellings(path) for end in ("", "."))
    inner = name[name.find("layers.") :] if "layers." in name else name
    return any(f".{inner}." in f".{spelling}." for spelling in _spellings(path))


def _spellings(path: str) -> Iterator[str]:
    yield path
    yield path.replace(".self_attn.", ".attn.").replace(".mlp.", ".ffn.")
    yield path.replace(".self_attn.", ".mixer.").replace(".mlp.", ".mixer.").replace("model.", "backbone.")
    yield path.replace(".shared_experts.", ".shared_expert.")


def weight_scheme(fields: Fields, dtype: str | None = None) -> WeightScheme:
    """What the configuration says; `dtype`: of the elements that are not quantised, in place of the file's.

    ConfigError when there is a quantisation that is not known, or too little is said of it. What was assumed is told in
    `fields.assumed`.
    """
    size = int(element_bytes(dtype or served_dtype(fields)))
    config = fields.get("quantization_config") or fields.get("compression_config")
    if config is None:
        return WeightScheme(size)
    if not isinstance(config, Mapping):
        raise fields.wrong("quantization_config", "an object is needed")
    dense, experts = _formats(fields, config)
    return WeightScheme(size, dense, experts, kept=_kept(fields, config))


def _formats(fields: Fields, config: Mapping[str, Any]) -> tuple[WeightFormat | None, WeightFormat | None]:
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else None)
    if method == "mxfp4":
        return None, _MXFP4
    read = _METHODS.get(str(method))
    if read is None:
        raise ConfigError(
            f"quantization_config.quant_method is {method!r}: {', '.join([*_METHODS, 'mxfp4'])} are known"
        )
    dense = read(config)
    return dense, _expert_format(fields, config) or dense


def _expert_format(fields: Fields, config: Mapping[str, Any]) -> WeightFormat | None:
    """Where experts are kept in another format than the rest."""
    if config.get("moe_quant_algo"):
        return _by_algorithm(str(config["moe_quant_algo"]), "moe_quant_algo")
    if fields.get("expert_dtype") is None:
        return None
    if fields.get("expert_dtype") != "fp4":
        raise fields.wrong("expert_dtype", "fp4 is known")
    return _MXFP4


def _fp8(config: Mapping[str, Any]) -> WeightFormat:
    if config.get("weight_block_size") is None:
        return _FP8_TENSOR
    outputs, inputs = _block(config["weight_block_size"], "weight_block_size")
    return WeightFormat(8, scale_bits=32, block_outputs=outputs, block_inputs=inputs)


def _block(value: object, name: str) -> tuple[int, int]:
    match value:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise ConfigError(f"quantization_config.{name} is {value!r}: two whole numbers of 1 or more are needed")


def _modelopt(config: Mapping[str, Any]) -> WeightFormat:
    if config.get("quant_algo") is None:
        raise ConfigError("quantization_config lacks quant_algo: the bytes of the weights are not guessed at")
    return _by_algorithm(str(config["quant_algo"]), "quant_algo")


def _by_algorithm(algorithm: str, field: str) -> WeightFormat:
    if algorithm not in _ALGORITHMS:
        known = ", ".join(_ALGORITHMS)
        raise ConfigError(f"quantization_config.{field} is {algorithm!r}, which does not tell the bytes: {known} do")
    return _ALGORITHMS[algorithm]


_ALGORITHMS = {"FP8": _FP8_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": _FP8_CHANNEL, "NVFP4": _NVFP4, "MXFP4": _MXFP4}


def _compressed_tensors(config: Mapping[str, Any]) -> WeightFormat:
    groups = config.get("config_groups")
    if not groups:
        return _by_layout(str(config.get("format")))
    parts = list(groups.values()) if isinstance(groups, Mapping) else [None]
    weights = [part.get("weights") if isinstance(part, Mapping) else None for part in parts]
    formats = {_of_group(each if isinstance(each, Mapping) else {}) for each in weights}
    if len(formats) > 1:
        raise ConfigError("quantization_config.config_groups have weights of several formats: the bytes are not known")
    return formats.pop()


def _of_group(weights: Mapping[str, Any]) -> WeightFormat:
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int):
        raise ConfigError("quantization_config.config_groups lack weights.num_bits: the bytes are not guessed at")
    if not isinstance(size, int) or size < 1:
        block = weights.get("block_structure")
        outputs, inputs = (1, 0) if block is None else _block(block, "config_groups: weights.block_structure")
        return WeightFormat(bits, scale_bits=16 if bits < 8 else 32, block_outputs=outputs, block_inputs=inputs)
    scale = 8 if weights.get("type") == "float" and bits == 4 else 16
    zero = 0 if weights.get("symmetric", True) else bits
    return WeightFormat(bits, scale_bits=scale + zero, block_inputs=size)


def _by_layout(layout: str) -> WeightFormat:
    if layout not in _LAYOUTS:
        raise ConfigError(
            f"quantization_config lacks config_groups, and its format {layout!r} does not tell the bytes: "
            f"{', '.join(_LAYOUTS)} do"
        )
    return _LAYOUTS[layout]


_LAYOUTS = {
    "float-quantized": _FP8_CHANNEL,
    "naive-quantized": _FP8_CHANNEL,
    "int-quantized": _FP8_CHANNEL,
    "nvfp4-pack-quantized": _NVFP4,
}


def _grouped(config: Mapping[str, Any]) -> WeightFormat:
    """GPTQ and AWQ: a 16-bit scale and a zero point for each group of inputs."""
    bits, size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    if not isinstance(bits, int) or not isinstance(size, int):
        raise ConfigError("quantization_config lacks bits or group_size: the bytes of the weights are not guessed at")
    return WeightFormat(bits, scale_bits=16 + bits, block_inputs=max(size, 0))


_METHODS = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: _FP8_CHANNEL,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gptq": _grouped,
    "awq": _grouped,
}

_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")


def _kept(fields: Fields, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that stay as they are: the configuration's list, or, told as assumed, what is usual."""
    listed = next((config[name] for name in _LISTS if config.get(name) is not None), None)
    if isinstance(listed, list | tuple):
        return tuple(map(str, listed))
    usual = "embeddings, head, norms and routers"
    if config.get("quant_algo") == "NVFP4" and fields.has("kv_lora_rank"):
        fields.assume(f"attention, {usual} in 16 bits: the quantisation lists nothing that it leaves out")
        return ("self_attn",)
    fields.assume(f"{usual} in 16 bits, all else quantised: the quantisation lists nothing that it leaves out")
    return ()
