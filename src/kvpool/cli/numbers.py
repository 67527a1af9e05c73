"""Numbers as they are typed on a command line.

Knows nothing of: what they count.
"""

import argparse
import re
from collections.abc import Callable
from fractions import Fraction
from typing import TypeVar

from kvpool.errors import ConfigError
from kvpool.plan.devices import device

MOST_GIB = 2**30
T = TypeVar("T")
_LENGTH = re.compile(r"(\d[\d_]*(?:\.\d+)?)([kmKM]?)")
_TIMES = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}


def told(read: Callable[[str], T]) -> Callable[[str], T]:
    """A reader of arguments whose ConfigError is shown as it is."""

    def reader(text: str) -> T:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader


def count(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.replace("_", "").isdigit() or int(text.replace("_", "")) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text.replace("_", ""))


def length(text: str) -> int:
    """Tokens, as vLLM reads them: 8192, 32k for 32,000, 32K for 32,768, 25.6k."""
    match = _LENGTH.fullmatch(text)
    tokens = Fraction(match[1].replace("_", "")) * _TIMES[match[2]] if match else Fraction(0)
    if tokens < 1 or tokens.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no length: 8192, 32k for 32,000 or 32K for 32,768 tokens")
    return int(tokens)


def share(text: str) -> float:
    """More than 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: more than 0 and at most 1, such as 0.92")
    return value


def gib(text: str) -> tuple[int, ...]:
    """Bytes, from GiB: one figure, or one for each stage."""
    try:
        values = [Fraction(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        values = []
    if not values or not all(0 < value < MOST_GIB for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is no memory in GiB: 40, 27.5, or 24,40 for two stages")
    return tuple(int(value * 2**30) for value in values)


@told
def size(text: str) -> int:
    """Bytes, from a size with its unit: 20GB is decimal, 18.6GiB binary."""
    if re.fullmatch(r"0+(\.0+)?\s*[a-zA-Z]*", text):
        return 0
    found = device(text)
    if found.architecture is not None:
        raise argparse.ArgumentTypeError(f"{text!r} is a device: a size with its unit is needed, such as 20GB")
    return found.total_bytes


def stages(text: str) -> int | tuple[int, ...]:
    """How many pipeline stages, or how many layers each has."""
    parts = tuple(count(part) for part in text.split(","))
    return parts[0] if len(parts) == 1 else parts


def port(text: str) -> int:
    """0 to 65535."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """A time: more than 0."""
    value = _time(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds: more than 0")
    return value


def wait(text: str) -> float:
    """A time: 0 or more."""
    value = _time(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds: 0 or more")
    return value


def _time(text: str) -> float:
    """Below 0 for what is none."""
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if 0 <= value < float("inf") else -1.0
