"""Accelerators by name: the total memory that the engine is told of, which is less than the name promises.

An engine multiplies its utilisation by what the driver reports (`torch.cuda.mem_get_info`), after page tables, ECC and
the driver have had their share: 79.18 GiB for a card of 80 GB. Drivers differ by about 0.1 GiB; `source` says where a
figure was read. A device that is not here is given by its size.

Knows nothing of: models, engines, utilisation, how many devices there are.
"""

import difflib
import re
from dataclasses import dataclass
from fractions import Fraction

from kvpool.errors import ConfigError

_GIB = 2**30


ARCHITECTURES = {
    "volta": "nvidia",
    "turing": "nvidia",
    "ampere": "nvidia",
    "ada": "nvidia",
    "hopper": "nvidia",
    "blackwell": "nvidia",
    "cdna": "amd",
    "tpu": "google",
}
"""Every architecture, and its maker."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or as much of one as an engine sees."""

    name: str
    total_bytes: int
    """As the driver reports it to the engine."""
    source: str
    """Where `total_bytes` was read."""
    architecture: str | None = None
    """One of `ARCHITECTURES`. None where only the size is known."""
    marketed_gb: int | None = None
    """The figure of the name and the data sheet, which tells two sizes of one device apart."""

    @property
    def total_gib(self) -> float:
        return self.total_bytes / _GIB

    @property
    def maker(self) -> str | None:
        """nvidia, amd or google; None where only the size is known."""
        return None if self.architecture is None else ARCHITECTURES[self.architecture]


def _row(name: str, architecture: str, marketed_gb: int, total_gib: float, source: str) -> Device:
    return Device(name, round(total_gib * _GIB), source, architecture, marketed_gb)


_OOM = "out-of-memory message of torch"

DEVICES = (
    _row("T4", "turing", 16, 14.56, f"{_OOM}, CatVTON issue 133"),
    _row("V100-16GB", "volta", 16, 15.77, f"{_OOM}, vllm issue 11251"),
    _row("V100-32GB", "volta", 32, 31.73, f"{_OOM}, several public notes on V100-SXM2-32GB"),
    _row("RTX 3090", "ampere", 24, 23.68, f"{_OOM}, vllm issue 16343 (23.69 in 2140)"),
    Device("RTX 4090", 25_250_627_584, "bench record of LLMServingSim, RTX4090 Llama-3.1-8B", "ada", 24),
    _row("RTX 5080", "blackwell", 16, 15.48, f"{_OOM}, vllm issue 14452"),
    _row("RTX 5090", "blackwell", 32, 31.37, f"{_OOM}, Wan2.1 issue 465 (31.34 to 31.39 elsewhere)"),
    _row("RTX A6000", "ampere", 48, 47.54, "get_device_properties of torch, 48,676 MB, public kernel notes"),
    _row("RTX 6000 Ada", "ada", 48, 44.43, f"{_OOM}, MTVCrafter issue 21, ECC on"),
    _row(
        "RTX PRO 6000",
        "blackwell",
        96,
        94.97,
        "get_device_properties of torch, 97,250 MB, public notes on the server edition",
    ),
    _row("A10", "ampere", 24, 22.06, f"{_OOM}, vllm issue 928 (22.18 in MiniCPM-V issue 640)"),
    _row("A10G", "ampere", 24, 22.06, "get_device_properties of torch, 22,587 MB, public notes"),
    _row("A40", "ampere", 48, 44.35, "get_device_properties of torch, 45,416 MB, public notes"),
    Device("L4", 23_580_639_232, "usage statistics in the documentation of vLLM", "ada", 24),
    _row("L40S", "ada", 48, 44.39, f"{_OOM}, public notes with vLLM (44.52 with older drivers)"),
    _row("A100-40GB", "ampere", 40, 39.50, f"{_OOM}, CoSeR issue 10"),
    _row("A100-80GB", "ampere", 80, 79.15, f"{_OOM}, vllm issue 4408 (79.25 with other drivers)"),
    _row("H100", "hopper", 80, 79.18, "start-up log of vLLM 0.11.0 (79.19 in 0.19.0)"),
    _row("H100 NVL", "hopper", 94, 93.00, f"{_OOM}, VACE issue 56 (93.10 elsewhere)"),
    _row("H20", "hopper", 96, 95.00, f"{_OOM}, DiffSynth-Studio issue 1238"),
    _row("GH200", "hopper", 96, 94.50, f"{_OOM}, vllm issue 9630"),
    _row("H200", "hopper", 141, 139.80, f"{_OOM}, many public notes"),
    _row("B200", "blackwell", 180, 178.35, "start-up log of vLLM (178.36 in vllm pull 21489)"),
    _row("B300", "blackwell", 288, 267.69, "start-up log of vLLM on B300 SXM6"),
    _row("GB10", "blackwell", 128, 121.69, "start-up log of vLLM on DGX Spark; the processor shares it"),
    _row("MI300X", "cdna", 192, 191.98, "start-up logs of vLLM"),
    _row("MI325X", "cdna", 256, 255.98, f"{_OOM}, vllm issue 41962"),
    _row("MI355X", "cdna", 288, 287.98, "start-up refusal of vLLM, public notes"),
    _row("TPU v5e", "tpu", 16, 15.75, "compiler message, kubernetes-engine-samples pull 1467"),
    Device("TPU v6e", 33_550_237_696, "usage statistics of vLLM, vllm pull 16211", "tpu", 32),
)
"""In no order that matters. Left out, as no log was found that names them: H800, GB200, Gaudi 3, RTX A5000."""

_UNIT_BYTES = {"b": 1} | {
    f"{prefix}{suffix}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_LEAST_BYTES = 2**20
_TRIMMINGS = re.compile(
    r"nvidia|geforce|rtx|tesla|amd|instinct|google|tpu|sxm\d*|pcie|hbm\d*e?|"
    r"blackwell|generation|workstation|server|edition|[^a-z0-9]"
)


def device(text: str) -> Device:
    """The device of that name, or one of that size.

    Case, separators, the maker's name and the form of the card do not count: "h100", "NVIDIA H100 80GB HBM3" and
    "H100-SXM5-80GB" are one. A size is decimal in GB ("80GB"), binary in GiB ("79.18GiB"), or bytes without a unit.
    ConfigError for an unknown name, with the nearest known ones, and for a name that comes in two sizes.
    """
    size = _SIZE.fullmatch(text.strip().lower().replace(",", "").replace("_", ""))
    return _of_size(text.strip(), *size.groups()) if size else _of_name(text)


def _of_size(text: str, number: str, unit: str) -> Device:
    if unit not in {*_UNIT_BYTES, ""}:
        raise ConfigError(f"{text!r} has the unit {unit!r}: one of GB, GiB, MB, MiB, TB, TiB, or none for bytes")
    total_bytes = round(Fraction(number) * _UNIT_BYTES.get(unit, 1))
    if total_bytes < _LEAST_BYTES:
        raise ConfigError(f"a device of {total_bytes:,} bytes ({text!r}): name the unit, as in '80GB'")
    return Device(text, total_bytes, "given")


def _of_name(text: str) -> Device:
    key = _key(text)
    found = [each for each in DEVICES if key in _keys(each)]
    if len(found) == 1:
        return found[0]
    names = " or ".join(each.name for each in found)
    if found:
        raise ConfigError(f"{text!r} comes in {len(found)} sizes: {names}")
    raise ConfigError(f"{text!r} is no device known here: {_nearest(key)}, or give its memory, as in '79.18GiB'")


def _keys(each: Device) -> set[str]:
    """What it may be called: its name, with or without the size of the data sheet."""
    base = _base(each)
    return {base, f"{base}{each.marketed_gb}gb", f"{base}{each.marketed_gb}g"}


def _base(each: Device) -> str:
    return _key(each.name).removesuffix(f"{each.marketed_gb}gb")


def _key(text: str) -> str:
    return _TRIMMINGS.sub("", text.lower())


def _nearest(key: str) -> str:
    near = sorted(DEVICES, key=lambda each: difflib.SequenceMatcher(None, key, _base(each)).ratio(), reverse=True)
    return "the nearest are " + ", ".join(each.name for each in near[:3])
