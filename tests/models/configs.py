"""The shared configuration files, and models made of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.models.huggingface import read_model
from kvpool.plan.model import Model

NUM_CONFIGS = 154


def folder(shared: Path) -> Path:
    """Where the files are; skips without them."""
    found = shared / "data" / "configs"
    if not found.is_dir():
        pytest.skip(f"no {found}")
    return found


def config(shared: Path, name: str) -> dict[str, Any]:
    """One decoded file."""
    decoded: dict[str, Any] = json.loads((folder(shared) / f"{name}.json").read_text())
    return decoded


def model(shared: Path, name: str, kv_dtype: str = "auto") -> Model:
    """The model of one file."""
    return read_model(config(shared, name), name=name, kv_dtype=kv_dtype)
