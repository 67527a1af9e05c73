"""A model's `config.json`, from wherever the command line says it is.

Knows nothing of: what its fields mean.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError
from kvpool.models.description import Description, describe


def read_description(
    path: str, *, kv_dtype: str = "auto", dtype: str | None = None, model_type: str | None = None
) -> Description:
    """The model of a file, of the folder that it is in, or of standard input (-). ConfigError tells which file."""
    try:
        name, config = _read(path)
        return describe(config, name=name, kv_dtype=kv_dtype, dtype=dtype, model_type=model_type)
    except ConfigError as error:
        raise ConfigError(f"{'standard input' if path == '-' else path}: {error}") from None


def _read(path: str) -> tuple[str, Any]:
    """The name to show, and the decoded file."""
    if path == "-":
        return "standard input", _decoded(sys.stdin.buffer.read())
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}") from None
    return (file.parent.resolve().name if file.name == "config.json" else file.stem), _decoded(content)


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is no JSON: {error}") from None
