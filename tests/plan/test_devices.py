"""Devices by name and by size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.plan.devices import DEVICES, Device, device

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "H100"),
        ("H100-80GB", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-SXM5-80GB", "H100"),
        ("H100 NVL", "H100 NVL"),
        ("RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("a6000", "RTX A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("a100_80g", "A100-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("a10", "A10"),
        ("AMD Instinct MI300X", "MI300X"),
        ("v5e", "TPU v5e"),
    ],
)
def test_a_name_in_any_spelling(text: str, name: str) -> None:
    assert device(text).name == name


@pytest.mark.parametrize("known", DEVICES, ids=lambda known: known.name)
def test_every_device_is_found_and_has_a_source(known: Device) -> None:
    assert device(known.name) == known
    assert device(known.name.lower().replace(" ", "_")) == known
    assert known.source
    assert known.maker in {"nvidia", "amd", "google"}


@pytest.mark.parametrize("known", DEVICES, ids=lambda known: known.name)
def test_less_is_reported_than_marketed(known: Device) -> None:
    """Within a tenth of the data sheet's figure, taken as GiB, and never more."""
    assert known.marketed_gb is not None
    assert 0.9 * known.marketed_gb < known.total_gib < known.marketed_gb


@pytest.mark.parametrize(
    ("text", "total_bytes"),
    [
        ("80GB", 80_000_000_000),
        ("80 gb", 80_000_000_000),
        ("79.18GiB", round(79.18 * GIB)),
        ("24GiB", 24 * GIB),
        ("512 MiB", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        ("25250627584", 25_250_627_584),
        ("25,250,627,584", 25_250_627_584),
    ],
)
def test_a_size(text: str, total_bytes: int) -> None:
    given_size = device(text)
    assert (given_size.total_bytes, given_size.maker, given_size.source) == (total_bytes, None, "given")


@given(st.integers(2**20, 2**50))
def test_bytes_are_exact(total_bytes: int) -> None:
    assert device(str(total_bytes)).total_bytes == total_bytes
    assert device(f"{total_bytes}B").total_bytes == total_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a100", r"comes in 2 sizes: A100-40GB or A100-80GB"),
        ("H101", r"nearest are H100, .*'79.18GiB'"),
        ("h200-80gb", r"nearest are H200"),
        ("", r"no device known"),
        ("-5GB", r"no device known"),
        ("80", r"80 bytes .*'80GB'"),
        ("0GB", r"0 bytes"),
        ("10 parsecs", r"unit 'parsecs': one of GB, GiB"),
    ],
)
def test_what_is_refused_names_the_way_out(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        device(text)


@given(st.one_of(st.text(max_size=12), st.from_regex(r"[0-9]{1,400}(\.[0-9]+)? ?[kKmMgGtT]?i?[bB]?", fullmatch=True)))
def test_any_text_is_a_device_or_a_config_error(text: str) -> None:
    try:
        found = device(text)
    except ConfigError:
        return
    assert found.total_bytes >= 2**20
